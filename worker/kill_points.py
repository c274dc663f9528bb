"""Places where a test may end or stop this worker by force. Inert unless a variable asks for it.

`HEADRACE_TEST_KILL_AT=POINT[:N]` kills the process (SIGKILL: nothing unwinds, nothing is flushed)
when it reaches POINT for the N-th time, 1 by default. `HEADRACE_TEST_KILL_AT=job:ID` does when that
job's first token is there. `HEADRACE_TEST_KILL_SIGNAL=STOP` stops the process instead, once. Only
the operator's environment is read; nothing in a job can reach this. Used by tests/crash.
"""

import os
import signal
import threading
from collections.abc import Iterable
from typing import Final

POINTS: Final = {
    "after_claim": "leased to us, nobody else here knows it",
    "after_start": "given to the engine, nothing computed",
    "mid_generation": "a step is done, its tokens are nowhere else",
    "before_finish": "the answer is whole, the FINISH script not sent",
    "after_finish": "FINISH is applied, its reply not looked at",
    "before_checkpoint": "progress is packed, not sent",
    "after_checkpoint": "progress is stored",
    "drain_begun": "draining: unbegun jobs are put back, the rest runs on",
    "before_release": "draining: the rest is packed, RELEASE not sent",
    "after_release": "draining: all is put back, the worker still in the books",
}

_point: str | None = None
_countdown = 0


def arm() -> None:
    """Read the variable; done once at import."""
    global _point, _countdown
    name, _, number = os.environ.get("HEADRACE_TEST_KILL_AT", "").partition(":")
    if name == "job":
        _point, _countdown = f"job:{number}", 1
    elif name in POINTS:
        _point, _countdown = name, int(number or 1)
    elif name:
        raise ValueError(f"HEADRACE_TEST_KILL_AT: no point {name!r}; there are {', '.join(POINTS)}")
    else:
        _point = None


def reach(point: str) -> None:
    """The worker is at `point`."""
    global _countdown
    if _point == point:
        _countdown -= 1
        if _countdown == 0:
            _die()


def progressed(job_ids: Iterable[str]) -> None:
    """These jobs have just got tokens."""
    if _point is not None and _point.startswith("job:") and _point[4:] in job_ids:
        reach(_point)


def _die() -> None:
    kind = os.environ.get("HEADRACE_TEST_KILL_SIGNAL", "KILL")
    # To this very thread: a SIGSTOP to the process goes to its main thread, and while that waits
    # for a processor this one would run on past the point (on a busy machine 123 times in 150).
    signal.pthread_kill(threading.get_ident(), signal.Signals[f"SIG{kind}"])


arm()
