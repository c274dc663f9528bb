"""What goes to the device for a step and what comes back, in page-locked memory.

A step's inputs lie in one block of host memory that has a twin on the device: one copy brings them
all, and their addresses on the device stay, as a captured graph needs. Arrays whose number differs
from step to step (a prompt's tokens, new blocks) lie behind each other in a second block. The host
writes a block only when the copy out of it is long done: there are several in turn. Knows no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.accelerator import Accelerator, Mark

COPIES = 3
"""Blocks in turn: one that the device may still read, one for the step in flight, one to write."""

_ALIGNMENT = 16
_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}

Array = NDArray[Any]
Fields = Mapping[str, tuple[type[np.generic], int]]
"""Name: element type and length."""


class Stage:
    """One step's inputs on their way. `host`: the fixed fields, to be written."""

    def __init__(self, buffer: "StepBuffer") -> None:
        self._buffer = buffer
        self._fixed = buffer.accelerator.host_bytes(buffer.size)
        self._rest = buffer.accelerator.host_bytes(_larger(1))
        self._twin = buffer.rest
        self._used = 0
        self.host: dict[str, Array] = {
            name: self._fixed.numpy()[start : start + length * dtype.itemsize].view(dtype)
            for name, (start, dtype, length) in buffer.layout.items()
        }
        self._mark: Mark | None = None

    def begin(self) -> None:
        if self._mark is not None:
            self._mark.wait()
        self._mark, self._used = None, 0

    def pack(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Take arrays along, once for a step: where they will be on the device."""
        starts, size = {}, 0
        for name, array in arrays.items():
            starts[name] = size
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._rest):
            self._rest = self._buffer.accelerator.host_bytes(_larger(size))
        self._twin, self._used = self._buffer.reserve(size), size
        target, found = self._rest.numpy(), {}
        for name, array in arrays.items():
            end = starts[name] + array.nbytes
            target[starts[name] : end].view(array.dtype)[:] = array
            found[name] = self._twin[starts[name] : end].view(_TORCH[array.dtype])
        return found

    def send(self) -> None:
        """The copies themselves: part of the submitted work."""
        self._buffer.twin.copy_(self._fixed, non_blocking=True)
        if self._used:
            self._twin[: self._used].copy_(self._rest[: self._used], non_blocking=True)

    def sent(self, mark: Mark) -> None:
        """The host may write here again after `mark`."""
        self._mark = mark


class StepBuffer:
    """`device`: the fixed fields on the device, always at the same addresses."""

    def __init__(self, accelerator: Accelerator, fields: Fields) -> None:
        self.accelerator = accelerator
        self.layout: dict[str, tuple[int, np.dtype[Any], int]] = {}
        self.size = 0
        for name, (kind, length) in fields.items():
            dtype = np.dtype(kind)
            self.layout[name] = (self.size, dtype, length)
            self.size += -(-dtype.itemsize * length // _ALIGNMENT) * _ALIGNMENT
        self.twin = torch.zeros(self.size, dtype=torch.uint8, device=accelerator.device)
        self.rest = torch.zeros(_larger(1), dtype=torch.uint8, device=accelerator.device)
        self.device = {
            name: self.twin[start : start + length * dtype.itemsize].view(_TORCH[dtype])
            for name, (start, dtype, length) in self.layout.items()
        }
        self._stages = [Stage(self) for _ in range(COPIES)]
        self._next = 0

    def begin(self) -> Stage:
        """The block whose turn it is."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % COPIES
        stage.begin()
        return stage

    def reserve(self, size: int) -> Tensor:
        """Device memory for the second block; steps in flight keep what they were given."""
        if size > len(self.rest):
            self.rest = torch.zeros(
                _larger(size), dtype=torch.uint8, device=self.accelerator.device
            )
        return self.rest


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step brings back, [rows]: `top_ids` and `top_logprobs` [rows, most logprobs]."""

    tokens: Tensor
    status: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class OutputBuffer:
    """Host memory for the results of steps, several in turn: a step's are read before the one after
    the next is launched."""

    def __init__(self, accelerator: Accelerator, rows: int, num_top: int) -> None:
        def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
            count = int(np.prod(shape))
            return accelerator.host_bytes(count * dtype.itemsize).view(dtype).view(shape)

        self._outputs = [
            StepOutputs(
                tokens=tensor(torch.int64, rows),
                status=tensor(torch.int32, rows),
                logprobs=tensor(torch.float32, rows),
                top_ids=tensor(torch.int64, rows, num_top),
                top_logprobs=tensor(torch.float32, rows, num_top),
            )
            for _ in range(COPIES)
        ]
        self._next = 0

    def begin(self) -> StepOutputs:
        outputs = self._outputs[self._next]
        self._next = (self._next + 1) % COPIES
        return outputs


def _larger(size: int) -> int:
    return int(max(1 << 12, 1 << (size - 1).bit_length()))
