"""INT4 and INT3 at load: rounded to nearest in groups along the input, symmetric or not."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.grouped import (
    GroupedMatrix,
    GroupedWeights,
    Piece,
    apply_grouped,
    dequantize_grouped,
    fused,
    grouped_matrix,
    process_grouped,
)
from headrace.engine.quant.method import LinearSpec, stacked_bias
from headrace.engine.quant.unquantized import Unquantized

GROUPS = (32, 64, 128)


class Integer:
    """`bits` 3 or 4; `group` 32, 64 or 128 (an input that is no multiple ends in a short group)."""

    def __init__(self, bits: int, group: int, symmetric: bool) -> None:
        self._bits = bits
        self._group = group
        self._symmetric = symmetric

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        return Unquantized().tensor_shapes(spec)

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> GroupedWeights:
        settings = (self._bits, self._group, self._symmetric)
        pieces = [
            Piece(round_to_nearest(source.load(f"{part}.weight").to(device), *settings), None)
            for part in spec.parts
        ]
        return GroupedWeights(fused(pieces), stacked_bias(spec, source, torch.float32, device))

    def process(self, weights: GroupedWeights) -> GroupedWeights:
        return process_grouped(weights)

    def apply(self, weights: GroupedWeights, x: Tensor) -> Tensor:
        return apply_grouped(weights, x)

    def dequantize(self, weights: GroupedWeights) -> Tensor:
        return dequantize_grouped(weights)


def round_to_nearest(weight: Tensor, bits: int, group: int, symmetric: bool) -> GroupedMatrix:
    """A float weight [out, in] in integers of `bits`. Scales are rounded to float16 first, so that
    values are rounded against what is stored.

    Symmetric: the largest magnitude of a group becomes 2^(bits - 1) - 1/2 steps, so that both ends
    lose equally. With zero points: the range, widened to hold 0, is cut into 2^bits - 1 steps.
    """
    weight = weight.float()
    rows, columns = weight.shape
    top = 2**bits - 1
    groups = functional.pad(weight, (0, -columns % group)).view(rows, -1, group)
    if symmetric:
        steps = groups.abs().amax(2) * 2 / top
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        steps = (high - low) / top
    scales = storable(torch.where(steps > 0, steps, 1.0))
    wide = scales.float()
    if symmetric:
        zeros = torch.full_like(wide, 2 ** (bits - 1))
    else:
        zeros = (-low / wide).round_().clamp_(0, top)
    values = (groups / wide[..., None]).add_(zeros[..., None]).round_().clamp_(0, top)
    values = values.to(torch.uint8).flatten(1)[:, :columns]
    return grouped_matrix(values, scales, zeros.to(torch.uint8), bits, group)


def storable(scales: Tensor) -> Tensor:
    """In float16 unless one is too large or too small for it."""
    short = scales.half()
    limits = torch.finfo(torch.float16)
    fits = short.isfinite() & (scales >= limits.smallest_normal)
    return short if bool(fits.all()) else scales.float()
