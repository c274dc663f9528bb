"""A set of texts that stays small in memory however many there are."""

import contextlib
import hashlib
import sqlite3
from types import TracebackType
from typing import Self


def digest(text: str) -> bytes:
    """16 bytes: among a billion texts the odds of one collision are below 1e-20."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class IdSet:
    """Holds digests: the newest `in_memory` ones (about 90 bytes each) in a Python set, the rest in
    a temporary SQLite file that SQLite deletes itself."""

    def __init__(self, in_memory: int = 500_000) -> None:
        self._limit = in_memory
        self._recent: set[bytes] = set()
        self._spilled: sqlite3.Connection | None = None
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, text: str) -> bool:
        return self._has(digest(text))

    def add(self, text: str) -> bool:
        """True when it was not there before."""
        key = digest(text)
        if self._has(key):
            return False
        self._recent.add(key)
        self._count += 1
        if len(self._recent) >= self._limit:
            self._spill()
        return True

    def close(self) -> None:
        self._recent.clear()
        if self._spilled is not None:
            with contextlib.suppress(sqlite3.Error):
                self._spilled.close()
            self._spilled = None

    def _has(self, key: bytes) -> bool:
        if key in self._recent:
            return True
        if self._spilled is None:
            return False
        found = self._spilled.execute("SELECT 1 FROM ids WHERE id = ?", (key,)).fetchone()
        return found is not None

    def _spill(self) -> None:
        if self._spilled is None:
            # An empty name is a private file on disk, gone when it is closed or we die.
            self._spilled = sqlite3.connect("", isolation_level=None)
            self._spilled.execute("PRAGMA journal_mode = OFF")
            self._spilled.execute("PRAGMA synchronous = OFF")
            self._spilled.execute("PRAGMA cache_size = -32768")
            self._spilled.execute("CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID")
        self._spilled.execute("BEGIN")
        self._spilled.executemany(
            "INSERT INTO ids VALUES (?)", ((key,) for key in sorted(self._recent))
        )
        self._spilled.execute("COMMIT")
        self._recent.clear()
