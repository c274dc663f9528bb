"""GGUF's block types kept as they are in the file: the memory of the file, not of its floats.

Embeddings and head too, where the file quantizes them: a tied head and its embedding share memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.errors import EngineError
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.device_matrix import DeviceMatrix, on_kernels
from headrace.engine.quant.method import LinearSpec, stacked_bias
from headrace.engine.quant.packed import multiply, unpacked, whole
from headrace.engine.quant.unquantized import Unquantized

BLOCK_TYPES = {
    "Q8_0": 32,
    "Q4_0": 32,
    "Q4_1": 32,
    "Q5_0": 32,
    "Q5_1": 32,
    "Q2_K": 256,
    "Q3_K": 256,
    "Q4_K": 256,
    "Q5_K": 256,
    "Q6_K": 256,
}
"""Values a block."""


class BlockSource(TensorSource, Protocol):
    def packed(self, name: str) -> tuple[str, Tensor]:
        """The tensor's type and its bytes, uint8 [rows, bytes a row], rows in the model's order."""
        ...


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """`data` uint8 [out, bytes a row]; `kind` as ggml names it."""

    data: Tensor
    kind: str
    in_features: int

    @property
    def out_features(self) -> int:
        return len(self.data)

    @property
    def kernel(self) -> tuple[str, str]:
        return "gguf_kernels", self.kind.lower()

    def fields(self) -> Sequence[int]:
        blocks = self.in_features // BLOCK_TYPES[self.kind]
        return self.data.data_ptr(), self.data.shape[1], blocks

    def unpack(self, first: int, last: int) -> Tensor:
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType[self.kind]
        return torch.from_numpy(quants.dequantize(self.data[first:last].numpy(), kind))

    def placed(self) -> "BlockMatrix | DeviceMatrix":
        if not on_kernels(self.data.device):
            return self
        raise EngineError(
            f"GGUF blocks ({self.kind}) are not multiplied on this device; choose quantization"
            " 'float', 'int8' or 'int4-g32'"
        )


@dataclass(frozen=True, slots=True)
class BlockWeights:
    matrix: BlockMatrix | DeviceMatrix
    bias: Tensor | None


class Blocks:
    """Layers whose parts all have one block type."""

    def __init__(self, source: BlockSource) -> None:
        self._source = source

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        return Unquantized().tensor_shapes(spec)

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> BlockWeights:
        parts = [self._source.packed(f"{part}.weight") for part in spec.parts]
        data = parts[0][1] if len(parts) == 1 else torch.cat([data for _, data in parts])
        return BlockWeights(
            BlockMatrix(data, parts[0][0], spec.in_features),
            stacked_bias(spec, source, torch.float32, device),
        )

    def process(self, weights: BlockWeights) -> BlockWeights:
        return replace(weights, matrix=weights.matrix.placed())

    def apply(self, weights: BlockWeights, x: Tensor) -> Tensor:
        return multiply(weights.matrix, weights.bias, x)

    def dequantize(self, weights: BlockWeights) -> Tensor:
        return whole(weights.matrix)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """An embedding in blocks: rows are unpacked when they are looked up."""

    matrix: BlockMatrix
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = replace(self.matrix, data=self.matrix.data[token_ids])
        return unpacked(rows, 0, len(token_ids)).to(self.dtype, copy=True)


class SharedRows:
    """A source that keeps the bytes of one tensor, so that all of its users hold the same ones."""

    def __init__(self, source: BlockSource, name: str) -> None:
        self._source = source
        self._name = name
        self._kept: tuple[str, Tensor] | None = None

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes()

    def load(self, name: str) -> Tensor:
        return self._source.load(name)

    def packed(self, name: str) -> tuple[str, Tensor]:
        if name != self._name:
            return self._source.packed(name)
        if self._kept is None:
            self._kept = self._source.packed(name)
        return self._kept
