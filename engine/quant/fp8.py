"""FP8 weights (float8_e4m3fn) with one scale a tensor, a row or a block; multiplied as floats.

CPUs and cards before sm_89 have no FP8 arithmetic, so activations are not rounded to FP8 here, even
where a checkpoint was made for that: the result is closer to the float model's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.device_matrix import DeviceMatrix, floats_on_device, on_kernels
from headrace.engine.quant.method import LinearSpec, bias_shapes, stacked_bias
from headrace.engine.quant.packed import multiply, whole

_LANES = 16
_SCALE_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """`values` uint8 [out, in padded to 16], the bytes; `scales` [out, blocks]; `group` columns a
    scale."""

    values: Tensor
    scales: Tensor
    group: int
    in_features: int

    @property
    def out_features(self) -> int:
        return len(self.values)

    @property
    def kernel(self) -> tuple[str, str]:
        return "row_kernels", "fp8"

    def fields(self) -> Sequence[int]:
        return (
            *(self.values.data_ptr(), self.values.shape[1]),
            *(self.scales.data_ptr(), _SCALE_KINDS[self.scales.dtype], self.scales.shape[1]),
            -(-self.group // _LANES),
        )

    def unpack(self, first: int, last: int) -> Tensor:
        values = self.values[first:last, : self.in_features].view(torch.float8_e4m3fn).float()
        groups = torch.arange(self.in_features, device=values.device) // self.group
        return values.mul_(self.scales[first:last].float()[:, groups])

    def placed(self) -> "Fp8Matrix | DeviceMatrix":
        if not on_kernels(self.values.device):
            return self
        return floats_on_device(self.values[:, : self.in_features], self.scales, self.group)


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    matrix: Fp8Matrix | DeviceMatrix
    bias: Tensor | None


class Fp8:
    """`strategy`: tensor, channel or block; `block` rows and columns; `suffix` of the scales."""

    def __init__(
        self, strategy: str, block: tuple[int, int] = (0, 0), suffix: str = "weight_scale"
    ) -> None:
        self._strategy = strategy
        self._block = block
        self._suffix = suffix

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = bias_shapes(spec)
        for part, rows in zip(spec.parts, spec.out_features, strict=True):
            shapes[f"{part}.weight"] = (rows, spec.in_features)
            shapes[f"{part}.{self._suffix}"] = self._scale_shape(rows, spec.in_features)
        return shapes

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Fp8Weights:
        values = torch.cat(
            [source.load(f"{part}.weight").view(torch.uint8) for part in spec.parts]
        ).to(device)
        scales = [
            self._per_row(source.load(f"{part}.{self._suffix}"), rows)
            for part, rows in zip(spec.parts, spec.out_features, strict=True)
        ]
        columns = spec.in_features
        matrix = Fp8Matrix(
            functional.pad(values, (0, -columns % _LANES)).contiguous(),
            torch.cat(scales).to(device),
            self._block[1] if self._strategy == "block" else columns,
            columns,
        )
        return Fp8Weights(matrix, stacked_bias(spec, source, torch.float32, device))

    def process(self, weights: Fp8Weights) -> Fp8Weights:
        return replace(weights, matrix=weights.matrix.placed())

    def apply(self, weights: Fp8Weights, x: Tensor) -> Tensor:
        return multiply(weights.matrix, weights.bias, x)

    def dequantize(self, weights: Fp8Weights) -> Tensor:
        return whole(weights.matrix)

    def _scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if self._strategy == "tensor":
            return (1,)
        if self._strategy == "channel":
            return rows, 1
        return -(-rows // self._block[0]), -(-columns // self._block[1])

    def _per_row(self, scales: Tensor, rows: int) -> Tensor:
        """Scales as stored to [rows, blocks a row]."""
        if self._strategy == "tensor":
            return scales.view(1, 1).expand(rows, 1)
        if self._strategy == "channel":
            return scales
        return scales.repeat_interleave(self._block[0], 0)[:rows]
