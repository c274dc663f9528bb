"""Delivers results, checkpoints and jobs put back, in a thread of its own and in groups.

A group goes out when it is large enough, when its first member has waited a few milliseconds, or
at once when the engine has nothing else to do. While the queue is away everything is kept, in
order. Nothing here knows Redis or the engine.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from headrace.worker import kill_points
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.retrying import Connection
from headrace.worker.source import (
    ClaimedJob,
    FinishCode,
    JobSource,
    Outcome,
    OutcomeKind,
    Released,
    SourceUnavailable,
)

log = logging.getLogger(__name__)


class Courier:
    """`idle` tells whether the engine has nothing to do, so that nothing is held back."""

    def __init__(
        self,
        source: JobSource,
        metrics: WorkerMetrics,
        connection: Connection,
        *,
        idle: Callable[[], bool],
        flush_count: int = 64,
        flush_seconds: float = 0.005,
    ) -> None:
        self._source = source
        self._metrics = metrics
        self._connection = connection
        self._idle = idle
        self._flush_count = flush_count
        self._flush_seconds = flush_seconds
        self._outcomes: list[Outcome] = []
        self._checkpoints: dict[str, tuple[ClaimedJob, bytes]] = {}
        self._released: list[Released] = []
        self._since = 0.0
        self._sending = 0
        self._stopped = False
        self._give_up = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def deliver(self, outcomes: Sequence[Outcome]) -> None:
        with self._changed:
            if not self._outcomes:
                self._since = time.monotonic()
            self._outcomes.extend(outcomes)
            for outcome in outcomes:
                self._checkpoints.pop(outcome.job.execution_id, None)
            self._changed.notify_all()

    def save(self, progress: Sequence[tuple[ClaimedJob, bytes]]) -> None:
        """Store checkpoints; a newer one of the same job replaces one that still waits."""
        with self._changed:
            for job, blob in progress:
                self._checkpoints[job.execution_id] = (job, blob)
            self._changed.notify_all()

    def put_back(self, released: Sequence[Released]) -> None:
        with self._changed:
            for item in released:
                self._checkpoints.pop(item.job.execution_id, None)
            self._released.extend(released)
            self._changed.notify_all()

    @property
    def pending(self) -> int:
        """Results and jobs put back that the queue has not acknowledged."""
        with self._changed:
            return len(self._outcomes) + len(self._released) + self._sending

    def flush(self, timeout: float) -> bool:
        """Wait until everything handed over so far is acknowledged."""
        with self._changed:
            self._since = 0.0
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._has_work() and not self._sending, timeout
            )

    def stop(self, timeout: float) -> int:
        """Flush and end; how many results and releases could not be delivered in time."""
        self.flush(timeout)
        with self._changed:
            self._stopped = self._give_up = True
            self._changed.notify_all()
        self._thread.join(1.0)
        return self.pending

    def _has_work(self) -> bool:
        return bool(self._outcomes or self._checkpoints or self._released)

    def _due(self) -> bool:
        if self._stopped or self._released or self._checkpoints:
            return True
        if not self._outcomes:
            return False
        waited = time.monotonic() - self._since
        full = len(self._outcomes) >= self._flush_count
        return full or waited >= self._flush_seconds or self._idle()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due():
                    self._changed.wait(self._flush_seconds if self._outcomes else None)
                if self._stopped and (self._give_up or not self._has_work()):
                    return
                outcomes = self._outcomes[: self._flush_count]
                self._outcomes = self._outcomes[self._flush_count :]
                progress, self._checkpoints = list(self._checkpoints.values()), {}
                released, self._released = self._released, []
                self._sending = len(outcomes) + len(released)
            undelivered = self._send(outcomes, progress, released)
            with self._changed:
                self._outcomes[:0] = undelivered[0]
                self._released[:0] = undelivered[1]
                self._sending = 0
                self._changed.notify_all()

    def _send(
        self,
        outcomes: list[Outcome],
        progress: list[tuple[ClaimedJob, bytes]],
        released: list[Released],
    ) -> tuple[list[Outcome], list[Released]]:
        """Results first. What the queue did not take comes back."""
        try:
            if outcomes:
                self._finish(outcomes)
                outcomes = []
            if released:
                kill_points.reach("before_release")
                self._insist(lambda: self._source.release(released))
                kill_points.reach("after_release")
                self._metrics.jobs_released.inc(len(released))
                released = []
            if progress:
                kill_points.reach("before_checkpoint")
                self._insist(lambda: self._source.checkpoint(progress))
                kill_points.reach("after_checkpoint")
        except SourceUnavailable:
            pass
        except Exception:
            log.exception("putting jobs back or saving their progress failed")
            return outcomes, []
        return outcomes, released

    def _insist(self, call: Callable[[], object]) -> None:
        self._connection.insist(call, give_up=lambda: self._give_up)

    def _finish(self, outcomes: list[Outcome]) -> None:
        """A group that the queue refuses is tried one by one: a single bad result fails alone."""
        kill_points.reach("before_finish")
        try:
            codes = self._connection.insist(
                lambda: self._source.finish(outcomes), give_up=lambda: self._give_up
            )
        except SourceUnavailable:
            raise
        except Exception:
            if len(outcomes) > 1:
                log.exception("a group of %d results was refused; trying each", len(outcomes))
                for outcome in outcomes:
                    self._finish([outcome])
                return
            log.exception(
                "a result was refused; its lease will lapse",
                extra={"job_id": outcomes[0].job.job_id},
            )
            return
        kill_points.reach("after_finish")
        now = time.time()
        for outcome, code in zip(outcomes, codes, strict=True):
            self._count(outcome, code, now)

    def _count(self, outcome: Outcome, code: FinishCode, now: float) -> None:
        job, m = outcome.job, self._metrics
        if code is FinishCode.FENCED:
            m.results_fenced.inc()
            log.warning("late result refused: not ours any more", extra={"job_id": job.job_id})
        elif code is FinishCode.GONE:
            m.jobs_completed.labels("cancelled").inc()
        elif code is FinishCode.DEAD:
            m.jobs_completed.labels("dead").inc()
        elif code is FinishCode.COMMITTED:
            kind = OutcomeKind.FAILED if outcome.kind is OutcomeKind.RETRY else outcome.kind
            m.jobs_completed.labels(kind.value).inc()
            if job.enqueued_at:
                m.end_to_end.observe(max(0.0, now - job.enqueued_at))
            if job.deadline is not None:
                m.deadline_margin.observe(job.deadline - now)
