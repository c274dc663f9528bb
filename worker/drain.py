"""How a worker ends: the order, the reasons, and how long it may take. Knows no queue, no engine.

The order, and why it is this one:

1. Readiness off, state `draining` announced. Before anything else, so that an autoscaler no longer
   counts this worker and producers see it leave.
2. Stop claiming, and put back at once what was claimed ahead but not begun. Work that others could
   do must not wait behind our grace.
3. Go on renewing the leases. A drain lasts longer than a lease may have left; were they to lapse,
   another worker would begin the same jobs again and ours would be fenced out.
4. Write a checkpoint of everything in flight, now. Some clouds give 15 s whatever they promise; the
   rest of the grace is a bonus, not a plan.
5. Finish what fits. A job nearly done costs less here than anywhere else.
6. At the deadline, checkpoint the rest and put it back at the *front* of its queue, uncharged: it
   has waited once already, and a drain is neither an attempt nor a crash of the job.
7. Flush results. After 6, because results wait for the connection and 6 must not; before 8, because
   a worker that has unregistered is taken for dead.
8. Unregister, exit 0. A drained worker is a success to whoever stopped it.

A second signal skips 5. SIGINT in a terminal is SIGTERM. A spot notice (see `notice`) starts the
drain of the spot profile. An engine step cannot be interrupted: when one outlasts the deadline, the
main thread does 6 to 8 by itself from the tokens it can see, and exits.
"""

import time
from collections.abc import Callable

PROFILES = {"spot": 25.0, "on-demand": 120.0}
"""Seconds from the signal to the exit. Spot: AWS gives up to 120 s, Google 30, Azure 30."""

FLUSH_SHARE = 0.1
"""Of the grace, what is kept for putting back and flushing (at least 0.2 s, at most 3 s)."""


class Drain:
    """Whether a drain was asked for, and when it must be over. Written by the main thread only.

    Plain attributes, no locks: they are set where a signal may have interrupted anything.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout = timeout
        self.reason: str | None = None
        self.urgent = False
        self._clock = clock
        self._deadline = 0.0

    @property
    def requested(self) -> bool:
        return self.reason is not None

    @property
    def deadline(self) -> float:
        """When the process must be gone, on the monotonic clock; endless while not requested."""
        return self._deadline if self.requested else float("inf")

    @property
    def stop_working(self) -> bool:
        """Whether what is in flight must be put back now instead of being finished."""
        if not self.requested:
            return False
        margin = min(3.0, max(0.2, FLUSH_SHARE * self.timeout))
        return self.urgent or self._clock() >= self._deadline - margin

    def request(self, reason: str, timeout: float | None = None) -> None:
        """Begin the drain; a second request makes it urgent. `timeout` can only shorten it."""
        now = self._clock()
        if self.requested:
            self.urgent = True
            return
        if timeout is not None:
            self.timeout = min(self.timeout, timeout)
        self._deadline = now + self.timeout
        self.reason = reason

    def hurry(self) -> None:
        """Put everything back at once (a second signal, or the parent is gone)."""
        self.urgent = True
