"""Row counts are tried before they are used, and nothing else is ever called."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from weights import Given

from headrace.engine.errors import EngineError
from headrace.engine.quant.fixed_rows import SIZES, SMALLEST, FixedRows, agreeing_sizes
from headrace.engine.quant.method import LinearSpec
from headrace.engine.quant.unquantized import PlainWeights, Unquantized

IN, OUT = 48, 32
SPEC = LinearSpec(("layer",), IN, (OUT,))


class Chosen(Unquantized):
    """A matmul of the test's own, which notes how many rows it was called with."""

    def __init__(self, matmul: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.matmul = matmul
        self.calls: list[int] = []

    def process(self, weights: PlainWeights) -> PlainWeights:
        return weights

    def apply(self, weights: PlainWeights, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return self.matmul(x, weights.weight)


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """Each output adds its products from the first to the last: no row knows another."""
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total += x[:, k, None] * weight[:, k]
    return total


def backwards_beyond(limit: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Like a library that chooses another loop when there are many rows."""

    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        if len(x) <= limit:
            return in_order(x, weight)
        return in_order(x.flip(1), weight.flip(1))

    return matmul


def loaded(method: Chosen) -> tuple[FixedRows, object]:
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1))
    fixed = FixedRows(method, {})
    source = Given({"layer.weight": weight})
    made = fixed.process(fixed.create_weights(SPEC, source, torch.float32, torch.device("cpu")))
    method.calls.clear()
    return fixed, made


def test_every_count_is_used_where_rows_know_nothing_of_each_other() -> None:
    assert agreeing_sizes(lambda x: in_order(x, torch.ones(OUT, IN)), IN, OUT) == SIZES


def test_counts_that_give_other_bits_are_left_out() -> None:
    method = Chosen(backwards_beyond(64))
    fixed, weights = loaded(method)
    x = torch.randn(300, IN, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([fixed.apply(weights, x[i : i + 1]) for i in range(len(x))])  # type: ignore[arg-type]
    method.calls.clear()
    assert torch.equal(fixed.apply(weights, x), alone)  # type: ignore[arg-type]
    assert method.calls == [64, 64, 64, 64, 48]
    assert not torch.equal(method.matmul(x, weights.inner.weight), alone)  # type: ignore[attr-defined]


def test_a_shape_whose_trial_would_be_long_keeps_to_few_rows() -> None:
    """At 2e9 operations a row, 4e10 are spent before 32 rows have been tried twice."""
    seen: list[int] = []

    def run(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x[:, :1] * 2

    assert agreeing_sizes(run, 8, 10**9) == (SMALLEST,)
    assert set(seen) == {SMALLEST}


def test_rows_that_depend_on_their_neighbours_are_refused() -> None:
    """Activations scaled by the largest of the whole batch."""

    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        scale = x.abs().amax() / 127
        return in_order((x / scale).round(), weight) * scale

    with pytest.raises(EngineError, match="depends on the rows beside it"):
        loaded(Chosen(matmul))


def test_a_row_is_padded_and_no_row_is_none() -> None:
    method = Chosen(in_order)
    fixed, weights = loaded(method)
    x = torch.randn(1, IN)
    assert fixed.apply(weights, x).shape == (1, OUT)  # type: ignore[arg-type]
    assert fixed.apply(weights, x[:0]).shape == (0, OUT)  # type: ignore[arg-type]
    assert method.calls == [SMALLEST, 0]


def test_layers_of_one_form_are_tried_once() -> None:
    method = Chosen(in_order)
    tried: dict[object, tuple[int, ...]] = {}
    for _ in range(3):
        fixed = FixedRows(method, tried)  # type: ignore[arg-type]
        source = Given({"layer.weight": torch.randn(OUT, IN)})
        fixed.process(fixed.create_weights(SPEC, source, torch.float32, torch.device("cpu")))
    assert len(tried) == 1
    assert sum(method.calls) < 2 * sum(SIZES) + SIZES[-1] + 16 * SMALLEST
