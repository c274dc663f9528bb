"""Finds out which sequence breaks a step, so that it alone fails and the others go on.

After a failed step, the sequences of its batch are tried in halves, each on its own, until the
culprit stands alone: log2(n) steps more for one culprit among n. A failure for want of memory first
makes steps smaller. If one sequence after the other fails alone and nothing succeeds in between,
the fault lies not with them, and the engine gives up without blaming anyone. Knows sequence ids and
exceptions only.
"""

from collections.abc import Iterable

from headrace.engine.errors import EngineError, Failure

MOST_LONE_FAILURES = 4
STEPS_BEFORE_LARGER = 64


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, CUDA's or the CPU allocator's way to say that memory is short."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
    )


class FaultIsolation:
    """Which sequences may run together next, and how many tokens a step may have."""

    def __init__(self, max_tokens: int, smallest: int) -> None:
        self.max_tokens = max_tokens
        self.token_limit = max_tokens
        self._smallest = smallest
        self._suspects: list[list[int]] = []
        self._lone: dict[int, BaseException] = {}
        self._quiet_steps = 0

    @property
    def searching(self) -> bool:
        return bool(self._suspects) or bool(self._lone)

    def subset(self, running: Iterable[int]) -> set[int] | None:
        """The sequences to run now; None: all, as ever."""
        if not self.searching:
            return None
        alive = set(running)
        while self._suspects:
            chosen = alive.intersection(self._suspects[-1])
            if chosen:
                return chosen
            self._suspects.pop()
        return alive.difference(self._lone)

    def next_suspects(self) -> bool:
        """The subset had nothing to compute: whether there is another one."""
        if self._suspects:
            self._suspects.pop()
        return bool(self._suspects)

    def succeeded(self) -> dict[int, Failure]:
        """The step went well. Returns the sequences that have failed alone before it."""
        if self._suspects:
            self._suspects.pop()
        self._quiet_steps += 1
        if self.token_limit < self.max_tokens and self._quiet_steps >= STEPS_BEFORE_LARGER:
            self.token_limit = min(2 * self.token_limit, self.max_tokens)
            self._quiet_steps = 0
        return self.verdict()

    def verdict(self) -> dict[int, Failure]:
        """Those that failed alone, as failures; they are no suspects any more."""
        failures = {seq_id: _failure(error) for seq_id, error in self._lone.items()}
        self._lone.clear()
        return failures

    def failed(self, seq_ids: list[int], num_tokens: int, error: BaseException) -> None:
        """A step of these sequences raised. Raises EngineError when the fault is not theirs."""
        self._quiet_steps = 0
        if is_out_of_memory(error) and num_tokens > self._smallest:
            self.token_limit = max(num_tokens // 2, 1)
            return
        suspects = self._suspects.pop() if self._suspects else list(seq_ids)
        if len(seq_ids) == 1:
            self._lone[seq_ids[0]] = error
            rest = [seq_id for seq_id in suspects if seq_id != seq_ids[0]]
            if rest:
                self._suspects.append(rest)
            if len(self._lone) >= MOST_LONE_FAILURES:
                raise EngineError(
                    f"{len(self._lone)} sequences in a row failed alone and none succeeded: the "
                    f"model or the device is at fault, not they ({type(error).__name__}: {error})"
                ) from error
            return
        half = len(seq_ids) // 2
        rest = [seq_id for seq_id in suspects if seq_id not in set(seq_ids)]
        self._suspects.extend(part for part in (rest, seq_ids[half:], seq_ids[:half]) if part)


def _failure(error: BaseException) -> Failure:
    if is_out_of_memory(error):
        return Failure(
            "out_of_memory",
            f"the request does not fit into memory even alone ({error}); a worker with more "
            "memory, or a smaller --max-model-len or --kv-cache-memory, may serve it",
            retryable=True,
        )
    return Failure(
        "internal_error",
        f"computing this request alone raised {type(error).__name__}: {error}",
        retryable=True,
    )
