"""Integer weights times integer activations: exact sums, and tokens that know no neighbours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, assert_close, case_id, combinations, normal, seeded

from headrace.kernels import device
from headrace.kernels.int8_dynamic_matmul import (
    int8_dynamic_matmul,
    int8_dynamic_matmul_reference,
    quantize_tokens,
    quantize_tokens_reference,
)


def make_weights(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = seeded(seed)
    w = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8).to(DEVICE)
    return w, ((torch.rand(n, generator=g) + 0.5) * k**-0.5 / 64).to(DEVICE)


CASES = combinations(
    in_full={"rows": (1, 3, 20)},
    rows=(1, 3, 16, 70),
    n=(64, 96, 192, 50),
    k=(32, 100, 576),
    dtype=DTYPES,
    bias=(False, True),
    levels=(127.0, 127.5),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_product_is_the_exact_sum_of_rounded_tokens(case):
    g = seeded()
    x = normal(case["rows"], case["k"], dtype=case["dtype"], generator=g, scale=3.0)
    w, scale = make_weights(case["n"], case["k"])
    bias = normal(case["n"], dtype=torch.float32, generator=g) if case["bias"] else None
    y = int8_dynamic_matmul(x, w, scale, bias, levels=case["levels"])
    assert y.dtype == case["dtype"]
    expected = int8_dynamic_matmul_reference(x, w, scale, bias, case["levels"])
    assert_close(y, expected, case["dtype"])


@pytest.mark.parametrize("levels", [127.0, 127.5])
def test_awkward_tokens_are_rounded_as_the_reference_rounds_them(levels):
    """Zeros, ties, subnormals, huge values, NaN and infinity: to the last bit."""
    x = torch.randn(9, 100, generator=seeded(1))
    x[1] = 0
    x[2] *= 1e-38  # its scale's reciprocal is infinite
    x[3, 7] = torch.nan
    x[4, 99] = -torch.inf
    x[5] *= 1e30
    x[6] = torch.arange(100) - 50.0
    x[6, 0], x[6, 1] = 127.0, -127.5
    x = x.to(DEVICE)
    quantized, scales = quantize_tokens(x, levels)
    expected, expected_scales = quantize_tokens_reference(x, levels)
    assert torch.equal(quantized, expected)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    w, w_scale = make_weights(32, 100)
    y = int8_dynamic_matmul(x, w, w_scale, levels=levels)
    assert y.isnan().all(dim=1).tolist() == [row in (3, 4) for row in range(9)]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the device says what it is")
def test_a_device_without_byte_products_gives_the_same_bits(monkeypatch):
    x = normal(5, 600, dtype=torch.float16, generator=seeded())
    w, scale = make_weights(40, 600)
    expected = int8_dynamic_matmul(x, w, scale)
    monkeypatch.setattr(device, "capability", lambda _: (7, 5))
    assert torch.equal(int8_dynamic_matmul(x, w, scale), expected)


def test_a_row_is_the_same_in_any_batch():
    x = normal(70, 200, dtype=torch.bfloat16, generator=seeded())
    w, scale = make_weights(96, 200)
    whole = int8_dynamic_matmul(x, w, scale)
    for low, high in ((0, 1), (60, 70)):
        assert torch.equal(int8_dynamic_matmul(x[low:high].clone(), w, scale), whole[low:high])


def test_rows_may_be_strided_and_none_give_none():
    x = normal(10, 160, dtype=torch.float32, generator=seeded())[::2, 32:132]
    w, scale = make_weights(64, 112)
    part = w[:, :100]
    expected = int8_dynamic_matmul_reference(x, part, scale)
    assert_close(int8_dynamic_matmul(x, part, scale), expected, torch.float32)
    assert int8_dynamic_matmul(x[:0], part, scale).shape == (0, 64)


def test_a_wrong_layout_is_refused():
    x = torch.zeros(2, 64, device=DEVICE)
    w, scale = make_weights(32, 64)
    with pytest.raises(ValueError, match="int8"):
        int8_dynamic_matmul(x, w.float(), scale)
    with pytest.raises(ValueError, match=r"\[N, 64\]"):
        int8_dynamic_matmul(x, w[:, :32], scale)
    with pytest.raises(ValueError, match="w_scale"):
        int8_dynamic_matmul(x, w, scale[:8])
    with pytest.raises(ValueError, match="bias"):
        int8_dynamic_matmul(x, w, scale, x[0])


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40), n=st.integers(1, 150), k=st.integers(1, 300),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape(rows, n, k, seed):
    x = normal(rows, k, dtype=torch.float32, generator=seeded(seed))
    w, scale = make_weights(n, k, seed)
    expected = int8_dynamic_matmul_reference(x, w, scale)
    assert_close(int8_dynamic_matmul(x, w, scale), expected, torch.float32)
