"""Keeps what must go on in time: leases renewed, other workers' lapsed ones reaped, facts told.

A thread of its own, so that a long step doesn't stop it. It renews only while the work moves
(`Pulse`): a hung worker must lose its jobs to another. After an outage of the queue all leases may
have lapsed while all workers live; so nobody reaps before the others had time to renew theirs.
Nothing here knows Redis or the engine.
"""

import logging
import random
import threading
import time
from collections.abc import Callable

from headrace.worker.metrics import WorkerMetrics
from headrace.worker.pulse import Pulse
from headrace.worker.retrying import Connection
from headrace.worker.source import (
    ClaimedJob,
    JobSource,
    SourceUnavailable,
    WorkerFacts,
    WorkerRegistry,
)

log = logging.getLogger(__name__)


START_GRACE = 5.0
"""Seconds before a new worker first reaps: it may have started just when the queue came back."""


def _suspended() -> float:
    """Seconds that this machine has slept, plus a constant: the monotonic clock stops meanwhile."""
    return time.time() - time.monotonic()


class Keeper:
    """`on_lost` is called from this thread with jobs that are no longer ours. `outage_grace`:
    seconds after an unanswered call in which other workers' lapsed leases are left alone."""

    def __init__(
        self,
        source: JobSource,
        registry: WorkerRegistry,
        metrics: WorkerMetrics,
        connection: Connection,
        pulse: Pulse,
        *,
        facts: Callable[[], WorkerFacts],
        on_lost: Callable[[list[ClaimedJob]], None],
        heartbeat_seconds: float = 5.0,
        reap_seconds: float = 7.0,
        announce_seconds: float = 15.0,
        outage_grace: float = 30.0,
    ) -> None:
        self._source = source
        self._registry = registry
        self._metrics = metrics
        self._connection = connection
        self._pulse = pulse
        self._facts = facts
        self._on_lost = on_lost
        self._duties: list[tuple[float, Callable[[], None]]] = [
            (announce_seconds, self._announce),
            (heartbeat_seconds, self._heartbeat),
            (reap_seconds, self._reap),
        ]
        self._outage_grace = outage_grace
        self._reap_from = time.monotonic() + min(START_GRACE, outage_grace)
        self._next = [0.0, 0.0, self._reap_from + random.uniform(0.0, reap_seconds)]
        self._offset = _suspended()
        self._stalled: str | None = None
        self._stopped = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def announce_now(self) -> None:
        """The facts have changed: tell them at once."""
        self._next[0] = 0.0
        self._woken.set()

    def stop(self, timeout: float = 5.0) -> None:
        self._stopped = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopped:
            self._woken.wait(max(0.0, min(self._next) - time.monotonic()))
            self._woken.clear()
            if self._stopped:
                return
            self._watch()
            if self._stalled is not None:
                self._next = [time.monotonic() + 1.0] * len(self._duties)
                continue
            for index, (interval, duty) in enumerate(self._duties):
                if time.monotonic() >= self._next[index]:
                    self._next[index] = time.monotonic() + self._perform(interval, duty)

    def _perform(self, interval: float, duty: Callable[[], None]) -> float:
        """Seconds until the duty is next due: soon when the queue is away."""
        try:
            duty()
        except SourceUnavailable as error:
            self._connection.lost(error)
            self._reap_from = time.monotonic() + self._outage_grace
            return min(interval, 0.5)
        except Exception:
            log.exception("%s failed", duty.__name__.strip("_"))
        else:
            self._connection.answered()
        return interval * random.uniform(0.9, 1.0)

    def _watch(self) -> None:
        stalled = self._pulse.stalled()
        if stalled != self._stalled:
            if stalled is not None:
                log.error("%s hangs: leases are no longer renewed, jobs go to others", stalled)
            else:
                log.info("%s came back; leases are renewed again", self._stalled)
            self._stalled = stalled
            self._metrics.stalled.set(stalled is not None)

    def _announce(self) -> None:
        self._registry.announce(self._facts())

    def _heartbeat(self) -> None:
        lost = self._source.heartbeat()
        if lost:
            self._on_lost(lost)

    def _reap(self) -> None:
        # The machine slept: this one's queue and the other workers may have slept with it.
        offset = _suspended()
        if offset - self._offset > 1.0:
            self._reap_from = time.monotonic() + self._outage_grace
        self._offset = offset
        # Our own first: a process that was stopped for a while must not take itself for dead.
        self._heartbeat()
        if time.monotonic() < self._reap_from:
            return
        reaped = self._source.reap()
        if reaped:
            self._metrics.leases_expired.inc(reaped)
            log.warning("took back %d jobs whose worker let their lease lapse", reaped)
