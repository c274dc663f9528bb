"""Integers on an even grid: weight = (code - zero) * scale, one scale and zero point a group.

Scales are rounded to the type they are stored in before anything is rounded against them. Knows no
file format and no calibration beyond a matrix that says how much an error costs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_SHRINKS = tuple(1 - step / 40 for step in range(21))
"""Ranges that a search tries, as shares of the whole: 1 down to 0.5."""


@dataclass(frozen=True, slots=True)
class GridSpec:
    """`lowest_zero`: least zero point that the file format stores safely. `scale_dtype`: of stored
    scales. `search`: shrink the range of a group where that costs less."""

    bits: int
    symmetric: bool
    lowest_zero: int = 0
    scale_dtype: torch.dtype = torch.float16
    search: bool = False

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """`codes` uint8 [out, in]; `scales` [out, groups] in their stored type; `zeros` uint8
    [out, groups]; `group_of` int64 [in], the group of each column."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    def dequantize(self) -> Tensor:
        """Float32 [out, in]."""
        zeros = self.zeros.float()[:, self.group_of]
        return (self.codes.float() - zeros) * self.scales.float()[:, self.group_of]

    def rows(self, start: int, end: int) -> "QuantizedMatrix":
        return QuantizedMatrix(
            *(self.codes[start:end], self.scales[start:end], self.zeros[start:end]), self.group_of
        )


def find_grid(weight: Tensor, spec: GridSpec, cost: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales and zero points [...] of groups [..., columns], in the weight's type.

    Symmetric: the largest magnitude becomes 2^(bits - 1) - 1/2 steps. Else the range, widened to
    hold 0, is cut into 2^bits - 1 steps. With `search` (up to 4 bits, beyond which it finds
    nothing) each group takes the share of its range at which error @ cost @ error is least; `cost`
    [..., columns, columns] broadcasts over the rows.
    """
    low, high = weight.amin(-1).clamp(max=0), weight.amax(-1).clamp(min=0)
    if not spec.search or cost is None or spec.bits > 4:
        return _grid_of(low, high, spec)
    best_scales, best_zeros = _grid_of(low, high, spec)
    best = _group_cost(weight, best_scales, best_zeros, spec, cost)
    for shrink in _SHRINKS[1:]:
        scales, zeros = _grid_of(low * shrink, high * shrink, spec)
        found = _group_cost(weight, scales, zeros, spec, cost)
        better = found < best
        best = torch.where(better, found, best)
        best_scales = torch.where(better, scales, best_scales)
        best_zeros = torch.where(better, zeros, best_zeros)
    return best_scales, best_zeros


def to_codes(weight: Tensor, scales: Tensor, zeros: Tensor, spec: GridSpec) -> Tensor:
    """Nearest codes, in the weight's type; scales and zeros broadcast."""
    return (weight / scales).add_(zeros).round_().clamp_(0, spec.top)


def round_groups(
    weight: Tensor, group: int, spec: GridSpec, cost: Tensor | None = None
) -> QuantizedMatrix:
    """A weight [out, in] rounded to nearest in groups of consecutive columns; `group` divides them.

    `cost` [in, in]: what the search of the grid weighs errors by, group by group.
    """
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, group)
    blocks = None if cost is None else diagonal_blocks(cost, group).to(weight.dtype)
    scales, zeros = find_grid(grouped, spec, blocks)
    codes = to_codes(grouped, scales[..., None], zeros[..., None], spec)
    return QuantizedMatrix(
        codes.to(torch.uint8).view(rows, columns),
        scales.to(spec.scale_dtype),
        zeros.to(torch.uint8),
        torch.arange(columns) // group,
    )


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """The square blocks along the diagonal: [n, n] to [n / size, size, size]."""
    count = len(matrix) // size
    tiles = matrix.view(count, size, count, size)
    return tiles.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def row_losses(weight: Tensor, quantized: Tensor, hessian: Tensor) -> Tensor:
    """Per row, error @ hessian @ error: the squared error of the row's output over the calibration
    tokens that the hessian sums up."""
    error = (quantized - weight).to(hessian.dtype)
    return (error @ hessian).mul_(error).sum(1)


def _grid_of(low: Tensor, high: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    if spec.symmetric:
        steps = torch.maximum(-low, high) * 2 / spec.top
    else:
        steps = (high - low) / spec.top
    scales = _stored(torch.where(steps > 0, steps, 1.0), spec)
    if spec.symmetric:
        return scales, torch.full_like(scales, 2 ** (spec.bits - 1))
    return scales, (-low / scales).round_().clamp_(spec.lowest_zero, spec.top)


def _stored(scales: Tensor, spec: GridSpec) -> Tensor:
    """Rounded to the stored type, and kept within it."""
    limits = torch.finfo(spec.scale_dtype)
    bounded = scales.clamp(limits.smallest_normal, limits.max)
    return bounded.to(spec.scale_dtype).to(scales.dtype)


def _group_cost(
    weight: Tensor, scales: Tensor, zeros: Tensor, spec: GridSpec, cost: Tensor
) -> Tensor:
    codes = to_codes(weight, scales[..., None], zeros[..., None], spec)
    error = codes.sub_(zeros[..., None]).mul_(scales[..., None]).sub_(weight)
    if weight.dim() == 2:  # rows of one group
        return (error @ cost).mul_(error).sum(-1)
    products = torch.bmm(error.transpose(0, 1), cost).transpose(0, 1)  # [rows, groups, columns]
    return (products * error).sum(-1)
