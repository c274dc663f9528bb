"""Ctrl-C and SIGTERM as a wish to stop, for code that looks after every turn."""

import contextlib
import signal
from types import FrameType
from typing import Any


class StopOnSignal:
    """The first Ctrl-C or SIGTERM asks for an orderly end, the second Ctrl-C ends at once."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.requested = False
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        with contextlib.suppress(ValueError):  # not the main thread: the caller's signals stay
            for number in self._SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # started with nohup: meant to outlive its terminal
                self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
