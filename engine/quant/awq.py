"""AWQ checkpoints, GEMM packing: 4 bits packed along the output in an order of its own.

Layout: `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` float16
[groups, out]; the nibbles of a word, lowest first, are columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.engine.errors import CheckpointError
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.grouped import (
    GroupedWeights,
    Piece,
    apply_grouped,
    check_group,
    dequantize_grouped,
    fused,
    grouped_matrix,
    process_grouped,
)
from headrace.engine.quant.method import LinearSpec, bias_shapes, stacked_bias
from headrace.engine.quant.settings import Settings

_SHIFT_OF_COLUMN = (0, 16, 4, 20, 8, 24, 12, 28)
_BITS = 4


@dataclass(frozen=True, slots=True)
class AWQConfig:
    """`group` 0: one for all of the input."""

    group: int


def read_config(values: Mapping[str, Any]) -> AWQConfig:
    settings = Settings("quantization_config", values)
    bits = settings.integer("bits", values.get("w_bit"))
    if bits != _BITS:
        raise CheckpointError(f"quantization_config: AWQ with {bits} bits (4 are run)")
    for key in ("checkpoint_format", "format", "version"):
        label = str(values.get(key) or "gemm").lower()
        if label not in ("gemm", "awq"):
            raise CheckpointError(
                f"quantization_config: AWQ {key} {label!r} is not supported (gemm is)"
            )
    return AWQConfig(max(settings.integer("group_size", values.get("q_group_size", 128)), 0))


class AWQ:
    def __init__(self, config: AWQConfig) -> None:
        self._config = config

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        group = self._config.group or spec.in_features
        problem = check_group(group, spec.in_features)
        if problem:
            raise CheckpointError(f"{spec.parts[0]}: AWQ {problem}; that is not supported")
        groups = -(-spec.in_features // group)
        shapes: dict[str, tuple[int, ...]] = bias_shapes(spec)
        for part, rows in zip(spec.parts, spec.out_features, strict=True):
            shapes[f"{part}.qweight"] = (spec.in_features, rows // 8)
            shapes[f"{part}.qzeros"] = (groups, rows // 8)
            shapes[f"{part}.scales"] = (groups, rows)
        return shapes

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> GroupedWeights:
        pieces = [self._piece(part, source, device) for part in spec.parts]
        return GroupedWeights(fused(pieces), stacked_bias(spec, source, torch.float32, device))

    def process(self, weights: GroupedWeights) -> GroupedWeights:
        return process_grouped(weights)

    def apply(self, weights: GroupedWeights, x: Tensor) -> Tensor:
        return apply_grouped(weights, x)

    def dequantize(self, weights: GroupedWeights) -> Tensor:
        return dequantize_grouped(weights)

    def _piece(self, part: str, source: TensorSource, device: torch.device) -> Piece:
        values = unpack_columns(source.load(f"{part}.qweight").to(device))
        zeros = unpack_columns(source.load(f"{part}.qzeros").to(device))
        scales = source.load(f"{part}.scales").to(device)
        group = self._config.group or len(values)
        return Piece(grouped_matrix(values.T, scales.T, zeros.T, _BITS, group), None)


def unpack_columns(words: Tensor) -> Tensor:
    """int32 [rows, words] to uint8 [rows, 8 * words], columns in their order."""
    shifts = torch.tensor(_SHIFT_OF_COLUMN, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)
