"""GPTQ: round one column at a time and let the columns not yet rounded make up for the error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (arXiv 2210.17323). For inputs x of a layer the cost of an error e in a row of weights
is e H e with H = sum of x x'; its inverse's Cholesky factor U tells how the error of a column is
best spread over those after it.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from headrace.engine.errors import EngineError
from headrace.engine.quantize.grid import (
    GridSpec,
    QuantizedMatrix,
    find_grid,
    round_groups,
    row_losses,
    to_codes,
)

Order = Literal["groups", "columns", "none"]

_BLOCK = 128
_DAMPING_TRIES = 4


@dataclass(frozen=True, slots=True)
class GPTQSettings:
    """`order`: which columns are rounded first, when the others can still make up for them.

    `columns`: by what their inputs weigh ("act-order", desc_act): groups are then made of columns
    in that order, which costs an index at run time, unless `static_groups` fixes the grids of the
    natural groups beforehand. `groups`: whole groups by weight and columns by weight within them,
    so groups stay as they are. `damping`: share of the mean of H's diagonal that is added to it.
    """

    group: int
    order: Order = "groups"
    static_groups: bool = False
    damping: float = 0.01


def gptq(
    weight: Tensor, hessian: Tensor, settings: GPTQSettings, spec: GridSpec
) -> tuple[QuantizedMatrix, float]:
    """A weight [out, in] quantized under `hessian` [in, in], and the damping that was needed.

    Computes in the weight's type. A row for which rounding to nearest in the same groups costs less
    is rounded to nearest: no row is worse than that.
    """
    columns, group = weight.shape[1], settings.group
    permutation = _permutation(hessian.diagonal(), settings)
    own_groups = settings.order != "columns" or settings.static_groups
    positions = torch.arange(columns)
    # The group of each position in the order of rounding.
    group_at = permutation // group if own_groups else positions // group
    factor, damping = inverse_factor(hessian[permutation][:, permutation], settings.damping)
    factor = factor.to(weight.dtype)
    work = weight.T[permutation].contiguous()  # [in, out]
    codes = torch.empty_like(work, dtype=torch.uint8)
    groups, rows = columns // group, len(weight)
    scales, zeros = work.new_empty(groups, rows), work.new_empty(groups, rows)
    fixed = settings.static_groups
    if fixed:
        found = round_groups(weight, group, spec, hessian)
        scales.copy_(found.scales.T)
        zeros.copy_(found.zeros.T)
    for start, end in _blocks(columns, group, contiguous=not fixed):
        errors = work.new_empty(end - start, rows)
        for column in range(start, end):
            index = int(group_at[column])
            if not fixed and column % group == 0:
                cost = _block_cost(hessian, permutation[column : column + group], work.dtype)
                found_scales, found_zeros = find_grid(work[column : column + group].T, spec, cost)
                scales[index], zeros[index] = found_scales, found_zeros
            values = to_codes(work[column], scales[index], zeros[index], spec)
            codes[column] = values.to(torch.uint8)
            rounded = values.sub_(zeros[index]).mul_(scales[index])
            error = (work[column] - rounded).div_(factor[column, column])
            errors[column - start] = error
            if column + 1 < end:
                work[column + 1 : end].addr_(factor[column, column + 1 : end], error, alpha=-1)
        if end < columns:
            work[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    group_of = torch.empty_like(group_at)
    group_of[permutation] = group_at
    natural = torch.empty_like(codes)
    natural[permutation] = codes
    result = QuantizedMatrix(
        natural.T.contiguous(),
        scales.T.to(spec.scale_dtype).contiguous(),
        zeros.T.to(torch.uint8).contiguous(),
        group_of,
    )
    nearest = _nearest(weight, permutation, own_groups, group, spec)
    return _better_rows(weight, result, nearest, hessian), damping


def inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """Upper U with U' U = (H + damping * mean(diagonal) I)^-1, float64, and the damping used: ten
    times more as long as H is not positive definite. Raises EngineError."""
    wide = hessian.double()
    mean = wide.diagonal().mean()
    if not bool(mean.isfinite()) or not bool(mean > 0):
        raise EngineError("the calibration text gives no usable activations (all zero, or NaN)")
    for _ in range(_DAMPING_TRIES):
        damped = wide + damping * mean * torch.eye(len(wide), dtype=torch.float64)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper, damping
        damping = max(10 * damping, 1e-4)
    raise EngineError(
        f"the activations' second moments are not positive definite at a damping of {damping / 10};"
        " use more calibration text"
    )


def _permutation(weights: Tensor, settings: GPTQSettings) -> Tensor:
    if settings.order == "none":
        return torch.arange(len(weights))
    if settings.order == "columns":
        return torch.argsort(weights, descending=True, stable=True)
    by_group = weights.view(-1, settings.group)
    within = torch.argsort(by_group, dim=1, descending=True, stable=True)
    natural = within + torch.arange(len(by_group))[:, None] * settings.group
    return natural[torch.argsort(by_group.sum(1), descending=True, stable=True)].flatten()


def _blocks(columns: int, group: int, contiguous: bool) -> list[tuple[int, int]]:
    """Spans of columns whose errors reach the rest in one product. A group whose grid is found on
    the way must see all errors before it, so it begins at a span's start or lies within one."""
    step = group * (_BLOCK // group) if group <= _BLOCK else _BLOCK
    edges = set(range(0, columns, step))
    if contiguous and group > _BLOCK:
        edges |= set(range(0, columns, group))
    ordered = [*sorted(edges), columns]
    return list(pairwise(ordered))


def _block_cost(hessian: Tensor, members: Tensor, dtype: torch.dtype) -> Tensor:
    return hessian[members][:, members].to(dtype)


def _nearest(
    weight: Tensor, permutation: Tensor, own_groups: bool, group: int, spec: GridSpec
) -> QuantizedMatrix:
    plain = replace(spec, search=False)
    if own_groups:
        return round_groups(weight, group, plain)
    found = round_groups(weight[:, permutation], group, plain)
    codes = torch.empty_like(found.codes)
    codes[:, permutation] = found.codes
    group_of = torch.empty_like(found.group_of)
    group_of[permutation] = found.group_of
    return QuantizedMatrix(codes, found.scales, found.zeros, group_of)


def _better_rows(
    weight: Tensor, found: QuantizedMatrix, nearest: QuantizedMatrix, hessian: Tensor
) -> QuantizedMatrix:
    ours = row_losses(weight, found.dequantize(), hessian)
    theirs = row_losses(weight, nearest.dequantize(), hessian)
    worse = (ours > theirs)[:, None]
    if not bool(worse.any()):
        return found
    return QuantizedMatrix(
        torch.where(worse, nearest.codes, found.codes),
        torch.where(worse, nearest.scales, found.scales),
        torch.where(worse, nearest.zeros, found.zeros),
        found.group_of,
    )
