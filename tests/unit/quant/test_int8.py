"""INT8: weights alone, and weights with activations quantized token by token."""

import pytest
import torch
from torch import Tensor
from weights import Given

from headrace.engine.quant import int8_dynamic, packed
from headrace.engine.quant.int8 import Int8, int8_matrix, quantize_channels
from headrace.engine.quant.int8_dynamic import Int8Dynamic, quantize_tokens
from headrace.engine.quant.int8_panels import multiplies_int8_panels
from headrace.engine.quant.method import LinearSpec, weight_bytes

CPU = torch.device("cpu")
SHAPES = [(64, 64), (96, 40), (192, 576), (321, 100)]


def layer(rows: int, columns: int, bias: bool = True) -> tuple[LinearSpec, Given]:
    """A layer of two parts, one row and the rest, as qkv and gate-up are made of several."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spec = LinearSpec(("a", "b"), columns, (1, rows - 1), bias)
    tensors = {"a.weight": normal(1, columns), "b.weight": normal(rows - 1, columns)}
    return spec, Given({**tensors, "a.bias": normal(1), "b.bias": normal(rows - 1)})


def awkward_rows() -> Tensor:
    x = torch.randn(9, 100, generator=torch.Generator().manual_seed(1))
    x[1] = 0
    x[2] *= 1e-38  # its scale's reciprocal is infinite
    x[3, 7] = torch.nan
    x[4, 99] = -torch.inf
    x[5] *= 1e30
    x[6] = torch.arange(100) - 50.0
    x[6, 0], x[6, 1] = 127.0, -127.5  # ties
    return x


@pytest.mark.parametrize("levels", [127.0, 127.5])
def test_compiled_tokens_equal_plain_torch_to_the_last_bit(
    levels: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = awkward_rows()
    quantized, scales = quantize_tokens(x, levels)
    monkeypatch.setattr(int8_dynamic, "kernel", lambda module, name: None)
    plain, plain_scales = quantize_tokens(x, levels)
    assert torch.equal(quantized, plain)
    torch.testing.assert_close(scales, plain_scales, rtol=0, atol=0, equal_nan=True)


def test_a_token_s_error_is_at_most_half_a_step() -> None:
    x = torch.randn(50, 576)
    quantized, scales = quantize_tokens(x)
    restored = (quantized.float() - 128) * scales[:, None]
    assert ((restored - x).abs() <= scales[:, None] * 0.5001).all()
    assert quantized.min() >= 1


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("batch", [1, 5, 70])
def test_int8_dynamic_is_exact_integer_arithmetic(rows: int, columns: int, batch: int) -> None:
    """What oneDNN returns equals the products of the quantized values in float64."""
    spec, source = layer(rows, columns)
    method = Int8Dynamic()
    weights = method.create_weights(spec, source, torch.float32, CPU)
    x = torch.randn(batch, columns)
    quantized, scales = quantize_tokens(x)
    expected = (quantized.double() - 128) @ weights.weight.double().T
    expected = expected * weights.scales * scales[:, None] + weights.bias
    y = method.apply(method.process(weights), x)
    torch.testing.assert_close(y, expected.float(), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(method.apply(weights, x), y, rtol=1e-6, atol=1e-4)


def test_int8_dynamic_rows_do_not_depend_on_their_batch() -> None:
    spec, source = layer(192, 576)
    method = Int8Dynamic()
    weights = method.process(method.create_weights(spec, source, torch.float32, CPU))
    x = torch.randn(70, 576)
    together = method.apply(weights, x)
    for row in (0, 33, 69):
        assert torch.equal(method.apply(weights, x[row : row + 1])[0], together[row])


@pytest.mark.skipif(not multiplies_int8_panels(), reason="needs numba and AVX-512 VNNI")
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (96, 40), (192, 576), (321, 100), (48, 4)])
def test_our_int8_kernel_gives_the_bits_that_onednn_gives(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full panels and a part of one, every tile, few rows and many, NaN among them."""
    spec, source = layer(rows, columns)
    method = Int8Dynamic()
    plain = method.create_weights(spec, source, torch.float32, CPU)
    ours = method.process(plain)
    monkeypatch.setattr(int8_dynamic, "multiplies_int8_panels", lambda: False)
    theirs = method.process(plain)
    assert ours.panels is not None and theirs.packed
    for batch in (0, 1, 2, 3, 7, 8, 15, 24, 31, 200):
        x = torch.randn(batch, columns)
        if batch > 20:
            x[19, 0] = torch.nan
        found = method.apply(ours, x)
        torch.testing.assert_close(found, method.apply(theirs, x), rtol=0, atol=0, equal_nan=True)


def test_nan_and_infinity_are_seen_in_the_outputs() -> None:
    """A sampler that looks for NaN finds it; the other rows are none the worse."""
    spec, source = layer(96, 100)
    method = Int8Dynamic()
    y = method.apply(
        method.process(method.create_weights(spec, source, torch.float32, CPU)), awkward_rows()
    )
    assert y.isnan().all(dim=1).tolist() == [row in (3, 4) for row in range(9)]
    assert y[[0, 1, 2, 5, 6, 7, 8]].isfinite().all()


def test_activation_rounding_is_small_against_the_result() -> None:
    """Error of weights and activations together: about 1 % of the outputs' spread."""
    spec, source = layer(192, 576)
    exact = torch.cat([source.load("a.weight"), source.load("b.weight")])
    x = torch.randn(64, 576)
    expected = x @ exact.T + torch.cat([source.load("a.bias"), source.load("b.bias")])
    method = Int8Dynamic()
    y = method.apply(method.process(method.create_weights(spec, source, torch.float32, CPU)), x)
    assert (y - expected).std() < 0.015 * expected.std()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("batch", [1, 4, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_multiply_as_their_float_values(
    rows: int, columns: int, batch: int, dtype: torch.dtype
) -> None:
    spec, source = layer(rows, columns)
    method = Int8()
    weights = method.process(method.create_weights(spec, source, dtype, CPU))
    x = torch.randn(batch, columns).to(dtype)
    bias = torch.cat([source.load("a.bias"), source.load("b.bias")])
    expected = x.float() @ method.dequantize(weights).T + bias
    y = method.apply(weights, x)
    assert y.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(y, expected.to(dtype), rtol=rtol, atol=1e-4)


def test_int8_takes_a_quarter_of_float32() -> None:
    spec, source = layer(192, 576, bias=False)
    for method in (Int8(), Int8Dynamic()):
        weights = method.process(method.create_weights(spec, source, torch.float32, CPU))
        assert weight_bytes(weights) <= 192 * 576 + 192 * 12


def test_a_row_of_zeros_stays_zeros() -> None:
    values, scales = quantize_channels(torch.zeros(3, 20))
    assert values.abs().max() == 0 and torch.equal(scales, torch.ones(3))


def test_without_numba_rows_are_unpacked_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randint(-127, 128, (100, 50), dtype=torch.int8)
    matrix, x = int8_matrix(values, torch.rand(100)), torch.randn(7, 50)
    compiled = packed.multiply(matrix, None, x)
    monkeypatch.setattr(packed, "kernel", lambda module, name: None)
    torch.testing.assert_close(packed.multiply(matrix, None, x), compiled, rtol=1e-5, atol=1e-3)
