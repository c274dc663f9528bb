"""The batch-invariant linear layer: right, and the same for a row in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, assert_close, case_id, combinations, normal, seeded

from headrace.kernels import device
from headrace.kernels.batch_invariant_matmul import (
    batch_invariant_matmul,
    batch_invariant_matmul_reference,
)

CASES = combinations(
    rows=(1, 3, 64, 130),
    n=(1, 48, 200),
    k=(16, 80, 576, 1000),
    dtype=DTYPES,
    bias=(False, True),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_product_is_right(case):
    g = seeded()
    x = normal(case["rows"], case["k"], dtype=case["dtype"], generator=g)
    w = normal(case["n"], case["k"], dtype=case["dtype"], generator=g, scale=case["k"] ** -0.5)
    bias = normal(case["n"], dtype=case["dtype"], generator=g) if case["bias"] else None
    y = batch_invariant_matmul(x, w, bias)
    assert y.dtype == case["dtype"]
    assert_close(y, batch_invariant_matmul_reference(x, w, bias), case["dtype"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("multiprocessors", [1, 132], ids=["wide", "narrow"])
def test_a_row_is_the_same_in_any_batch(dtype, multiprocessors, monkeypatch):
    """Both tiles: a weight is wide or narrow compared with the device."""
    monkeypatch.setattr(device, "multiprocessors", lambda _: multiprocessors)
    g = seeded()
    x = normal(150, 200, dtype=dtype, generator=g)
    w = normal(96, 200, dtype=dtype, generator=g)
    whole = batch_invariant_matmul(x, w)
    assert_close(whole / 14, batch_invariant_matmul_reference(x, w) / 14, dtype)
    for low, high in ((0, 1), (149, 150), (60, 70), (63, 150)):
        assert torch.equal(batch_invariant_matmul(x[low:high].clone(), w), whole[low:high])


def test_rows_may_be_strided_and_none_give_none():
    x = normal(10, 96, dtype=torch.float32, generator=seeded())
    w = normal(32, 64, dtype=torch.float32, generator=seeded(1))
    part = x[::2, 32:]
    expected = batch_invariant_matmul_reference(part, w)
    assert_close(batch_invariant_matmul(part, w), expected, torch.float32)
    assert batch_invariant_matmul(part[:0], w).shape == (0, 32)


def test_a_wrong_layout_is_refused():
    x = torch.zeros(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="one dtype"):
        batch_invariant_matmul(x, x.half())
    with pytest.raises(ValueError, match=r"\[N, K\]"):
        batch_invariant_matmul(x, x[:, :32])
    with pytest.raises(ValueError, match="bias"):
        batch_invariant_matmul(x, x, x[0])


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40), n=st.integers(1, 150), k=st.integers(1, 150),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape(rows, n, k, seed):
    g = seeded(seed)
    x = normal(rows, k, dtype=torch.float32, generator=g)
    w = normal(n, k, dtype=torch.float32, generator=g, scale=k**-0.5)
    y = batch_invariant_matmul(x, w)
    assert_close(y, batch_invariant_matmul_reference(x, w), torch.float32)
