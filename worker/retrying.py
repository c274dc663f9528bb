"""Calls to a queue that may be away: wait and try again, as long as that makes sense."""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.worker.metrics import WorkerMetrics
from headrace.worker.source import SourceUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0


class Connection:
    """Whether the queue answers, told once when it changes and not at every try."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._away_since: float | None = None
        metrics.source_available.set(1)

    def lost(self, error: Exception) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            self._metrics.source_available.set(0)
            log.warning("the queue is away (%s); waiting for it, the batch goes on", error)

    def answered(self) -> None:
        if self._away_since is not None:
            away = time.monotonic() - self._away_since
            self._away_since = None
            self._metrics.source_available.set(1)
            log.info("the queue is back after %.1f s", away)

    def insist(
        self,
        call: Callable[[], T],
        *,
        give_up: Callable[[], bool],
        sleep: Callable[[float], object] = time.sleep,
    ) -> T:
        """`call()` until the queue answers. Raises SourceUnavailable once `give_up()` is true.

        The calls of a JobSource may be repeated: a lost reply is not applied twice.
        """
        wait = FIRST_WAIT
        while True:
            try:
                value = call()
            except SourceUnavailable as error:
                self.lost(error)
                if give_up():
                    raise
                sleep(wait * random.uniform(0.5, 1.0))
                wait = min(2 * wait, LONGEST_WAIT)
            else:
                self.answered()
                return value
