"""Typed reading of one JSON object: a value of the wrong type, or a name that nobody reads, is a
ValueError that says which."""

from collections.abc import Mapping
from typing import Any


class Fields:
    """`where`: how messages call the object. `done` refuses what was not read."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._prefix = f"{where}." if where else ""
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def any(self, key: str) -> Any:
        self._read.add(key)
        return self._values.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.any(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise ValueError(f"{self._prefix}{key} {_found(value)}; a string is needed")
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.any(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self._prefix}{key} {_found(value)}; true or false is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.any(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self._prefix}{key} {_found(value)}; a number is needed")
        return float(value)

    def count(self, key: str, default: int) -> int:
        value = self.any(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{self._prefix}{key} {_found(value)}; a whole number above 0 is needed"
            )
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A string or a list of strings; empty when missing."""
        value = self.any(key)
        if value is None:
            return ()
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list) or not all(
            isinstance(entry, str) and entry for entry in entries
        ):
            raise ValueError(
                f"{self._prefix}{key} {_found(value)}; a string or a list of strings is needed"
            )
        return tuple(entries)

    def done(self) -> None:
        unknown = sorted(set(self._values) - self._read)
        if unknown:
            names = ", ".join(self._prefix + name for name in unknown)
            known = ", ".join(sorted(self._read))
            raise ValueError(f"{names}: not known here; known: {known}")


def _found(value: Any) -> str:
    return "is missing" if value is None else f"is {value!r:.60}"
