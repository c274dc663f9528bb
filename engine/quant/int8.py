"""INT8 weights with one scale a row, multiplied in the activations' float type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.device_matrix import DeviceMatrix, integers_on_device, on_kernels
from headrace.engine.quant.method import LinearSpec, stacked_bias
from headrace.engine.quant.packed import multiply, whole
from headrace.engine.quant.unquantized import Unquantized

_ALIGNMENT = 16  # rows are padded to whole vectors


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """`values` int8 [out, in padded to 16]; `scales` float32 [out]."""

    values: Tensor
    scales: Tensor
    in_features: int

    @property
    def out_features(self) -> int:
        return len(self.values)

    @property
    def kernel(self) -> tuple[str, str]:
        return "row_kernels", "int8"

    def fields(self) -> Sequence[int]:
        return self.values.data_ptr(), self.values.shape[1], self.scales.data_ptr()

    def unpack(self, first: int, last: int) -> Tensor:
        values = self.values[first:last, : self.in_features]
        return values.float() * self.scales[first:last, None]

    def placed(self) -> "Int8Matrix | DeviceMatrix":
        if not on_kernels(self.values.device):
            return self
        unsigned = self.values[:, : self.in_features].contiguous().view(torch.uint8) ^ 0x80
        return integers_on_device(unsigned, self.scales[:, None], None, 8, self.in_features)


def int8_matrix(values: Tensor, scales: Tensor) -> Int8Matrix:
    """int8 [out, in] and float32 [out], padded as kernels want them."""
    padding = -values.shape[1] % _ALIGNMENT
    return Int8Matrix(
        functional.pad(values, (0, padding)).contiguous(), scales.contiguous(), values.shape[1]
    )


@dataclass(frozen=True, slots=True)
class Int8Weights:
    matrix: Int8Matrix | DeviceMatrix
    bias: Tensor | None


class Int8:
    """Quantized at load, or read where another scheme stores the same."""

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        return Unquantized().tensor_shapes(spec)

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Int8Weights:
        parts = [quantize_channels(source.load(f"{part}.weight").to(device)) for part in spec.parts]
        values, scales = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return Int8Weights(
            int8_matrix(values, scales),
            stacked_bias(spec, source, torch.float32, device),
        )

    def process(self, weights: Int8Weights) -> Int8Weights:
        return replace(weights, matrix=weights.matrix.placed())

    def apply(self, weights: Int8Weights, x: Tensor) -> Tensor:
        return multiply(weights.matrix, weights.bias, x)

    def dequantize(self, weights: Int8Weights) -> Tensor:
        return whole(weights.matrix)


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a float weight [out, in] as int8 and their scales, float32 [out]: symmetric, the
    largest magnitude of a row becomes 127. A row of zeros has the scale 1."""
    weight = weight.float()
    peak = weight.abs().amax(dim=1)
    scales = torch.where(peak > 0, peak / 127, 1.0)
    return (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales
