"""Copying and clearing blocks of the cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, normal, seeded

from headrace.kernels.block_copy import (
    clear_blocks,
    clear_blocks_reference,
    copy_blocks,
    copy_blocks_reference,
)


@settings(max_examples=25, deadline=None)
@given(
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from([16, 32]),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 64, 80, 256]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_named_blocks_change_and_no_other(
    num_blocks, block_size, heads, head_dim, dtype, seed, data
):
    g = seeded(seed)
    k, v = (
        normal(num_blocks, block_size, heads, head_dim, dtype=dtype, generator=g) for _ in range(2)
    )
    order = torch.randperm(num_blocks, generator=g).to(DEVICE)
    count = data.draw(st.integers(0, num_blocks // 2))
    pairs = torch.stack([order[:count], order[count : 2 * count]], dim=1)
    expected = [copy_blocks_reference(cache, pairs) for cache in (k, v)]
    copy_blocks(k, v, pairs)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])

    cleared = order[: data.draw(st.integers(0, num_blocks))]
    k[cleared], v[cleared] = float("nan"), float("inf")
    expected = [clear_blocks_reference(cache, cleared) for cache in (k, v)]
    clear_blocks(k, v, cleared)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


def test_one_block_may_be_copied_to_several():
    k = normal(4, 16, 1, 64, dtype=torch.float32, generator=seeded())
    v = k + 1
    copy_blocks(k, v, torch.tensor([[2, 0], [2, 3]], device=DEVICE))
    assert torch.equal(k[0], k[2]) and torch.equal(k[3], k[2]) and torch.equal(v[3], v[2])


def test_a_layers_slice_of_one_big_tensor_is_taken():
    """[num_blocks, layers, ...]: blocks lie apart, each is contiguous."""
    pool = normal(4, 3, 16, 1, 64, dtype=torch.float32, generator=seeded())
    expected = copy_blocks_reference(pool[:, 1], torch.tensor([[3, 1]], device=DEVICE))
    others = pool[:, 0].clone()
    copy_blocks(pool[:, 1], pool[:, 2], torch.tensor([[3, 1]], device=DEVICE))
    assert torch.equal(pool[:, 1], expected) and torch.equal(pool[:, 0], others)


def test_a_wrong_layout_is_refused():
    k = torch.zeros(4, 16, 2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="int64"):
        clear_blocks(k, k, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="contiguous within a block"):
        clear_blocks(k.transpose(1, 2), k.transpose(1, 2), torch.zeros(1, dtype=torch.int64))
