"""Reading a GGUF file's header: metadata and where each tensor lies. Knows no model and no torch.

Layout (GGUF versions 2 and 3, little endian): magic, version, counts, key-value pairs, tensor
infos, padding to the alignment, data. Strings and arrays carry 64-bit lengths.
Source: docs/gguf.md of ggml.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.errors import CheckpointError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q").unpack_from
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` outermost first, as torch has it; `type_id` as ggml numbers its types; `offset` from
    the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    size: int


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header; CheckpointError if the file is missing, truncated or something else."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            reader = _Reader(file.read(min(size, 1 << 22)), path, size)
            return _parse(reader, path, size)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _Reader:
    """A cursor over the file's head; reads more of the file when the header is long."""

    def __init__(self, data: bytes, path: Path, size: int) -> None:
        self._data = data
        self._path = path
        self._size = size
        self.position = 0

    def take(self, count: int) -> int:
        """Advance by `count` bytes and return where they begin in `data`."""
        start = self.position
        end = start + count
        if end > self._size:
            raise CheckpointError(
                f"{self._path}: truncated (the header goes beyond {self._size} bytes)"
            )
        if end > len(self._data):
            with self._path.open("rb") as file:
                self._data = file.read(min(self._size, max(2 * len(self._data), end)))
        self.position = end
        return start

    def scalar(self, code: str) -> Any:
        start = self.take(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self._data, start)[0]

    def text(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        return self._data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element in _SCALARS:
                code = _SCALARS[element]
                start = self.take(count * struct.calcsize("<" + code))
                return list(struct.unpack_from(f"<{count}{code}", self._data, start))
            return self._texts(count) if element == _STRING else self._arrays(element, count)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: damaged (metadata type {kind} does not exist)")
        return self.scalar(_SCALARS[kind])

    def _arrays(self, element: int, count: int) -> list[Any]:
        return [self.value(element) for _ in range(count)]

    def _texts(self, count: int) -> list[str]:
        """`text` so many times, without a call for each: a vocabulary has 300,000."""
        data, at, texts = self._data, self.position, []
        for _ in range(count):
            start = at + 8
            if start > len(data) or (end := start + _LENGTH(data, at)[0]) > len(data):
                self.position = at
                texts.append(self.text())
                data, end = self._data, self.position
            else:
                texts.append(data[start:end].decode("utf-8", errors="replace"))
            at = end
        self.position = at
        return texts

    def magic(self) -> bytes:
        start = self.take(4)
        return self._data[start : start + 4]


def _parse(reader: _Reader, path: Path, size: int) -> GGUFFile:
    if size < 24 or reader.magic() != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file")
    version = reader.scalar("I")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
    num_tensors, num_values = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.text()
        metadata[key] = reader.value(reader.scalar("I"))
    infos = []
    for _ in range(num_tensors):
        name = reader.text()
        dimensions = reader.scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{path}: damaged (tensor {name} has {dimensions} dimensions)")
        shape = tuple(reader.scalar("Q") for _ in range(dimensions))[::-1]
        infos.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: damaged (general.alignment is {alignment!r})")
    start = math.ceil(reader.position / alignment) * alignment
    tensors = {
        name: GGUFTensor(name, shape, type_id, start + offset)
        for name, shape, type_id, offset in infos
    }
    return GGUFFile(path, metadata, tensors, size)
