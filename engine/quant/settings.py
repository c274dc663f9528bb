"""Typed reading of a checkpoint's quantization_config; what is missing or of the wrong type is a
CheckpointError by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.engine.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Settings:
    """`where`: how messages call these values."""

    where: str
    values: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; an integer is needed")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; true or false is needed")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; a string is needed")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Empty when missing."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; an object is needed")
        return value

    def texts(self, key: str) -> list[str]:
        """Empty when missing."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; a list of names is needed")
        return value

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.where}: {key} is missing")
        return default
