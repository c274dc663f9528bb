"""A JobSource in memory: tests without a Redis, and the engine measured without a queue.

It keeps the promises of the Redis one that a loop can see: leases with a fence, results only from
the lease's holder, release to the front, checkpoints that stay with the job. `down` makes every
call raise SourceUnavailable, as a lost connection does. Leases don't lapse by time; `lose` takes
one away. Knows no Redis and no engine.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from headrace.worker.source import (
    ClaimedJob,
    FinishCode,
    Outcome,
    OutcomeKind,
    Released,
    SourceUnavailable,
    WorkerFacts,
)


class MemorySource:
    """Jobs from a list, results into a dictionary. Thread-safe."""

    def __init__(self, payloads: Iterable[bytes] = (), *, queue: str = "memory") -> None:
        self.on_lost: Callable[[list[ClaimedJob]], None] | None = None
        self.results: dict[str, Outcome] = {}
        self.facts: list[WorkerFacts] = []
        self.checkpoints: dict[str, bytes] = {}
        self.released: list[Released] = []
        self.others: set[tuple[str | None, int]] = set()
        """(model, schema version) pairs that other workers are said to serve."""
        self.calls = 0
        self.down = False
        self._queue = queue
        self._waiting: deque[ClaimedJob] = deque()
        self._leased: dict[str, ClaimedJob] = {}
        self._lost: list[ClaimedJob] = []
        self._changed = threading.Condition()
        self._numbers = 0
        for payload in payloads:
            self.add(payload)

    def add(self, payload: bytes, job_id: str | None = None, **fields: object) -> str:
        """Queue one job; its id."""
        with self._changed:
            self._numbers += 1
            job = ClaimedJob(
                job_id=job_id or f"job-{self._numbers}",
                execution_id="",
                queue=self._queue,
                payload=payload,
                fence=0,
                enqueued_at=time.time(),
            )
            self._waiting.append(replace(job, **fields))  # type: ignore[arg-type]
            self._changed.notify_all()
            return job.job_id

    def wait(self, count: int, timeout: float = 60.0) -> bool:
        """Wait until at least `count` jobs have their result."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.results) >= count, timeout)

    def lose(self, job_id: str) -> None:
        """Take a lease away, as a cancel or a reaper does; the next heartbeat reports it."""
        with self._changed:
            self._lost.append(self._leased.pop(job_id))

    @property
    def depth(self) -> tuple[int, int]:
        """Jobs waiting and leased."""
        with self._changed:
            return len(self._waiting), len(self._leased)

    def claim(self, max_jobs: int, wait_seconds: float) -> list[ClaimedJob]:
        with self._reach():
            if not self._waiting and wait_seconds > 0:
                self._changed.wait(wait_seconds)
            claimed: list[ClaimedJob] = []
            while self._waiting and len(claimed) < max_jobs:
                job = self._waiting.popleft()
                fence = job.fence + 1
                job = replace(
                    job,
                    fence=fence,
                    execution_id=f"{job.job_id}-{fence}",
                    checkpoint=self.checkpoints.get(job.job_id),
                )
                self._leased[job.job_id] = job
                claimed.append(job)
            return claimed

    def heartbeat(self) -> list[ClaimedJob]:
        with self._reach():
            lost, self._lost = self._lost, []
            return lost

    def finish(self, outcomes: Sequence[Outcome]) -> list[FinishCode]:
        with self._reach():
            codes = [self._finish(outcome) for outcome in outcomes]
            self._changed.notify_all()
            return codes

    def checkpoint(self, jobs: Sequence[tuple[ClaimedJob, bytes]]) -> None:
        with self._reach():
            for job, blob in jobs:
                if self._holds(job):
                    self.checkpoints[job.job_id] = blob

    def release(self, released: Sequence[Released]) -> None:
        with self._reach():
            front = []
            for item in released:
                if not self._holds(item.job):
                    continue
                self.released.append(item)
                del self._leased[item.job.job_id]
                if item.checkpoint is not None:
                    self.checkpoints[item.job.job_id] = item.checkpoint
                if item.to_front:
                    front.append(item.job)
                else:
                    self._waiting.append(item.job)
            self._waiting.extendleft(reversed(front))
            self._changed.notify_all()

    def reap(self) -> int:
        with self._reach():
            return 0

    def announce(self, facts: WorkerFacts) -> None:
        with self._reach():
            self.facts.append(facts)

    def served_elsewhere(self, model: str | None, queue: str, wire_version: int) -> bool:
        with self._reach():
            return any(
                (model is None or model == served) and version >= wire_version
                for served, version in self.others
            )

    def unregister(self) -> None:
        with self._reach():
            self.facts.clear()

    @contextlib.contextmanager
    def _reach(self) -> Iterator[None]:
        with self._changed:
            self.calls += 1
            if self.down:
                raise SourceUnavailable("the memory source is switched off")
            yield

    def _holds(self, job: ClaimedJob) -> bool:
        held = self._leased.get(job.job_id)
        return held is not None and held.execution_id == job.execution_id

    def _finish(self, outcome: Outcome) -> FinishCode:
        job = outcome.job
        if not self._holds(job):
            earlier = self.results.get(job.job_id)
            ours = earlier is not None and earlier.job.execution_id == job.execution_id
            return FinishCode.OURS_EARLIER if ours else FinishCode.FENCED
        del self._leased[job.job_id]
        if outcome.kind is OutcomeKind.RETRY and job.attempts + 1 < 3:
            self._waiting.append(replace(job, attempts=job.attempts + 1))
            return FinishCode.RETRIED
        self.checkpoints.pop(job.job_id, None)
        self.results[job.job_id] = outcome
        return FinishCode.COMMITTED
