"""Puts lines that come in any order back into input order, with bounded memory."""

import tempfile
from typing import IO

MEMORY_BYTES = 64 * 2**20


class InOrder:
    """Hand in `(position, line)` in any order, positions 0, 1, 2, ... each once; take out lines in
    order as soon as no earlier one is missing.

    At most `memory_bytes` of waiting lines are in memory; the rest wait in a temporary file. When
    nothing waits on disk, the file is emptied.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._limit = memory_bytes
        self._next = 0
        self._used = 0
        self._held: dict[int, bytes] = {}
        self._spilled: dict[int, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None

    @property
    def waiting(self) -> int:
        return len(self._held) + len(self._spilled)

    @property
    def bytes_in_memory(self) -> int:
        return self._used

    def put(self, position: int, line: bytes) -> list[bytes]:
        """Store one line; those whose turn has come."""
        if position < self._next or position in self._held or position in self._spilled:
            raise ValueError(f"position {position} was handed in twice")
        if position != self._next and self._used + len(line) > self._limit:
            self._spill(position, line)
        else:
            self._held[position] = line
            self._used += len(line)
        ready: list[bytes] = []
        while (due := self._take(self._next)) is not None:
            self._next += 1
            ready.append(due)
        return ready

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self, position: int) -> bytes | None:
        line = self._held.pop(position, None)
        if line is not None:
            self._used -= len(line)
            return line
        place = self._spilled.pop(position, None)
        if place is None or self._file is None:
            return None
        self._file.seek(place[0])
        line = self._file.read(place[1])
        if not self._spilled:
            self._file.truncate(0)
        return line

    def _spill(self, position: int, line: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="headrace-")  # noqa: SIM115
        offset = self._file.seek(0, 2)
        self._file.write(line)
        self._spilled[position] = (offset, len(line))
