"""Shared-prefix attention against plain attention, and the merge against its definition."""

import pytest
import torch
from attention_cases import PagedBatch, paged_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, assert_close, case_id, combinations, seeded

from headrace.kernels.attention_core import merge_states
from headrace.kernels.paged_attention import paged_attention, paged_attention_reference
from headrace.kernels.shared_prefix_attention import (
    PrefixGroups,
    shared_prefix_attention,
    shared_prefix_attention_reference,
)


def make_groups(shared, num_seqs: int, padding: int = 0) -> PrefixGroups:
    offsets, members = [0], []
    prefix_lens = [0] * num_seqs
    for group, prefix in shared:
        members += group
        offsets.append(len(members))
        for s in group:
            prefix_lens[s] = prefix
    offsets += [offsets[-1]] * padding
    members += [2**30] * padding

    def on_device(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    longest = max(prefix for _, prefix in shared)
    return PrefixGroups(on_device(offsets), on_device(members), on_device(prefix_lens), longest)


def run(batch: PagedBatch, groups: PrefixGroups, **options):
    return shared_prefix_attention(
        *batch.tensors, groups, max_query_len=batch.max_query_len, max_seq_len=batch.max_seq_len,
        scale=batch.scale, **options,
    )  # fmt: skip


# Lengths are (new tokens, keys); groups are (sequences, shared keys).
BATCHES = {
    "one_group": ([(1, 70), (1, 65), (1, 100)], [([0, 1, 2], 64)]),
    "group_of_one": ([(1, 50)], [([0], 32)]),
    "two_groups_and_strangers": (
        [(1, 40), (1, 200), (1, 161), (1, 90), (1, 33), (1, 170), (1, 0)],
        [([1, 5, 2], 160), ([0, 4], 32)],
    ),
    "prefill_beside": (
        [(1, 90), (20, 100), (1, 97), (9, 9), (1, 65)],
        [([0, 2, 1, 4], 64)],
    ),
    "prefix_of_several_splits": ([(1, 1100), (1, 1050), (1, 30)], [([0, 1], 1024)]),
}
SMALL = {
    "few_in_two_groups": (
        [(1, 40), (1, 70), (1, 65), (1, 33), (1, 0), (1, 17)],
        [([1, 2], 64), ([0, 3], 32)],
    ),
    "few_beside_prefill": ([(1, 50), (5, 40), (1, 33)], [([0, 1, 2], 32)]),
}
CASES = combinations(
    in_full={"batch": SMALL},
    batch=BATCHES,
    heads=((1, 1), (2, 2), (6, 2), (7, 1), (16, 1)),
    head_dim=(64, 80, 96, 128, 256),
    block_size=(16, 32),
    dtype=DTYPES,
    window=(None, 48),
    softcap=(None, 5.0),
    mode=("free", "splits", "deterministic"),
)
MODES = {
    "free": {},
    "splits": {"num_splits": 3, "num_prefix_splits": 2},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_sharing_the_prefix_changes_no_result(case):
    lengths, shared = {**BATCHES, **SMALL}[case["batch"]]
    q_heads, kv_heads = case["heads"]
    batch = paged_batch(
        lengths, q_heads=q_heads, kv_heads=kv_heads, head_dim=case["head_dim"],
        block_size=case["block_size"], dtype=case["dtype"], shared=shared,
    )  # fmt: skip
    options = {"window": case["window"], "softcap": case["softcap"]}
    out = run(batch, make_groups(shared, len(lengths)), **options, **MODES[case["mode"]])
    expected = paged_attention_reference(*batch.tensors, scale=batch.scale, **options)
    assert_close(out, expected, case["dtype"])


@pytest.mark.parametrize("name", BATCHES)
def test_the_reference_of_two_merged_parts_is_plain_attention(name):
    lengths, shared = BATCHES[name]
    batch = paged_batch(
        lengths, q_heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32,
        shared=shared,
    )  # fmt: skip
    groups = make_groups(shared, len(lengths))
    for options in ({}, {"window": 48, "softcap": 5.0}):
        assert_close(
            shared_prefix_attention_reference(*batch.tensors, groups, scale=batch.scale, **options),
            paged_attention_reference(*batch.tensors, scale=batch.scale, **options),
            torch.float32,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_sharing_has_the_bits_of_plain_attention(dtype):
    """Prefixes of 1,040 keys (two whole splits of 512 are shared) and of 100 (none is)."""
    lengths = [(1, 1100), (1, 1041), (1, 120), (1, 700), (1, 101), (6, 530)]
    shared = [([1, 0], 1040), ([2, 4], 96)]
    batch = paged_batch(
        lengths, q_heads=4, kv_heads=1, head_dim=64, block_size=16, dtype=dtype, shared=shared
    )
    plain = paged_attention(
        *batch.tensors, max_query_len=6, max_seq_len=1100, scale=batch.scale, deterministic=True
    )
    assert torch.equal(run(batch, make_groups(shared, 6), deterministic=True), plain)


def test_padding_groups_change_nothing():
    lengths, shared = BATCHES["two_groups_and_strangers"]
    batch = paged_batch(
        lengths, q_heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32,
        shared=shared,
    )  # fmt: skip
    out = run(batch, make_groups(shared, len(lengths), padding=3), num_splits=2)
    expected = paged_attention_reference(*batch.tensors, scale=batch.scale)
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_speculated_tokens_share_the_prefix(mode):
    lengths = [(4, 80), (1, 70), (2, 66), (3, 100)]
    shared = [([0, 1, 3], 64)]
    batch = paged_batch(
        lengths, q_heads=6, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32,
        shared=shared,
    )  # fmt: skip
    out = run(batch, make_groups(shared, 4), max_split_query_len=4, **MODES[mode])
    expected = paged_attention_reference(*batch.tensors, scale=batch.scale)
    assert_close(out, expected, torch.float32)


def test_merging_is_exact_and_associative():
    g = seeded()
    scores = torch.randn(5, 30, generator=g, dtype=torch.float64) * 4
    values = torch.randn(30, 8, generator=g, dtype=torch.float64)

    def part(low, high):
        lse = scores[:, low:high].logsumexp(dim=-1)
        return (scores[:, low:high] - lse[:, None]).exp() @ values[low:high], lse

    whole = part(0, 30)
    a, b, c = part(0, 3), part(3, 20), part(20, 30)
    left = merge_states(*merge_states(*a, *b), *c)
    right = merge_states(*a, *merge_states(*b, *c))
    for merged in (left, right):
        torch.testing.assert_close(merged[0], whole[0])
        torch.testing.assert_close(merged[1], whole[1])
    nothing = (torch.zeros(5, 8, dtype=torch.float64), torch.full((5,), -torch.inf).double())
    torch.testing.assert_close(merge_states(*whole, *nothing)[0], whole[0])
    both_empty = merge_states(*nothing, *nothing)
    assert torch.equal(both_empty[0], nothing[0]) and torch.equal(both_empty[1], nothing[1])


def test_no_group_is_refused():
    batch = paged_batch(
        [(1, 20)], q_heads=2, kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32
    )
    empty = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="call paged_attention"):
        run(batch, PrefixGroups(empty, empty[:0], empty, 16))


@settings(max_examples=10, deadline=None)
@given(data=st.data(), group=st.integers(1, 16), seed=st.integers(0, 2**31))
def test_any_groups(data, group, seed):
    lengths, shared = [], []
    for _ in range(data.draw(st.integers(1, 3), label="groups")):
        prefix = 16 * data.draw(st.integers(1, 24), label="prefix blocks")
        size = data.draw(st.integers(1, 4), label="members")
        first = len(lengths)
        for _ in range(size):
            query = data.draw(st.sampled_from([1, 1, 1, 5]), label="new tokens")
            lengths.append((query, prefix + query + data.draw(st.integers(0, 80), label="own")))
        shared.append((list(range(first, first + size)), prefix))
        for _ in range(data.draw(st.integers(0, 1), label="strangers")):
            lengths.append((1, data.draw(st.integers(1, 90), label="keys")))
    mode = data.draw(st.sampled_from(list(MODES)), label="mode")
    batch = paged_batch(
        lengths, q_heads=group, kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32,
        shared=shared, seed=seed,
    )  # fmt: skip
    out = run(batch, make_groups(shared, len(lengths)), **MODES[mode])
    expected = paged_attention_reference(*batch.tensors, scale=batch.scale)
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_the_prefix_is_read_through_the_leaders_table_only(mode):
    """The other members' tables name a block of NaN where the shared part lies."""
    lengths, shared = [(1, 1100), (1, 1050), (1, 1033)], [([1, 0, 2], 1024)]
    batch = paged_batch(
        lengths, q_heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32,
        shared=shared,
    )  # fmt: skip
    expected = paged_attention_reference(*batch.tensors, scale=batch.scale)
    batch.block_tables[0, :64] = batch.block_tables[0, -1]
    batch.block_tables[2, :64] = batch.block_tables[0, -1]
    out = run(batch, make_groups(shared, 3), **MODES[mode])
    assert_close(out, expected, torch.float32)
