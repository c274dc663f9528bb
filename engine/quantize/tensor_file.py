"""Writes safetensors tensor by tensor, so that a model's file never lies in memory.

Layout: uint64 length of the header, the header as JSON (type, shape and where the bytes lie), the
bytes. Source: the format's description in the safetensors project's README.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int8: "I8",
}
_ALIGNMENT = 8

Header = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor, in the file's order."""


def header_of(tensors: Mapping[str, Tensor]) -> Header:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def data_bytes(header: Header) -> int:
    return sum(_size(*entry) for entry in header.values())


def write_tensors(
    path: Path, header: Header, tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a whole file and bring it to the disk. `tensors`: in the header's order.

    The name is not there until the file is whole: it is written beside and renamed. Raises
    ValueError if a tensor is not what the header says, or if there are too few or too many.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, (dtype, shape) in header.items():
        end = offset + _size(dtype, shape)
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, entry), tensor in zip(header.items(), tensors, strict=True):
            found = (tensor.dtype, tuple(tensor.shape))
            if found != entry:
                raise ValueError(f"tensor {name!r} is {found}, and the header says {entry}")
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize
