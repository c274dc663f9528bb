"""Memory for weights in huge pages: a matmul that streams them then looks up few addresses.

Linux gives 2 MiB pages to whoever asks (`transparent_hugepage/enabled` is `madvise` by default); a
single weight may be smaller than one, so weights are laid one behind another into larger pieces.
Elsewhere the pieces are plain memory.
"""

import contextlib
import mmap
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

_PIECE = 32 << 20
_LINE = 64
_SMALLEST = 64 << 10
"""Bytes of the smallest tensor that is worth moving."""


class HugePages:
    """Hands out memory that lives as long as one of the tensors in it."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def moved(self, weights: T) -> T:
        """The same weights with their larger CPU tensors copied here; a tensor in a layout of
        oneDNN's own stays where it is."""
        found: Any = weights
        if isinstance(found, Tensor):
            found = self._copied(found)
        elif type(found) in (list, tuple):
            found = type(found)(map(self.moved, found))
        elif is_dataclass(found) and not isinstance(found, type):
            names = [item.name for item in fields(found) if item.init]
            found = replace(found, **{name: self.moved(getattr(found, name)) for name in names})
        return cast(T, found)

    def _copied(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        if (
            tensor.layout != torch.strided
            or tensor.device.type != "cpu"
            or not tensor.is_contiguous()
            or size < _SMALLEST
        ):
            return tensor
        begin = -(-self._used // _LINE) * _LINE
        if begin + size > len(self._piece):
            self._piece, begin = _mapped(max(size, _PIECE)), 0
        self._used = begin + size
        place = self._piece[begin : self._used].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)


def _mapped(size: int) -> Tensor:
    # Private: pages of shared memory are large only where the system says so for files.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size, **flags)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)
