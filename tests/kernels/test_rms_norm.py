"""RMSNorm kernels against the float32 formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DTYPES, assert_close, case_id, combinations, normal, seeded

from headrace.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)

CASES = combinations(
    rows=(1, 3, 17), hidden=(1, 64, 80, 576, 1000, 4096), dtype=DTYPES, offset=(0.0, 1.0)
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_rows_are_normalised(case):
    g = seeded()
    x = normal(case["rows"], case["hidden"], dtype=case["dtype"], generator=g, scale=3.0)
    w = normal(case["hidden"], dtype=case["dtype"], generator=g)
    y = rms_norm(x, w, 1e-5, offset=case["offset"])
    assert y.dtype == x.dtype
    assert_close(y, rms_norm_reference(x, w, 1e-5, case["offset"]), case["dtype"])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_residual_is_added_rounded_and_kept(case):
    g = seeded(1)
    x = normal(case["rows"], case["hidden"], dtype=case["dtype"], generator=g)
    residual = normal(case["rows"], case["hidden"], dtype=case["dtype"], generator=g, scale=5.0)
    w = normal(case["hidden"], dtype=case["dtype"], generator=g)
    y_expected, h_expected = add_rms_norm_reference(x, residual, w, 1e-6, case["offset"])
    y = add_rms_norm(x, residual, w, 1e-6, offset=case["offset"])
    assert torch.equal(residual, h_expected)
    assert_close(y, y_expected, case["dtype"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_a_fused_projection_are_read_through_their_strides(dtype):
    qkv = normal(5, 10 * 96, dtype=dtype, generator=seeded())
    k = qkv.view(5, 10, 96)[:, 6:8]
    w = normal(96, dtype=dtype, generator=seeded(1))
    assert_close(rms_norm(k, w, 1e-6), rms_norm_reference(k, w, 1e-6), dtype)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x = normal(33, 576, dtype=torch.bfloat16, generator=seeded())
    w = normal(576, dtype=torch.bfloat16, generator=seeded(1))
    assert torch.equal(rms_norm(x, w, 1e-6)[7:8], rms_norm(x[7:8], w, 1e-6))


def test_no_rows_give_no_rows():
    w = normal(64, dtype=torch.float32, generator=seeded())
    assert rms_norm(w.new_empty((0, 64)), w, 1e-6).shape == (0, 64)


def test_a_wrong_layout_is_refused():
    x = normal(4, 64, dtype=torch.float32, generator=seeded())
    with pytest.raises(ValueError, match="weight must be contiguous"):
        rms_norm(x, x[0, :32], 1e-6)
    with pytest.raises(ValueError, match="last contiguous"):
        rms_norm(x.t(), x[0, :4], 1e-6)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, x[:2], x[0], 1e-6)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 9), hidden=st.integers(1, 700), seed=st.integers(0, 2**31))
def test_any_shape_is_normalised(rows, hidden, seed):
    g = seeded(seed)
    x = normal(rows, hidden, dtype=torch.float32, generator=g)
    w = normal(hidden, dtype=torch.float32, generator=g)
    assert_close(rms_norm(x, w, 1e-6), rms_norm_reference(x, w, 1e-6), torch.float32)
