"""How long the weights of a checkpoint took to read, told apart from what was made of them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.engine.loading.checkpoint import TensorSource

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """`read`: tensors from the checkpoint's files, GGUF blocks dequantized where floats are run;
    `quantize`: from there to what the device multiplies (quantized, repacked, stacked, packed)."""

    read: float = 0.0
    quantize: float = 0.0


class TimedSource:
    """A source whose reading is timed. A mapped tensor is read when it is first touched, so each
    page is touched here: a slow disk is not to be taken for slow arithmetic."""

    def __init__(self, source: TensorSource) -> None:
        self._source: Any = source
        self.seconds = 0.0

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: Mapping[str, tuple[int, ...]] = self._source.shapes()
        return shapes

    def load(self, name: str) -> Tensor:
        began = time.perf_counter()
        tensor: Tensor = self._source.load(name)
        _touch(tensor)
        self.seconds += time.perf_counter() - began
        return tensor

    def packed(self, name: str) -> tuple[str, Tensor]:
        """A tensor's type and blocks, where the source has them (GGUF)."""
        began = time.perf_counter()
        found: tuple[str, Tensor] = self._source.packed(name)
        self.seconds += time.perf_counter() - began
        return found


def _touch(tensor: Tensor) -> None:
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        tensor.detach().reshape(-1).view(torch.uint8)[::_PAGE].max()
