"""Finds out which sequence breaks a step, so that it alone fails and the others go on.

After a failed step, the sequences of its batch are tried in halves, each on its own, until the
culprit stands alone: about 2 log2(n) steps for one among n. Who fails alone is tried once more, so
that a fault that passes costs nobody his answer. A failure for want of memory first makes steps
smaller. If one sequence after the other fails alone and nothing succeeds in between, the fault lies
not with them, and the engine gives up without blaming anyone. Knows sequence ids and exceptions
only.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.engine.errors import EngineError, Failure

MOST_LONE_FAILURES = 4
STEPS_BEFORE_LARGER = 32


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, CUDA's or the CPU allocator's way to say that memory is short."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
    )


@dataclass(frozen=True, slots=True)
class Restriction:
    """What the next step may have: these running sequences, and newcomers or not."""

    only: set[int]
    admit: bool


class FaultIsolation:
    """Which sequences may run together next, and how many tokens a step may have.

    `token_limit` is lowered while memory is short and grows back after quiet steps.
    """

    def __init__(self, max_tokens: int, smallest: int) -> None:
        self.max_tokens = max_tokens
        self.token_limit = max_tokens
        self._smallest = smallest
        self._suspects: list[list[int]] = []
        self._struck: set[int] = set()
        self._lone: dict[int, BaseException] = {}
        self._blamed_in_vain = 0
        self._quiet_steps = 0

    @property
    def searching(self) -> bool:
        return bool(self._suspects) or bool(self._lone)

    def restriction(self, running: Iterable[int]) -> Restriction | None:
        """What to run now; None: all, as ever.

        Once only sequences that failed alone are left to blame, others run, to show whether
        anything can.
        """
        if not self.searching:
            return None
        alive = set(running)
        while self._suspects:
            chosen = alive.intersection(self._suspects[-1])
            if chosen:
                return Restriction(chosen, admit=False)
            self._suspects.pop()
        return Restriction(alive.difference(self._lone), admit=True)

    def nothing_to_run(self) -> dict[int, Failure]:
        """The restriction left nothing to compute: go on to the next one, or to the verdict."""
        if self._suspects:
            self._suspects.pop()
        if self._suspects or not self._lone:
            return {}
        self._blamed_in_vain += len(self._lone)
        return self._verdict()

    def succeeded(self, seq_ids: list[int]) -> dict[int, Failure]:
        """A step of these went well. Returns those that have failed alone before it."""
        if self._suspects:
            self._suspects.pop()
        self._struck.difference_update(seq_ids)
        self._blamed_in_vain = 0
        self._quiet_steps += 1
        if self.token_limit < self.max_tokens and self._quiet_steps >= STEPS_BEFORE_LARGER:
            self.token_limit = min(2 * self.token_limit, self.max_tokens)
            self._quiet_steps = 0
        return self._verdict() if self._lone and not self._suspects else {}

    def failed(self, seq_ids: list[int], num_tokens: int, error: BaseException) -> None:
        """A step of these sequences raised. Raises EngineError when the fault is not theirs."""
        self._quiet_steps = 0
        if is_out_of_memory(error) and num_tokens > self._smallest:
            self.token_limit = max(num_tokens // 2, 1)
            return
        group = self._suspects.pop() if self._suspects else []
        rest = [seq_id for seq_id in group if seq_id not in set(seq_ids)]
        if rest:
            self._suspects.append(rest)
        if len(seq_ids) > 1:
            half = len(seq_ids) // 2
            self._suspects += [seq_ids[half:], seq_ids[:half]]
        elif seq_ids[0] not in self._struck:
            self._struck.add(seq_ids[0])
            self._suspects.append(seq_ids)
        else:
            self._struck.discard(seq_ids[0])
            self._lone[seq_ids[0]] = error
            self._give_up_in_time(error)

    def _give_up_in_time(self, error: BaseException) -> None:
        count = len(self._lone) + self._blamed_in_vain
        if count >= MOST_LONE_FAILURES:
            raise EngineError(
                f"{count} sequences in a row failed alone and none succeeded: the model or the "
                f"device is at fault, not they ({type(error).__name__}: {error})"
            ) from error

    def _verdict(self) -> dict[int, Failure]:
        failures = {seq_id: _failure(error) for seq_id, error in self._lone.items()}
        self._lone.clear()
        return failures


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
