"""Whether the threads that do the work still move. Knows no engine and no queue."""

import contextlib
import time
from collections.abc import Callable, Iterator


class Pulse:
    """Each activity (`engine step`, `prompt`) is stamped while it runs; `stalled` names one that
    has run for too long. A first compilation or a long prefill is no hang, so the limit is long.

    Written by the thread that works, read by the one that renews the leases: a plain dictionary of
    floats needs no lock.
    """

    def __init__(self, hang_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._hang_timeout = hang_timeout
        self._clock = clock
        self._since: dict[str, float] = {}

    @contextlib.contextmanager
    def beat(self, activity: str) -> Iterator[None]:
        self._since[activity] = self._clock()
        try:
            yield
        finally:
            self._since.pop(activity, None)

    def stalled(self) -> str | None:
        """The activity that has run past `hang_timeout`, or None."""
        now = self._clock()
        for activity, since in list(self._since.items()):
            if now - since > self._hang_timeout:
                return activity
        return None
