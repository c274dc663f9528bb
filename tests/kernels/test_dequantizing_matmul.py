"""The linear layers with packed weights against their float32 formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, assert_close, case_id, combinations, normal, seeded

from headrace.kernels import device
from headrace.kernels.dequantizing_matmul import (
    dequantizing_matmul,
    dequantizing_matmul_reference,
)
from headrace.kernels.packed_weights import (
    BITS,
    NestedScales,
    PackedWeights,
    dequantize,
    pack_tiles,
    unpack_tiles,
)


def make_weights(
    n: int,
    k: int,
    kind: str,
    group: int,
    zeros: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    parts: int = 0,
    seed: int = 0,
) -> PackedWeights:
    """Values of every size the kind has; `parts` above 0: scales in bytes, counted in so many."""
    g = seeded(seed)
    bits, group = BITS[kind], min(group, k)
    groups = -(-k // group)
    values = torch.randint(0, 2**bits, (n, k), generator=g, dtype=torch.uint8)
    if kind == "fp8":
        values[(values & 0x7F) == 0x7F] = 0
    scales = (torch.rand(groups, n, generator=g) + 0.5) * k**-0.5
    # Of the size that makes weights of about 1 / sqrt(K).
    step = {"code4": 1.0, "fp8": 1 / 128}.get(kind, 2.0 ** (1 - bits))
    table = torch.randn(16, generator=g).to(DEVICE) if kind == "code4" else None
    nested = None
    if parts:
        first_rows = sorted(torch.randperm(n - 1, generator=g)[: parts - 1].add(1).tolist())
        starts, entry = [(0, 0)], 0
        for previous, row in zip([0, *first_rows], first_rows, strict=False):
            entry += -(-(row - previous) * groups // 256)
            starts.append((row, entry))
        nested = NestedScales(
            torch.tensor(starts).to(DEVICE),
            (torch.rand(entry + n * groups // 256 + 2, generator=g) + 0.5).to(DEVICE),
            (torch.rand(parts, 257, generator=g) * step * k**-0.5).to(DEVICE),
        )
        scales = torch.randint(0, 256, (groups, n), generator=g, dtype=torch.uint8)
    else:
        scales = (scales * step).to(scale_dtype)
    zero_points = torch.randint(0, 2**bits, (groups, n), generator=g, dtype=torch.uint8)
    integers = kind.startswith("int")
    return PackedWeights(
        pack_tiles(values, bits).to(DEVICE),
        scales.to(DEVICE),
        zero_points.to(DEVICE) if zeros and integers else None,
        kind,
        group,
        k,
        2 ** (bits - 1) if integers else 0,
        table,
        nested,
    )


def check(weights: PackedWeights, rows: int, dtype: torch.dtype, bias: bool = False) -> None:
    g = seeded(rows)
    x = normal(rows, weights.columns, dtype=dtype, generator=g)
    addend = normal(weights.rows, dtype=torch.float32, generator=g) if bias else None
    y = dequantizing_matmul(x, weights, addend)
    assert y.dtype == dtype
    assert_close(y, dequantizing_matmul_reference(x, weights, addend), dtype)


CASES = combinations(
    in_full={"group": (32, 64, 96, 100_000), "rows": (1, 3, 20), "n": (64, 50), "k": (100, 192)},
    kind=("int2", "int3", "int4", "int8"),
    group=(32, 64, 96, 128, 100_000),
    zeros=(False, True),
    rows=(1, 3, 16, 70),
    n=(64, 96, 192, 50),
    k=(32, 100, 192, 576),
    dtype=DTYPES,
    scale_dtype=DTYPES,
    bias=(False, True),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_integers_in_groups_are_multiplied_as_their_floats(case):
    names = ("n", "k", "kind", "group", "zeros", "scale_dtype")
    weights = make_weights(**{name: case[name] for name in names})
    check(weights, case["rows"], case["dtype"], case["bias"])


CODE_CASES = combinations(
    in_full={"n": (64, 50), "k": (96, 320)},
    kind=("code4", "fp8"),
    group=(32, 64, 128, 100_000),
    rows=(1, 5, 40),
    n=(64, 96, 50),
    k=(64, 96, 320),
    dtype=DTYPES,
    parts=(0, 1, 3),
)


@pytest.mark.parametrize("case", CODE_CASES, ids=case_id)
def test_codes_and_nested_scales_are_multiplied_as_their_floats(case):
    names = ("n", "k", "kind", "group", "parts")
    check(make_weights(**{name: case[name] for name in names}), case["rows"], case["dtype"])


@pytest.mark.parametrize("kind", sorted(BITS))
@pytest.mark.parametrize("rows", [16, 33])
def test_splits_of_a_long_row_add_up(kind, rows, monkeypatch):
    """As many multiprocessors as an H200 has; 1,600 columns are 13 steps, cut into splits of 5."""
    monkeypatch.setattr(device, "multiprocessors", lambda _: 132)
    check(make_weights(50, 1600, kind, 64, zeros=True), rows, torch.bfloat16, bias=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_the_same_in_any_batch_when_asked(dtype, monkeypatch):
    monkeypatch.setattr(device, "multiprocessors", lambda _: 132)
    weights = make_weights(66, 1100, "int4", 64, zeros=True)
    x = normal(70, 1100, dtype=dtype, generator=seeded())
    whole = dequantizing_matmul(x, weights, batch_invariant=True)
    assert_close(whole, dequantizing_matmul_reference(x, weights), dtype)
    for low, high in ((0, 1), (63, 66)):
        part = dequantizing_matmul(x[low:high].clone(), weights, batch_invariant=True)
        assert torch.equal(part, whole[low:high])


@pytest.mark.parametrize("kind", sorted(BITS))
@pytest.mark.parametrize("columns", [1, 31, 64, 300, 576])
def test_tiles_come_back(kind, columns):
    bits = BITS[kind]
    values = torch.randint(0, 2**bits, (7, columns), dtype=torch.uint8)
    assert torch.equal(unpack_tiles(pack_tiles(values, bits), columns, bits), values)


def test_every_float8_is_widened_exactly():
    """One column of weights a byte, one row of x a column: y holds the 256 values, NaN included."""
    values = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32)
    scales = torch.ones(1, 256, device=DEVICE)
    weights = PackedWeights(pack_tiles(values, 8).to(DEVICE), scales, None, "fp8", 32, 32)
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for rows in (1, 16):
        x = torch.zeros(rows, 32, dtype=torch.float16, device=DEVICE)
        x[:, 3] = 1
        y = dequantizing_matmul(x, weights)[rows - 1].float().cpu()
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 20])
def test_what_lies_beyond_the_row_is_not_read(rows):
    """K of 100 in a matrix of 160 columns whose others are NaN."""
    weights = make_weights(64, 100, "int4", 32)
    wide = torch.full((2 * rows, 160), torch.nan, device=DEVICE)
    wide[:, :100] = torch.randn(2 * rows, 100, generator=seeded()).to(DEVICE)
    x = wide[::2, :100]
    assert_close(
        dequantizing_matmul(x, weights), dequantizing_matmul_reference(x, weights), torch.float32
    )


def test_no_rows_give_no_rows():
    weights = make_weights(64, 64, "int4", 32)
    assert dequantizing_matmul(torch.zeros(0, 64, device=DEVICE), weights).shape == (0, 64)


def test_a_wrong_layout_is_refused():
    weights = make_weights(64, 128, "int4", 32)
    x = torch.zeros(2, 128, device=DEVICE)
    for message, changed in (
        ("multiple of 32", {"group": 40}),
        ("kind 'int5'", {"kind": "int5"}),
        ("tiles", {"kind": "int3"}),
        ("scales", {"scales": weights.scales.t()}),
        ("zeros", {"zeros": weights.tiles[0]}),
        ("table", {"table": x[0]}),
    ):
        with pytest.raises(ValueError, match=message):
            dequantizing_matmul(x, weights._replace(**changed))
    with pytest.raises(ValueError, match="128"):
        dequantizing_matmul(x[:, :64], weights)
    with pytest.raises(ValueError, match="bias"):
        dequantizing_matmul(x, weights, x[0])


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(sorted(BITS)), rows=st.integers(1, 20), n=st.integers(4, 70),
    k=st.integers(1, 300), group=st.sampled_from((32, 64, 128, 1000)), zeros=st.booleans(),
    parts=st.integers(0, 3), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape(kind, rows, n, k, group, zeros, parts, seed):
    check(make_weights(n, k, kind, group, zeros, parts=parts, seed=seed), rows, torch.float32)


def test_the_reference_is_the_formula_written_out():
    """Two groups of 32, one row, by hand: (q - z) * s."""
    weights = make_weights(4, 64, "int4", 32, zeros=True, scale_dtype=torch.float32)
    q = unpack_tiles(weights.tiles, 64, 4).float()
    assert weights.zeros is not None
    for k in (0, 31, 32, 63):
        expected = (q[:, k] - weights.zeros[k // 32].float()) * weights.scales[k // 32]
        assert torch.equal(dequantize(weights)[:, k], expected)
