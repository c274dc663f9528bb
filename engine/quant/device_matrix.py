"""Packed weights where the Triton kernels multiply them: on a GPU, or in Triton's interpreter.

Each scheme loads as it does for a CPU; `process` then brings its matrices into the kernels' layout
of tiles, in the same number of bits. Scales multiply float32 sums, so a weight is not rounded to
the activations' type, except that NF4's and FP4's codes are.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.engine.errors import EngineError

if TYPE_CHECKING:
    from headrace.kernels.packed_weights import PackedWeights


def on_kernels(device: torch.device) -> bool:
    """Whether layers on this device are multiplied by the Triton kernels (HEADRACE_BACKEND as for
    the rest of the engine: torch never, triton always)."""
    chosen = os.environ.get("HEADRACE_BACKEND")
    return chosen == "triton" or (device.type == "cuda" and chosen != "torch")


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """[out_features, in_features], in tiles."""

    weights: "PackedWeights"

    @property
    def out_features(self) -> int:
        return self.weights.rows

    @property
    def in_features(self) -> int:
        return self.weights.columns

    def placed(self) -> "DeviceMatrix":
        return self

    def multiply(self, bias: Tensor | None, x: Tensor) -> Tensor:
        """x [rows, in_features] times the transposed matrix plus bias, in x's dtype."""
        from headrace.kernels.dequantizing_matmul import dequantizing_matmul

        return dequantizing_matmul(x, self.weights, bias)


def integers_on_device(
    values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int
) -> DeviceMatrix:
    """`values` uint8 [out, in], 2^(bits - 1) in the middle; `scales` and `zeros` [out, groups]."""
    from headrace.kernels.packed_weights import PackedWeights, pack_tiles

    return DeviceMatrix(
        PackedWeights(
            pack_tiles(values, bits),
            scales.t().contiguous(),
            None if zeros is None else zeros.t().contiguous(),
            f"int{bits}",
            _checked(group, values.shape[1]),
            values.shape[1],
            2 ** (bits - 1),
        )
    )


def floats_on_device(values: Tensor, scales: Tensor, group: int) -> DeviceMatrix:
    """float8_e4m3fn as bytes, uint8 [out, in]; `scales` [out, groups]."""
    from headrace.kernels.packed_weights import PackedWeights, pack_tiles

    columns = values.shape[1]
    return DeviceMatrix(
        PackedWeights(
            pack_tiles(values, 8),
            scales.t().contiguous(),
            None,
            "fp8",
            _checked(group, columns),
            columns,
        )
    )


def codes_on_device(
    values: Tensor,
    table: Tensor,
    scales: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    group: int,
) -> DeviceMatrix:
    """`values` uint8 [out, in], indices into `table`; `scales` [out, groups], bytes when `nested`
    says with (starts, absmax, tables) what they stand for."""
    from headrace.kernels.packed_weights import NestedScales, PackedWeights, pack_tiles

    columns = values.shape[1]
    return DeviceMatrix(
        PackedWeights(
            pack_tiles(values, 4),
            scales.t().contiguous(),
            None,
            "code4",
            _checked(group, columns),
            columns,
            0,
            table.contiguous(),
            None if nested is None else NestedScales(*(part.contiguous() for part in nested)),
        )
    )


def _checked(group: int, columns: int) -> int:
    from headrace.kernels.packed_weights import GROUP_MULTIPLE

    if group < columns and group % GROUP_MULTIPLE:
        raise EngineError(
            f"groups of {group} columns are not run on this device (multiples of {GROUP_MULTIPLE}"
            " are); quantization='float' runs the layers as floats"
        )
    return min(group, columns)
