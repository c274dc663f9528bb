"""Ending with one's parent: for a worker that another program started for itself."""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2


class ParentWatch:
    """Whether the process that started us is gone.

    On Linux the kernel is asked for SIGTERM at its death too; one that is already arranged stays.
    The kernel ties that to the thread which forked us, so the parent process id is what counts.
    A parent that died before this was made is known by HEADRACE_PARENT_PID, where it sets that.
    """

    def __init__(self) -> None:
        expected = os.environ.get("HEADRACE_PARENT_PID", "")
        self._parent = int(expected) if expected.isdigit() else os.getppid()
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                libc = ctypes.CDLL(None, use_errno=True)
                arranged = ctypes.c_int(0)
                libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(arranged), 0, 0, 0)
                if not arranged.value:
                    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    @property
    def gone(self) -> bool:
        return os.getppid() != self._parent
