"""SIGTERM and SIGINT as values that the main thread reads, instead of code that interrupts it.

A handler that takes a lock can deadlock with what it interrupted; this one only appends.
"""

import contextlib
import os
import select
import signal


def leave_at_once() -> None:
    """Until a SignalBox catches them, SIGTERM and SIGINT end the process with 0: nothing has been
    claimed. As process 1 of a container, which ignores what it does not handle, it would otherwise
    be waited for until it is killed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


class SignalBox:
    """Catches SIGTERM and SIGINT from construction on. For the main thread only."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self._pending.append(number)
        self.wake()

    def wake(self) -> None:
        """End a `wait` early; may be called from any thread."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"!")

    def wait(self, seconds: float) -> list[str]:
        """The names of signals that came, after at most `seconds`."""
        if not self._pending:
            select.select([self._read], [], [], max(0.0, seconds))
        with contextlib.suppress(OSError):
            os.read(self._read, 4096)
        names = []
        while self._pending:
            names.append(signal.Signals(self._pending.pop(0)).name)
        return names
