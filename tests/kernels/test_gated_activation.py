"""Gated activations against torch's own functions in float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, assert_close, case_id, combinations, normal, seeded

from headrace.kernels.gated_activation import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
)

ACTIVATIONS = (
    (silu_and_mul, silu_and_mul_reference),
    (gelu_tanh_and_mul, gelu_tanh_and_mul_reference),
)
CASES = combinations(
    activation=(0, 1), rows=(1, 5, 16), width=(1, 48, 257, 1024, 1536), dtype=DTYPES
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_activated_gate_multiplies_up(case):
    launch, reference = ACTIVATIONS[case["activation"]]
    x = normal(case["rows"], 2 * case["width"], dtype=case["dtype"], generator=seeded(), scale=3)
    y = launch(x)
    assert y.shape == (case["rows"], case["width"]) and y.dtype == case["dtype"]
    assert_close(y, reference(x), case["dtype"])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["silu", "gelu"])
def test_large_gates_neither_overflow_nor_turn_into_nan(activation):
    launch, reference = activation
    gate = torch.tensor([[-200.0, -88.0, 88.0, 200.0]], device=DEVICE)
    x = torch.cat([gate, torch.ones_like(gate)], dim=1)
    assert_close(launch(x), reference(x), torch.float32)


def test_rows_may_be_strided():
    wide = normal(6, 3 * 64, dtype=torch.float32, generator=seeded())
    x = wide[::2, :128]
    assert_close(silu_and_mul(x), silu_and_mul_reference(x), torch.float32)


def test_no_rows_give_no_rows_and_an_odd_row_is_refused():
    assert silu_and_mul(torch.empty((0, 8), device=DEVICE)).shape == (0, 4)
    with pytest.raises(ValueError, match="2 \\* width"):
        silu_and_mul(torch.empty((2, 7), device=DEVICE))


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 6), width=st.integers(1, 1500), seed=st.integers(0, 2**31))
def test_any_width_is_activated(rows, width, seed):
    x = normal(rows, 2 * width, dtype=torch.float32, generator=seeded(seed))
    assert_close(silu_and_mul(x), silu_and_mul_reference(x), torch.float32)
