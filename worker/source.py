"""Where a worker's jobs come from and where their results go: the loop's one door to a queue.

Two implementations: Redis (`lease.RedisSource`) and memory (`bench.memory.MemorySource`). Nothing
here knows Redis, RQ or the engine.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job under our lease. `payload` is the raw JSON text of the request, unchecked.

    `execution_id` names this delivery, `fence` counts deliveries of the job. Times are Unix
    seconds of the queue's clock. `checkpoint` is what an earlier worker left.
    """

    job_id: str
    execution_id: str
    queue: str
    payload: bytes
    fence: int = 1
    attempts: int = 0
    crashes: int = 0
    enqueued_at: float = 0.0
    deadline: float | None = None
    checkpoint: bytes | None = None


class OutcomeKind(enum.Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a claimed job ended. `result` is the encoded `schemas.Result`; for RETRY it is the
    failure to record should no attempt be left. `tokens`: prompt and output tokens done."""

    job: ClaimedJob
    kind: OutcomeKind
    result: bytes
    prompt_tokens: int = 0
    output_tokens: int = 0


class FinishCode(enum.Enum):
    COMMITTED = "committed"
    OURS_EARLIER = "ours_earlier"
    FENCED = "fenced"
    GONE = "gone"
    RETRIED = "retried"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Released:
    """A job put back. `checkpoint` None leaves an earlier one as it is; `to_front` False: tail."""

    job: ClaimedJob
    checkpoint: bytes | None = None
    to_front: bool = True


class SourceUnavailable(Exception):
    """The queue cannot be reached just now; the same call may be made again and loses nothing."""


class JobSource(Protocol):
    """Thread-safe: the loop claims and finishes, a heartbeat thread renews.

    Every method raises SourceUnavailable when the queue is away.
    """

    def claim(self, max_jobs: int, wait_seconds: float) -> list[ClaimedJob]:
        """At most `max_jobs` jobs, waiting up to `wait_seconds` for the first."""
        ...

    def heartbeat(self) -> list[ClaimedJob]:
        """Extend every lease held; the jobs that are no longer ours (cancelled, taken away)."""
        ...

    def finish(self, outcomes: Sequence[Outcome]) -> list[FinishCode]:
        """Write results and acknowledge, each atomically; codes in the order given."""
        ...

    def checkpoint(self, jobs: Sequence[tuple[ClaimedJob, bytes]]) -> None:
        """Store progress for those still leased to us."""
        ...

    def release(self, released: Sequence[Released]) -> None:
        """Put jobs back without charging an attempt."""
        ...

    def reap(self) -> int:
        """Take jobs back from workers whose leases lapsed; how many."""
        ...


class WorkerState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says about itself, to producers, to the exporter and to other workers.

    Rates are tokens per second of engine time, 0 while unknown. Seconds of `cold_start` are from
    the start of the process to readiness. `slots`: sequences that run at once.
    """

    model: str
    state: WorkerState
    queues: tuple[str, ...]
    wire_version: int = 1
    slots: int = 0
    running: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    cold_start_seconds: float = 0.0
    started_at: float = 0.0


class WorkerRegistry(Protocol):
    """Where workers say what they serve; `lease.RedisSource` and MemorySource are one too."""

    def announce(self, facts: WorkerFacts) -> None:
        """Publish the facts; they lapse by themselves when not repeated within a lease."""
        ...

    def served_elsewhere(self, model: str | None, queue: str, wire_version: int) -> bool:
        """Whether another live worker that reads this queue could take such a job.

        `model` None: any model. `wire_version`: the newest schema it must understand.
        """
        ...

    def unregister(self) -> None:
        """Take the facts back: this worker ends."""
        ...
