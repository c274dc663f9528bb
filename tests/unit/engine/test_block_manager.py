"""Block tables: sharing, giving back, and books that balance."""

import pytest

from headrace.engine.errors import EngineError
from headrace.engine.kv.block_manager import BlockManager
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence

SIZE = 4


def sequence(seq_id, tokens, salt=b""):
    seq = Sequence("r", list(tokens), SamplingParams(), salt=salt)
    seq.seq_id = seq_id
    return seq


def open_(manager, seq):
    match = manager.match(seq, manager.keys_of(seq))
    cached = manager.open(seq, match, seq.num_tokens)
    manager.check_integrity()
    return cached


def test_a_prefix_is_shared_and_outlives_its_sequence():
    manager = BlockManager(8, SIZE)
    first = sequence(1, range(10))
    assert open_(manager, first) == 0
    assert manager.commit(first, 10) == 2
    second = sequence(2, [*range(8), 50, 51])
    assert open_(manager, second) == 8
    assert manager.block_ids(2)[:2] == manager.block_ids(1)[:2]
    assert manager.block_ids(2)[2] != manager.block_ids(1)[2]
    manager.close(1)
    manager.close(2)
    manager.check_integrity()
    assert manager.num_free == 8
    assert open_(manager, sequence(3, range(10))) == 8


def test_only_computed_blocks_are_found():
    manager = BlockManager(8, SIZE)
    first = sequence(1, range(12))
    open_(manager, first)
    manager.commit(first, 7)
    assert open_(manager, sequence(2, range(12))) == 4


def test_a_block_evicted_between_look_up_and_opening_is_not_taken():
    """vllm PR#17305: a stale count of cached tokens."""
    manager = BlockManager(3, SIZE)
    first = sequence(1, range(8))
    open_(manager, first)
    manager.commit(first, 8)
    manager.close(1)
    late = sequence(2, [*range(8), 9])
    stale = manager.match(late, manager.keys_of(late))
    assert stale.num_tokens == 8
    other = sequence(3, range(100, 108))
    open_(manager, other)
    manager.close(3)
    assert manager.open(late, stale, late.num_tokens) == 4, "the tail went first, the head is left"
    manager.check_integrity()


def test_opening_takes_all_or_nothing():
    manager = BlockManager(3, SIZE)
    open_(manager, sequence(1, range(8)))
    late = sequence(2, range(50, 58))
    assert manager.open(late, manager.match(late, []), 8) is None
    assert not manager.has_table(2)
    manager.check_integrity()


def test_cost_counts_idle_hits_too():
    """A hit that nobody holds leaves the free list as a fresh block does."""
    manager = BlockManager(4, SIZE)
    first = sequence(1, range(8))
    open_(manager, first)
    manager.commit(first, 8)
    again = sequence(2, [*range(8), 9])
    match = manager.match(again, manager.keys_of(again))
    assert manager.cost(match, 9) == 1
    manager.close(1)
    assert manager.cost(match, 9) == 3


def test_two_that_compute_the_same_block_keep_their_own():
    """mini-sglang PR#142: the duplicate was freed while a table still pointed at it."""
    manager = BlockManager(8, SIZE)
    twins = [sequence(1, range(9)), sequence(2, range(9))]
    for seq in twins:
        assert open_(manager, seq) == 0
    for seq in twins:
        manager.commit(seq, 9)
        manager.check_integrity()
    assert not set(manager.block_ids(1)) & set(manager.block_ids(2))
    manager.close(1)
    manager.check_integrity()
    assert manager.grow(2, 13)
    manager.close(2)
    manager.check_integrity()
    assert manager.num_free == 8


def test_blocks_of_a_step_in_flight_come_back_after_it():
    """vllm PRs #45357, #48481: blocks were freed while a launched step still used them."""
    manager = BlockManager(4, SIZE)
    open_(manager, sequence(1, range(8)))
    open_(manager, sequence(2, range(50, 54)))
    manager.close(1, after_step=7)
    manager.check_integrity()
    assert manager.num_free == 1
    manager.step_done(6)
    assert manager.num_free == 1
    manager.step_done(7)
    assert manager.num_free == 3
    manager.check_integrity()


def test_discarded_blocks_are_never_found_again():
    manager = BlockManager(4, SIZE)
    first = sequence(1, range(8))
    open_(manager, first)
    manager.commit(first, 8)
    manager.close(1, discard=True)
    assert open_(manager, sequence(2, range(8))) == 0


def test_pinned_blocks_are_kept_until_let_go():
    manager = BlockManager(3, SIZE)
    first = sequence(1, range(8))
    open_(manager, first)
    manager.commit(first, 8)
    match = manager.match(first, manager.keys_of(first))
    handle = manager.pin(match.blocks)
    manager.close(1)
    manager.check_integrity()
    assert manager.num_free == 1
    manager.unpin(handle)
    manager.unpin(handle)
    assert manager.num_free == 3
    manager.pin(match.blocks)
    assert manager.unpin_all()
    assert not manager.unpin_all()
    manager.check_integrity()


def test_outputs_are_cached_as_prompts_are():
    """So that a preempted sequence finds what it had written."""
    manager = BlockManager(4, SIZE)
    seq = sequence(1, range(6))
    open_(manager, seq)
    seq.output_token_ids.extend([70, 71, 72])
    assert manager.grow(1, 9)
    manager.commit(seq, 8)
    manager.close(1)
    assert open_(manager, sequence(2, [*range(6), 70, 71, 5])) == 8


def test_without_caching_nothing_is_found():
    manager = BlockManager(4, SIZE, enable_prefix_caching=False)
    first = sequence(1, range(8))
    open_(manager, first)
    assert manager.commit(first, 8) == 0
    assert manager.keys_of(first) == []
    manager.close(1)
    assert open_(manager, sequence(2, range(8))) == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m._pool.blocks[0].__setattr__("ref_count", 5),
        lambda m: m._pool.take(1),
        lambda m: m._tables[1].block_ids.append(3),
        lambda m: m._pool.__setattr__("num_free", 99),
        lambda m: m._pool.blocks[0].__setattr__("key", b"x"),
    ],
)
def test_the_integrity_check_notices_damage(damage):
    manager = BlockManager(4, SIZE)
    first = sequence(1, range(8))
    open_(manager, first)
    manager.commit(first, 8)
    damage(manager)
    with pytest.raises(EngineError):
        manager.check_integrity()
