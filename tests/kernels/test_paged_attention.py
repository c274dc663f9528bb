"""Paged attention against the formula in float32: mixed batches, splits, windows, soft cap."""

import pytest
import torch
from attention_cases import PagedBatch, paged_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, assert_close, case_id, combinations

from headrace.kernels.paged_attention import paged_attention, paged_attention_reference


def run(batch: PagedBatch, **options):
    return paged_attention(
        *batch.tensors,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        scale=batch.scale,
        **options,
    )


def expected(batch: PagedBatch, **options):
    return paged_attention_reference(*batch.tensors, scale=batch.scale, **options)


BATCHES = {
    "one_token": [(1, 1)],
    "decodes": [(1, 17), (1, 300), (1, 64)],
    "prefill": [(37, 37)],
    "chunk": [(20, 150)],
    "mixed": [(1, 33), (25, 25), (1, 290), (7, 71), (1, 1)],
    "empty_rows": [(1, 0), (0, 40), (5, 5), (0, 0), (1, 20)],
}
SMALL = {
    "few_decodes": [(1, 17), (1, 0), (1, 70)],
    "few_of_all": [(1, 33), (5, 5), (3, 40), (0, 7), (1, 1)],
}
CASES = combinations(
    in_full={
        "lengths": SMALL,
        "heads": ((1, 1), (2, 2), (4, 2), (6, 2), (4, 1), (7, 1), (8, 1), (16, 1)),
    },
    lengths=BATCHES,
    heads=((1, 1), (2, 2), (6, 2), (7, 1), (16, 1), (16, 4)),
    head_dim=(64, 80, 96, 128, 256),
    block_size=(16, 32),
    dtype=DTYPES,
    window=(None, 1, 24),
    softcap=(None, 5.0),
    mode=("free", "three_splits", "deterministic"),
)
MODES = {"free": {}, "three_splits": {"num_splits": 3}, "deterministic": {"deterministic": True}}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_query_attends_to_its_own_past(case):
    q_heads, kv_heads = case["heads"]
    batch = paged_batch(
        {**BATCHES, **SMALL}[case["lengths"]],
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=case["head_dim"],
        block_size=case["block_size"],
        dtype=case["dtype"],
    )
    options = {"window": case["window"], "softcap": case["softcap"]}
    out = run(batch, **options, **MODES[case["mode"]])
    assert out.dtype == case["dtype"]
    assert_close(out, expected(batch, **options), case["dtype"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_ragged_contexts(mode, dtype):
    """Lengths on both sides of a tile (64), a split (256 or 512) and several of them."""
    lengths = [(1, n) for n in (1, 63, 65, 256, 257, 511, 513, 1025, 2047)] + [(9, 1030)]
    batch = paged_batch(
        lengths, q_heads=4, kv_heads=1, head_dim=64, block_size=16, dtype=dtype, seed=3
    )
    assert_close(run(batch, **MODES[mode]), expected(batch), dtype)


@pytest.mark.parametrize("mode", MODES)
def test_a_window_that_begins_within_a_split(mode):
    batch = paged_batch(
        [(1, 1500), (1, 40), (30, 1100)],
        q_heads=2, kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32,
    )  # fmt: skip
    for window in (100, 700):
        out = run(batch, window=window, **MODES[mode])
        assert_close(out, expected(batch, window=window), torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_speculated_tokens_are_split_like_decodes(mode):
    """Up to 4 new tokens a sequence beside a prefill chunk of 11."""
    batch = paged_batch(
        [(4, 600), (1, 90), (2, 2), (11, 300), (3, 515)],
        q_heads=6, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32,
    )  # fmt: skip
    out = run(batch, max_split_query_len=4, **MODES[mode])
    assert_close(out, expected(batch), torch.float32)


def test_lengths_below_the_stated_bounds_change_nothing():
    """A captured graph keeps the bounds of its capture and is replayed with shorter sequences."""
    batch = paged_batch(
        [(1, 70), (1, 5)], q_heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32
    )
    for options in ({"deterministic": True}, {"num_splits": 5}):
        out = paged_attention(
            *batch.tensors, max_query_len=8, max_seq_len=4096, scale=batch.scale, **options
        )
        assert_close(out, expected(batch), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_bits_do_not_depend_on_the_batch_or_on_the_chunk(dtype):
    """The last token of a 600-token sequence: decoded alone, in a crowd, at the end of a chunk."""
    crowd = [(1, 600), (1, 44), (13, 530), (1, 1200)]
    shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": dtype}
    batch = paged_batch(crowd, **shape)
    in_crowd = run(batch, deterministic=True)

    def alone(s: int, query_len: int, q: torch.Tensor) -> torch.Tensor:
        keys = crowd[s][1]
        return paged_attention(
            q, batch.k_cache, batch.v_cache, batch.block_tables[s : s + 1].clone(),
            torch.tensor([0, query_len], dtype=torch.int32, device=DEVICE),
            batch.seq_lens[s : s + 1].clone(),
            max_query_len=query_len, max_seq_len=keys, scale=batch.scale, deterministic=True,
        )  # fmt: skip

    assert torch.equal(alone(0, 1, batch.q[:1]), in_crowd[:1])
    chunk = torch.cat([torch.randn_like(batch.q[:1]).expand(90, -1, -1), batch.q[:1]])
    assert torch.equal(alone(0, 91, chunk)[-1:], in_crowd[:1])
    # And each token of the chunk of 13 is what a decode at its place would have given.
    chunk_out = in_crowd[2:15]
    for i in (0, 6, 12):
        one = paged_attention(
            batch.q[2 + i : 3 + i], batch.k_cache, batch.v_cache, batch.block_tables[2:3].clone(),
            torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            torch.tensor([530 - 12 + i], dtype=torch.int32, device=DEVICE),
            max_query_len=1, max_seq_len=530, scale=batch.scale, deterministic=True,
        )  # fmt: skip
        assert torch.equal(one, chunk_out[i : i + 1])


def test_queries_are_read_through_their_strides():
    batch = paged_batch(
        [(1, 50), (6, 20)], q_heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32
    )
    fused = torch.full((7, 8, 64), float("nan"), device=DEVICE)
    fused[:, :4] = batch.q
    want = expected(batch)
    batch.q = fused[:, :4]
    assert_close(run(batch), want, torch.float32)


def test_what_the_kernel_does_not_take_is_refused():
    batch = paged_batch(
        [(1, 20)], q_heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32
    )
    with pytest.raises(ValueError, match="leave num_splits"):
        run(batch, deterministic=True, num_splits=2)
    with pytest.raises(ValueError, match="window"):
        run(batch, window=0)
    with pytest.raises(ValueError, match="whole number"):
        batch.q = batch.q[:, :3]
        run(batch)


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 300)).map(lambda x: (x[0], x[0] + x[1])),
        min_size=1,
        max_size=5,
    ),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([16, 40, 64, 80]),
    window=st.none() | st.integers(1, 200),
    mode=st.sampled_from(list(MODES)),
    seed=st.integers(0, 2**31),
)
def test_any_batch(lengths, group, kv_heads, head_dim, window, mode, seed):
    batch = paged_batch(
        lengths, q_heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16,
        dtype=torch.float32, seed=seed,
    )  # fmt: skip
    out = run(batch, window=window, **MODES[mode])
    assert_close(out, expected(batch, window=window), torch.float32)
