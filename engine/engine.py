"""The engine: sequences in, finished sequences out, one step at a time.

`Engine.step` is the whole loop: schedule, execute, update. The host half (scheduler, stopping) and
the device half (runner) meet only here. Every sequence that is added ends exactly once: with an
answer, or with a Failure that says why; whatever one sequence does, the others go on. Nothing here
knows Redis, queues or jobs.
"""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace.engine.batch import Runner, SampledTokens, ScheduledBatch, StepHandle
from headrace.engine.config import EngineConfig
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.errors import EngineError, Failure, RequestError
from headrace.engine.faults import FaultIsolation
from headrace.engine.kv.block_manager import BlockManager
from headrace.engine.scheduler import Scheduler, SchedulerLimits
from headrace.engine.sequence import FinishReason, Sequence, SequenceStatus
from headrace.engine.stats import StepOutput, StepStats
from headrace.engine.stopping import StopChecker
from headrace.engine.twins import Twins, copy_answer

if TYPE_CHECKING:  # torch is loaded with a model, not before
    from headrace.engine.runner import ModelRunner


class EngineTokenizer(Protocol):
    """What the engine itself needs of a tokenizer; `tokenizer.Tokenizer` has more."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_token_ids(self) -> dict[str, int]: ...
    def text_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine can serve, in tokens, sequences and blocks.

    `max_model_len`: prompt and answer together; the smallest of what the model was made for, what
    the operator allows and what the KV pool holds. `vocab_size`: ids that a request may name.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    vocab_size: int


class Engine:
    """One model, one scheduler, one runner. `info`: what the runner runs on and with, in words.

    `steps_in_flight` 1: a step is scheduled and launched before the tokens of the one before are
    read, for runners whose `execute` returns at once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: EngineTokenizer,
        limits: EngineLimits,
        *,
        eos_token_ids: tuple[int, ...] = (),
        deduplicate: bool = True,
        steps_in_flight: int = 0,
        model_name: str = "",
        fingerprint: str = "",
        digest: str = "",
        default_sampling: dict[str, Any] | None = None,
        info: str = "",
    ) -> None:
        self.runner = runner
        self.tokenizer: Any = tokenizer
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        self.model_name = model_name
        self.fingerprint = fingerprint
        self.info = info
        self.digest = digest
        self.default_sampling = dict(default_sampling or {})
        self._scheduler = scheduler
        self._steps_in_flight = steps_in_flight
        self._in_flight: deque[tuple[ScheduledBatch, StepHandle]] = deque()
        self._twins = Twins() if deduplicate else None
        self._faults = FaultIsolation(limits.max_num_batched_tokens, limits.block_size)
        self._sequences: dict[int, Sequence] = {}
        self._checkers: dict[int, StopChecker] = {}
        self._ended: list[Sequence] = []
        self._last_seq_id = 0
        self._device_seconds = 0.0

    @classmethod
    def load(cls, config: EngineConfig) -> "Engine":
        """Load a model and measure what the machine has room for. Raises CheckpointError."""
        from headrace.engine.loading.source import resolve_model
        from headrace.engine.runner import load_runner
        from headrace.engine.tokenizer import load_tokenizer

        # Reading weights leaves Python's lock to others; a tokenizer takes a third of a second.
        with ThreadPoolExecutor(1, "tokenizer") as beside:
            loading = beside.submit(load_tokenizer, resolve_model(config.model))
            runner = load_runner(config)
            tokenizer = loading.result()
        return cls.of(config, runner, tokenizer, tokenizer.eos_token_ids)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        runner: "ModelRunner",
        tokenizer: EngineTokenizer,
        eos_token_ids: tuple[int, ...] = (),
    ) -> "Engine":
        """An engine around a runner that is loaded already (`runner.build_runner` makes one of a
        checkpoint in memory). `eos_token_ids`: the tokenizer's, beside the checkpoint's own."""
        limits = EngineLimits(
            max_model_len=min(runner.max_model_len, runner.num_blocks * runner.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            vocab_size=min(runner.vocab_size, tokenizer.vocab_size),
        )
        scheduler = Scheduler(
            SchedulerLimits(
                limits.max_num_seqs, limits.max_num_batched_tokens, config.max_prefix_delay
            ),
            BlockManager(limits.num_blocks, limits.block_size, config.enable_prefix_caching),
            group_prefixes=config.enable_shared_prefix_attention,
        )
        return cls(
            scheduler,
            runner,
            tokenizer,
            limits,
            eos_token_ids=tuple(dict.fromkeys((*runner.eos_token_ids, *eos_token_ids))),
            deduplicate=config.deduplicate,
            steps_in_flight=runner.steps_in_flight,
            model_name=runner.model_name,
            fingerprint=str(runner.fingerprint),
            digest=runner.fingerprint.digest,
            default_sampling=runner.default_sampling,
            info=str(runner.info),
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._sequences) or bool(self._ended) or bool(self._in_flight)

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    @property
    def num_free_slots(self) -> int:
        """How many more sequences the batch could take. Twins of others cost little."""
        followers = len(self._twins) if self._twins is not None else 0
        active = len(self._sequences) - followers + followers // 4
        return max(0, self.limits.max_num_seqs - active)

    @property
    def kv_usage(self) -> float:
        """Share of the pool's blocks that sequences hold, 0 to 1."""
        return self._scheduler.blocks.usage

    def add(self, seq: Sequence) -> None:
        """Take a sequence in; its `seq_id` is set here. Raises RequestError if it can't be served.

        `output_token_ids` that are there already count as generated: the sequence goes on after
        them. One that needs no step (max_tokens 0, or its outputs end it) is finished in the next
        step's output.
        """
        self._check(seq)
        self._last_seq_id += 1
        seq.seq_id = self._last_seq_id
        seq.arrival_time = seq.arrival_time or time.time()
        room = self.limits.max_model_len - seq.num_prompt_tokens
        max_tokens = seq.params.max_tokens
        seq.max_output_tokens = room if max_tokens is None else min(max_tokens, room)
        seq.finish_reason = seq.stop_reason = seq.failure = None
        seq.num_cached_tokens = 0
        self._sequences[seq.seq_id] = seq
        self._start(seq)

    def abort(self, seq_id: int) -> Sequence | None:
        """End an unfinished sequence now, with what it has; None if there is none of that id.

        It is returned here and not reported by `step`.
        """
        seq = self._sequences.get(seq_id)
        if seq is None:
            return None
        checker = self._checkers.get(seq_id)
        if checker is not None:
            checker.close()
        seq.finish_reason = FinishReason.ABORTED
        followers = self._leave(seq, answered=False)
        for follower in followers:
            follower.output_token_ids = list(seq.output_token_ids)
            follower.logprobs = list(seq.logprobs)
            self._start(follower)
        return seq

    def step(self) -> StepOutput:
        """Compute one batch. Raises EngineError only when the model or the device is at fault."""
        started = time.perf_counter()
        self._device_seconds = 0.0
        finished, self._ended = self._ended, []
        progressed: list[Sequence] = []
        launched = self._launch()
        prompt_tokens = output_tokens = scheduled_tokens = 0
        landed = self._land(launched)
        if landed is not None:
            batch, sampled = landed
            updated = self._scheduler.update(batch, sampled)
            prompt_tokens, output_tokens = updated.num_prompt_tokens, updated.num_output_tokens
            scheduled_tokens = batch.num_tokens
            for seq, failure in updated.failed:
                finished.extend(self._fail(seq, failure, discard=True))
            for seq, _ in updated.progressed:
                logprobs = sampled.logprobs.get(seq.seq_id)
                if logprobs:
                    seq.logprobs.extend(logprobs)
                if not seq.first_token_time:
                    seq.first_token_time = time.time()
                if self._checkers[seq.seq_id].check():
                    finished.extend(self._finish(seq))
                else:
                    progressed.append(seq)
            finished.extend(self._condemn(self._faults.succeeded(_ids(batch))))
        counts = self._scheduler.take_counts()
        seconds = time.perf_counter() - started
        stats = StepStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_prompt_tokens=prompt_tokens,
            num_output_tokens=output_tokens,
            num_scheduled_tokens=scheduled_tokens,
            num_preemptions=counts.preemptions,
            prefix_cache_queries=counts.cache_queries,
            prefix_cache_hits=counts.cache_hits,
            kv_usage=self._scheduler.blocks.usage,
            seconds=seconds,
            host_seconds=seconds - self._device_seconds,
        )
        return StepOutput(finished, progressed, stats)

    def check_integrity(self) -> None:
        """Raise EngineError if any book does not balance. For tests, and when idle."""
        self._scheduler.check_integrity()
        followers = len(self._twins) if self._twins is not None else 0
        active = self._scheduler.num_running + self._scheduler.num_waiting
        if active + followers != len(self._sequences) or active != len(self._checkers):
            raise EngineError(
                f"{len(self._sequences)} sequences, but {active} run or wait, {followers} follow "
                f"and {len(self._checkers)} are checked"
            )
        if not self._sequences and not self._in_flight and self._scheduler.blocks.usage > 0:
            raise EngineError("nothing runs, yet blocks are held")

    # --- one sequence -----------------------------------------------------------------------

    def _check(self, seq: Sequence) -> None:
        vocab_size = self.limits.vocab_size
        seq.params.check(vocab_size)
        length = seq.num_prompt_tokens
        if not length:
            raise RequestError("empty_prompt", "the prompt has no token", "prompt")
        limit = self.limits.max_model_len
        wanted = 0 if seq.params.max_tokens == 0 else 1
        if length + wanted > limit:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {length} tokens; prompt and answer together have at most {limit} "
                f"(max_model_len), so shorten the prompt to {limit - 1} or fewer",
                "prompt",
            )
        for name, tokens in (("prompt", seq.prompt_token_ids), ("output", seq.output_token_ids)):
            if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
                wrong = next(token for token in tokens if not 0 <= token < vocab_size)
                raise RequestError(
                    "invalid_request",
                    f"{name} has the token id {wrong}; ids are between 0 and {vocab_size - 1}",
                    "prompt",
                )

    def _start(self, seq: Sequence) -> None:
        if self._twins is not None and self._twins.enter(seq):
            return
        special = self.tokenizer.special_token_ids if seq.params.stop else {}
        stops = {special[stop]: stop for stop in seq.params.stop if stop in special}
        checker = StopChecker(seq, Detokenizer(self.tokenizer), self.eos_token_ids, stops)
        self._checkers[seq.seq_id] = checker
        self._scheduler.add(seq, checker.forbidden if seq.params.min_tokens else ())
        if checker.check():
            self._ended.extend(self._finish(seq))
        elif len(seq.output_token_ids) >= seq.max_output_tokens:
            checker.close()
            seq.finish_reason = FinishReason.LENGTH
            self._ended.extend(self._finish(seq))

    def _leave(self, seq: Sequence, answered: bool, discard: bool = False) -> list[Sequence]:
        """Out of every book; returns the twins that waited for its answer."""
        del self._sequences[seq.seq_id]
        follows = self._twins is not None and self._twins.follows(seq)
        if not follows:
            del self._checkers[seq.seq_id]
            self._scheduler.finish(seq, answered, discard)
        seq.status = SequenceStatus.FINISHED
        seq.finish_time = time.time()
        return self._twins.leave(seq) if self._twins is not None else []

    def _finish(self, seq: Sequence) -> list[Sequence]:
        """It has its answer; so do its twins."""
        return self._end(seq, answered=True)

    def _fail(self, seq: Sequence, failure: Failure, discard: bool = False) -> list[Sequence]:
        if seq.seq_id not in self._sequences:
            return []
        seq.failure = failure
        seq.finish_reason = FinishReason.FAILED
        self._checkers[seq.seq_id].close()
        return self._end(seq, answered=False, discard=discard)

    def _end(self, seq: Sequence, answered: bool, discard: bool = False) -> list[Sequence]:
        followers = self._leave(seq, answered, discard)
        for follower in followers:
            del self._sequences[follower.seq_id]
            copy_answer(seq, follower)
        return [seq, *followers]

    # --- one step ---------------------------------------------------------------------------

    def _launch(self) -> bool:
        """Schedule the next batch and hand it to the runner; whether it took one."""
        scheduler, faults = self._scheduler, self._faults
        scheduler.token_limit = faults.token_limit
        batch = None
        while batch is None:
            restriction = faults.restriction(scheduler.running_ids()) if faults.searching else None
            if restriction is None:
                batch = scheduler.schedule()
                break
            batch = scheduler.schedule(restriction.only, restriction.admit)
            if batch is None:
                self._ended.extend(self._condemn(faults.nothing_to_run()))
        if batch is None:
            return False
        began = time.perf_counter()
        try:
            handle = self.runner.execute(batch)
        except Exception as error:
            scheduler.roll_back(batch)
            self._blame(batch, error)
            return False
        else:
            self._in_flight.append((batch, handle))
            return True
        finally:
            self._device_seconds += time.perf_counter() - began

    def _land(self, launched: bool) -> tuple[ScheduledBatch, SampledTokens] | None:
        """Wait for the oldest step in flight, unless the runner is to be kept ahead."""
        ahead = 0 if self._faults.searching else self._steps_in_flight
        if not self._in_flight or (launched and len(self._in_flight) <= ahead):
            return None
        batch, handle = self._in_flight.popleft()
        began = time.perf_counter()
        try:
            return batch, handle.result()
        except Exception as error:
            while self._in_flight:
                self._scheduler.roll_back(self._in_flight.pop()[0])
            self._scheduler.roll_back(batch)
            self._blame(batch, error)
            return None
        finally:
            self._device_seconds += time.perf_counter() - began

    def _blame(self, batch: ScheduledBatch, error: Exception) -> None:
        seq_ids = _ids(batch)
        if len(seq_ids) == 1:
            self._scheduler.withdraw_prefix(seq_ids[0])
        self._faults.failed(seq_ids, batch.num_tokens, error)

    def _condemn(self, failures: dict[int, Failure]) -> list[Sequence]:
        ended: list[Sequence] = []
        for seq_id, failure in failures.items():
            seq = self._sequences.get(seq_id)
            if seq is not None:
                ended.extend(self._fail(seq, failure))
        return ended


def _ids(batch: ScheduledBatch) -> list[int]:
    return [row.seq_id for row in batch.rows]
