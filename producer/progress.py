"""A progress bar with rate and time left, on stderr: redrawn on a terminal, a line now and then
elsewhere. Knows nothing of jobs."""

import contextlib
import os
import shutil
import sys
import time
from collections import deque
from typing import TextIO

from tqdm import tqdm

_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 10.0
_RATE_SECONDS = 30.0


def say(text: str, stream: TextIO | None = None) -> None:
    """Write to stderr. Work goes on though nobody reads it any more: a closed pipe, a terminal that
    is gone. What follows then goes nowhere, also what Python itself flushes at its end."""
    stream = stream if stream is not None else sys.stderr
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


class Progress:
    """Call `update` as often as you like; it draws as often as is useful.

    The rate is that of the last 30 seconds, so that a slow start does not spoil the time left.
    """

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._total = total
        self._started = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque([(self._started, done)])
        self._drawn_at = -_LINE_SECONDS if self._terminal else self._started
        self._width = 0
        self._shown = -1
        self._initial = self._done = done
        self._note = ""

    def update(self, done: int, note: str = "") -> None:
        """`done` of the total; `note` stands behind the rate."""
        now = time.monotonic()
        self._done, self._note = done, note
        if done != self._samples[-1][1]:
            self._samples.append((now, done))
            while len(self._samples) > 2 and now - self._samples[1][0] > _RATE_SECONDS:
                self._samples.popleft()
        every = _REDRAW_SECONDS if self._terminal else _LINE_SECONDS
        if now - self._drawn_at >= every:
            self._draw(now)

    def message(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._clear()
        self._print(text + "\n")
        if self._terminal:
            self._draw(time.monotonic())

    def close(self) -> None:
        """Leave the last state standing."""
        if self._terminal or self._done != self._shown:
            self._draw(time.monotonic())
        if self._terminal:
            self._print("\n")

    def _rate(self, now: float) -> float | None:
        since, before = self._samples[0]
        if self._done == before or now <= since:
            return None
        return (self._done - before) / (now - since)

    def _draw(self, now: float) -> None:
        self._drawn_at, self._shown = now, self._done
        columns = shutil.get_terminal_size().columns if self._terminal else 100
        line = tqdm.format_meter(
            self._done,
            self._total,
            now - self._started,
            ncols=columns - 1,
            initial=self._initial,
            unit="job",
            rate=self._rate(now),
            postfix=self._note or None,
            ascii=not self._terminal,
        )
        if self._terminal:
            padding = " " * max(0, self._width - len(line))
            self._print(f"\r{line}{padding}")
            self._width = len(line)
        else:
            self._print(line + "\n")

    def _print(self, text: str) -> None:
        say(text, self._stream)

    def _clear(self) -> None:
        if self._terminal and self._width:
            self._print("\r" + " " * self._width + "\r")
            self._width = 0
