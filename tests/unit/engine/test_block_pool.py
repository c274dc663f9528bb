"""Free blocks: order of reuse, and what stays findable."""

import pytest

from headrace.engine.kv.block_pool import BlockPool


def ids(blocks):
    return [block.block_id for block in blocks]


def cached(pool, *wanted):
    for index in wanted:
        pool.blocks[index].key = bytes([index])


def test_blocks_are_handed_out_in_order_and_the_dummy_never():
    pool = BlockPool(4)
    assert ids(pool.take(4)) == [0, 1, 2, 3]
    assert pool.dummy_block_id == 4
    with pytest.raises(ValueError, match="0 free"):
        pool.take(1)


def test_released_blocks_are_reused_in_the_order_of_their_release():
    """Released from the tail of a table, so a prefix outlives what follows it."""
    pool = BlockPool(4)
    cached(pool, 0, 1, 2, 3)
    table = pool.take(4)
    pool.release(reversed(table))
    assert ids(pool.free_blocks()) == [3, 2, 1, 0]
    assert ids(pool.take(2)) == [3, 2]


def test_a_block_without_findable_content_is_reused_before_all_cached_ones():
    pool = BlockPool(3)
    cached(pool, 0, 2)
    pool.release(pool.take(3))
    assert ids(pool.free_blocks()) == [1, 0, 2]


def test_holding_takes_a_free_block_out_of_the_middle():
    pool = BlockPool(5)
    pool.hold(pool.blocks[2])
    assert ids(pool.free_blocks()) == [0, 1, 3, 4]
    assert pool.num_free == 4
    pool.hold(pool.blocks[2])
    pool.release([pool.blocks[2]])
    assert pool.num_free == 4, "it has a second holder"
    pool.release([pool.blocks[2]])
    assert pool.num_free == 5


def test_a_release_too_many_is_refused():
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="more often"):
        pool.release(pool.blocks)


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)
