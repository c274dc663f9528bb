"""Keeps a bounded number of jobs in the queue and moves their results to the ledger.

Knows the queue only through `JobQueue`, and no processes, signals or bars.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.producer.bulk.ledger import Ledger, Work
from headrace.producer.errors import QueueFull
from headrace.producer.schemas import Result

MAX_JOBS = 4096
MAX_BYTES = 64 * 2**20
_SUBMIT = 256
_SYNC_LINES = 256
_SYNC_SECONDS = 0.5
_IDLE_SECONDS = 0.05
_AUDIT_SECONDS = 30.0


class JobQueue(Protocol):
    """What a run needs of the queue. Every call may be repeated after an error."""

    def submit(self, work: Sequence[Work]) -> list[Result]:
        """Enqueue; a job that is there already stays as it is. Returns the results of those that
        were refused for good."""
        ...

    def collect(self, safe: bool) -> list[Result]:
        """Results of this run's jobs that have ended since the last call. `safe`: all those of
        earlier calls are on disk."""
        ...

    def forget(self, job_ids: Sequence[str]) -> None:
        """Delete jobs whose lines are on disk."""
        ...

    def look_up(self, job_ids: Sequence[str]) -> tuple[list[Result], list[str]]:
        """Results of those that have ended, and those that the queue knows nothing of."""
        ...


@dataclass(slots=True)
class Totals:
    """What this session's jobs used."""

    jobs: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, result: Result) -> None:
        self.jobs += 1
        self.prompt_tokens += result.usage.prompt_tokens
        self.completion_tokens += result.usage.completion_tokens
        self.cached_tokens += result.usage.cached_tokens


class Pump:
    """`turn` does one round and says whether anything is left; call it until it says no.

    A round may raise the queue's errors; the state stays sound, and the next round goes on.
    """

    def __init__(
        self,
        queue: JobQueue,
        ledger: Ledger,
        work: Iterator[Work],
        *,
        max_jobs: int = MAX_JOBS,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._work = work
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._clock = clock
        self._sleep = sleep
        self._in_flight: dict[str, Work] = {}
        self._bytes = 0
        # Taken from `work` (or found missing) but not known to be in the queue.
        self._to_submit: list[Work] = []
        self._to_forget: list[str] = []
        self._exhausted = False
        self._unsynced = 0
        self._synced_at = self._moved_at = clock()
        self.totals = Totals()
        # Why the queue takes no more at the moment, in words.
        self.full: str | None = None

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def turn(self) -> bool:
        """Submit what there is room for, take what has ended; False when all is done."""
        self._submit()
        results = self._queue.collect(safe=not self._unsynced)
        for result in results:
            self._take(result)
        self._sync_when_due()
        self._forget()
        if self._exhausted and not self._in_flight:
            self.flush()
            return False
        if not results:
            self._audit_when_due()
            self._sleep(_IDLE_SECONDS)
        return True

    def flush(self) -> None:
        """Everything recorded is on disk, and Redis has forgotten it."""
        self._sync()
        self._forget()

    def outstanding(self) -> list[str]:
        """Job ids without a line yet."""
        return list(self._in_flight)

    def submit_again(self) -> None:
        """The queue may have lost jobs: hand in all that have not ended once more."""
        self._to_submit = list(self._in_flight.values())

    def _submit(self) -> None:
        while True:
            if not self._to_submit:
                self._to_submit = self._next_chunk()
            if not self._to_submit:
                return
            chunk = self._to_submit[:_SUBMIT]
            try:
                refused = self._queue.submit(chunk)
            except QueueFull as error:
                self.full = str(error)
                return
            self.full = None
            del self._to_submit[: len(chunk)]
            for result in refused:
                self._take(result)
            if len(chunk) < _SUBMIT:
                return

    def _next_chunk(self) -> list[Work]:
        chunk: list[Work] = []
        while (
            not self._exhausted
            and len(chunk) < _SUBMIT
            and len(self._in_flight) < self._max_jobs
            and (self._bytes < self._max_bytes or not self._in_flight)
        ):
            work = next(self._work, None)
            if work is None:
                self._exhausted = True
                break
            self._in_flight[work.job_id] = work
            self._bytes += work.task.size
            chunk.append(work)
        return chunk

    def _take(self, result: Result) -> None:
        work = self._in_flight.pop(result.job_id, None)
        if work is None:
            # Its line is on disk already: an earlier session was killed before Redis forgot it.
            self._to_forget.append(result.job_id)
            return
        self._bytes -= work.task.size
        self._ledger.record(work, result)
        self.totals.add(result)
        self._unsynced += 1
        self._moved_at = self._clock()

    def _sync_when_due(self) -> None:
        due = self._clock() - self._synced_at >= _SYNC_SECONDS
        if self._unsynced >= _SYNC_LINES or (self._unsynced and due):
            self._sync()

    def _sync(self) -> None:
        self._to_forget += self._ledger.sync()
        self._unsynced = 0
        self._synced_at = self._clock()

    def _forget(self) -> None:
        if self._to_forget:
            self._queue.forget(self._to_forget)
            self._to_forget = []

    def _audit_when_due(self) -> None:
        """Nothing has moved for a while: look for jobs that somebody else deleted."""
        now = self._clock()
        if self._in_flight and now - self._moved_at >= _AUDIT_SECONDS:
            ended, missing = self._queue.look_up(self.outstanding())
            self._to_submit += [self._in_flight[job_id] for job_id in missing]
            for result in ended:
                self._take(result)
            self._moved_at = now
