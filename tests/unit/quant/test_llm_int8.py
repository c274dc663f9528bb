"""LLM.int8: activations that stick out stay precise, and no token depends on its neighbours."""

import torch
from weights import Given

from headrace.engine.quant.int8_dynamic import Int8Dynamic
from headrace.engine.quant.llm_int8 import LLMInt8
from headrace.engine.quant.method import LinearSpec, weight_bytes

CPU = torch.device("cpu")


def with_outliers() -> torch.Tensor:
    """Three tokens of eight have one value of 40 or 60 among ordinary ones."""
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(2)).clamp(-4, 4)
    x[1, 17], x[4, 17], x[6, 200] = 60.0, -40.0, 50.0
    return x


def test_outliers_do_not_drown_the_rest() -> None:
    """One value of 60 makes the step of its token 15 times coarser unless it is taken out."""
    spec = LinearSpec(("a",), 256, (96,), bias=True)
    source = Given({"a.weight": torch.randn(96, 256), "a.bias": torch.randn(96)})
    x = with_outliers()
    errors = {}
    for name, method in (("plain", Int8Dynamic()), ("apart", LLMInt8())):
        weights = method.create_weights(spec, source, torch.float32, CPU)
        exact = x @ method.dequantize(weights).T + weights.bias
        errors[name] = (method.apply(method.process(weights), x) - exact).abs().amax(1)
    rows = [1, 4, 6]
    assert (errors["apart"][rows] < errors["plain"][rows] / 4).all()
    assert errors["apart"].max() < 1.0


def test_a_token_s_result_does_not_depend_on_its_neighbours() -> None:
    spec = LinearSpec(("a",), 256, (96,))
    method = LLMInt8()
    source = Given({"a.weight": torch.randn(96, 256)})
    weights = method.process(method.create_weights(spec, source, torch.float32, CPU))
    x = with_outliers()
    together = method.apply(weights, x)
    for row in range(8):
        assert torch.equal(method.apply(weights, x[row : row + 1])[0], together[row])


def test_weights_are_held_once_and_as_bytes() -> None:
    spec = LinearSpec(("a",), 256, (96,))
    method = LLMInt8()
    source = Given({"a.weight": torch.randn(96, 256)})
    weights = method.process(method.create_weights(spec, source, torch.float32, CPU))
    assert weight_bytes(weights) <= 96 * 256 + 96 * 12
