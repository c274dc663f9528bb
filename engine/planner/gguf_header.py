"""Reads the header of a GGUF file: metadata and tensor list, no weights, no numpy.

Long arrays (the tokenizer's) are stepped over, so a file with 150,000 tokens answers in a tenth of
a second. Every tensor is checked to lie inside the file: a truncated download is named as such.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.gguf_types import BLOCKS, TYPE_IDS, tensor_bytes

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
_KEPT_ARRAY = 4096
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`dims` as written: innermost (input columns) first."""

    name: str
    dims: tuple[int, ...]
    type_name: str
    offset: int

    @property
    def num_params(self) -> int:
        total = 1
        for d in self.dims:
            total *= d
        return total

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(self.type_name, self.num_params // self.dims[0], self.dims[0])


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata (arrays longer than 4,096 and arrays of strings left out) and the tensors."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def read_gguf(path: Path) -> GGUFHeader:
    """The header of `path`, with the tensors of its other parts if the file is one of several.

    Raises PlanError for what is no GGUF, is cut short, or has an unknown version or type.
    """
    header = _read_one(path)
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return header
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        raise PlanError(f"{path} is one of {count} parts, but its name has no -00001-of-0000N")
    first = _read_one(_part(path, match[1], 1, count))
    tensors = list(first.tensors)
    for number in range(2, count + 1):
        tensors.extend(_read_one(_part(path, match[1], number, count)).tensors)
    return GGUFHeader(first.metadata, tuple(tensors))


def _part(path: Path, stem: str, number: int, count: int) -> Path:
    part = path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf")
    if not part.is_file():
        raise PlanError(f"{path} is one of {count} parts and {part.name} is missing beside it")
    return part


def _read_one(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise PlanError(f"{path} is too short to be a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).header()
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is damaged or truncated inside its header: {error}") from error


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def header(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise PlanError(f"{self.path} is no GGUF file: it begins with {self.data[:4]!r}")
        self.position = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise PlanError(f"{self.path} has GGUF version {version}; supported: 2 and 3")
        num_tensors, num_keys = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(self.count(num_keys, 12)):
            key = self.string()
            value = self.value(self.scalar("I"))
            if value is not None:
                metadata[key] = value
        tensors = tuple(self.tensor() for _ in range(self.count(num_tensors, 24)))
        self.check_extent(metadata, tensors)
        return GGUFHeader(metadata, tensors)

    def count(self, number: int, least: int) -> int:
        """`number` things of at least `least` bytes must fit into what is left of the file."""
        if number * least > len(self.data) - self.position:
            raise PlanError(f"{self.path} is damaged or truncated: it promises {number} entries")
        return number

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.position)[0]
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.count(self.scalar("Q"), 1)
        text = self.data[self.position : self.position + size].decode("utf-8")
        self.position += size
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise PlanError(f"{self.path} is damaged: metadata of the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any] | None:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            unpack, data, position = struct.Struct("<Q").unpack_from, self.data, self.position
            for _ in range(self.count(length, 8)):
                position += 8 + unpack(data, position)[0]
            self.position = position
            return None
        if kind not in _SCALARS:
            raise PlanError(f"{self.path} is damaged: an array of the unknown type {kind}")
        code = _SCALARS[kind]
        size = struct.calcsize("<" + code)
        self.count(length, size)
        if length > _KEPT_ARRAY:
            self.position += length * size
            return None
        values = list(struct.unpack_from(f"<{length}{code}", self.data, self.position))
        self.position += length * size
        return values

    def tensor(self) -> GGUFTensor:
        name = self.string()
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise PlanError(f"{self.path} is damaged: tensor {name!r} has {num_dims} dimensions")
        dims = tuple(self.scalar("Q") for _ in range(num_dims))
        type_id = self.scalar("I")
        if type_id not in TYPE_IDS:
            raise PlanError(f"{self.path}: tensor {name!r} has the unknown type {type_id}")
        kind = TYPE_IDS[type_id]
        if dims[0] == 0 or dims[0] % BLOCKS[kind][0]:
            raise PlanError(
                f"{self.path} is damaged: rows of {name!r} have {dims[0]} values, "
                f"no multiple of a {kind} block"
            )
        return GGUFTensor(name, dims, kind, self.scalar("Q"))

    def check_extent(self, metadata: dict[str, Any], tensors: tuple[GGUFTensor, ...]) -> None:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise PlanError(f"{self.path} is damaged: general.alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        for tensor in tensors:
            end = start + tensor.offset + tensor.num_bytes
            if end > len(self.data):
                raise PlanError(
                    f"{self.path} is truncated: tensor {tensor.name!r} ends at byte {end:,}, "
                    f"the file has {len(self.data):,}; download it again"
                )
