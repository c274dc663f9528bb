"""GPTQ against its definition, written down densely: no factor, no blocks, float64."""

import pytest
import torch
from torch import Tensor

from headrace.engine.errors import EngineError
from headrace.engine.quantize.gptq import GPTQSettings, Order, gptq, inverse_factor
from headrace.engine.quantize.grid import GridSpec, QuantizedMatrix, round_groups, row_losses

ROWS, COLUMNS = 24, 192


def problem(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights and a hessian of correlated inputs whose magnitudes differ, float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    mixing = torch.randn(COLUMNS, COLUMNS, generator=generator, dtype=torch.float64)
    inputs = torch.randn(400, COLUMNS, generator=generator, dtype=torch.float64) @ mixing
    inputs *= torch.rand(COLUMNS, generator=generator, dtype=torch.float64) ** 2 * 4
    return weight, inputs.T @ inputs / len(inputs)


def grid_of(values: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """One row's group: scale in float16 and zero point."""
    low, high = values.min().clamp(max=0), values.max().clamp(min=0)
    if spec.symmetric:
        scale = 2 * torch.maximum(-low, high) / spec.top
        return scale.half().double(), torch.tensor(2.0 ** (spec.bits - 1))
    scale = ((high - low) / spec.top).half().double()
    return scale, (-low / scale).round().clamp(spec.lowest_zero, spec.top)


def dense_gptq(
    weight: Tensor, hessian: Tensor, order: Tensor, group: int, spec: GridSpec, natural: bool
) -> Tensor:
    """Optimal brain quantization in a fixed order: after column q, the others move by
    -error * Hinv[q] / Hinv[q, q], and q is eliminated from Hinv. Dequantized weights."""
    weight, result = weight.clone(), torch.zeros_like(weight)
    damping = 0.01 * hessian.diagonal().mean()
    inverse = torch.linalg.inv(hessian + damping * torch.eye(COLUMNS, dtype=torch.float64))
    grids: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for position, column in enumerate(order.tolist()):
        key = column // group if natural else position // group
        members = [
            other
            for index, other in enumerate(order.tolist())
            if (other // group if natural else index // group) == key
        ]
        for row in range(ROWS):
            if (key, row) not in grids:
                grids[key, row] = grid_of(weight[row, members], spec)
            scale, zero = grids[key, row]
            code = (weight[row, column] / scale + zero).round().clamp(0, spec.top)
            result[row, column] = (code - zero) * scale
        error = (weight[:, column] - result[:, column]) / inverse[column, column]
        weight -= error[:, None] * inverse[column]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return result


def orders(hessian: Tensor, group: int) -> dict[Order, Tensor]:
    weights = hessian.diagonal()
    by_group = weights.view(-1, group)
    groups = by_group.sum(1).argsort(descending=True).tolist()
    within = [index * group + by_group[index].argsort(descending=True) for index in groups]
    return {
        "none": torch.arange(COLUMNS),
        "columns": weights.argsort(descending=True),
        "groups": torch.cat(within),
    }


def wide(matrix: QuantizedMatrix) -> Tensor:
    zeros = matrix.zeros.double()[:, matrix.group_of]
    return (matrix.codes.double() - zeros) * matrix.scales.double()[:, matrix.group_of]


@pytest.mark.parametrize("order", ["none", "columns", "groups"])
@pytest.mark.parametrize(
    ("group", "symmetric", "bits"), [(32, False, 4), (64, True, 3), (192, False, 2), (96, True, 4)]
)
def test_equals_the_dense_definition(order: Order, group: int, symmetric: bool, bits: int) -> None:
    """In float64 every code is the same; rows for which rounding to nearest is better are not
    GPTQ's and are left out."""
    weight, hessian = problem(bits)
    spec = GridSpec(bits, symmetric, lowest_zero=1)
    found, damping = gptq(weight, hessian, GPTQSettings(group, order), spec)
    natural = order != "columns"
    expected = dense_gptq(weight, hessian, orders(hessian, group)[order], group, spec, natural)
    same = (wide(found) - expected).abs().amax(1) < 1e-9
    assert damping == 0.01
    assert int(same.sum()) >= ROWS - 4
    if not bool(same.all()):
        losses = row_losses(weight, wide(found), hessian) - row_losses(weight, expected, hessian)
        assert bool((losses[~same] < 0).all())


@pytest.mark.parametrize("order", ["none", "columns", "groups"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_costs_less_than_rounding_to_nearest(
    order: Order, static: bool, search: bool, bits: int
) -> None:
    """By a factor in the mean, and in no row more."""
    weight, hessian = (tensor.float() for tensor in problem(7))
    spec = GridSpec(bits, False, lowest_zero=1, search=search)
    found, _ = gptq(weight, hessian, GPTQSettings(32, order, static), spec)
    nearest = round_groups(weight, 32, GridSpec(bits, False, lowest_zero=1))
    ours = row_losses(weight, found.dequantize(), hessian)
    theirs = row_losses(weight, nearest.dequantize(), hessian)
    assert ours.sum() < 0.75 * theirs.sum()
    if order != "columns" or static:
        assert bool((ours <= theirs).all())
        assert torch.equal(found.group_of, torch.arange(COLUMNS) // 32)


def test_rows_that_gptq_makes_worse_are_rounded_to_nearest() -> None:
    """Weights that lie on the grid already cost nothing when they are rounded to nearest. (A
    symmetric grid does not reproduce itself: its top code is less than half its width away.)"""
    weight, hessian = (tensor.float() for tensor in problem(3))
    spec = GridSpec(4, False)
    on_grid = round_groups(weight, 32, spec).dequantize()
    nearest = round_groups(on_grid, 32, spec)
    assert torch.equal(nearest.dequantize(), on_grid)
    found, _ = gptq(on_grid, hessian, GPTQSettings(32), spec)
    assert float(row_losses(on_grid, found.dequantize(), hessian).max()) == 0


def test_inputs_that_never_fire_are_rounded_to_nearest() -> None:
    weight, hessian = (tensor.float() for tensor in problem(5))
    silent = [3, 40, 41]
    hessian[silent] = 0
    hessian[:, silent] = 0
    spec = GridSpec(4, True)
    found, _ = gptq(weight, hessian, GPTQSettings(32, static_groups=True), spec)
    nearest = round_groups(weight, 32, spec)
    assert torch.equal(found.codes[:, silent], nearest.codes[:, silent])


def test_fewer_tokens_than_inputs_are_damped_until_they_can_be_inverted() -> None:
    inputs = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    factor, damping = inverse_factor(inputs.T @ inputs, 1e-17)
    assert damping > 1e-17
    assert bool(factor.isfinite().all())


def test_activations_that_say_nothing_are_refused() -> None:
    with pytest.raises(EngineError, match="no usable activations"):
        inverse_factor(torch.zeros(8, 8), 0.01)
