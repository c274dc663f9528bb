"""Keys, hits and what is not a hit."""

import itertools

import pytest

from headrace.engine.kv import prefix_cache
from headrace.engine.kv.block_pool import BlockPool
from headrace.engine.kv.prefix_cache import PrefixCache, token_content

SIZE = 4


def store(cache, blocks, tokens, salt=b""):
    """Commit the full blocks of `tokens` into `blocks`, as a table does."""
    parent = salt
    for index, key in enumerate(cache.keys_of(tokens, salt)):
        piece = token_content(tokens[index * SIZE : (index + 1) * SIZE])
        parent = cache.insert(blocks[index], key, parent, piece)


def match(cache, tokens, salt=b""):
    return cache.match(tokens, cache.keys_of(tokens, salt), salt)


@pytest.fixture
def blocks():
    return BlockPool(64).blocks


def test_the_longest_cached_prefix_of_full_blocks_is_found(blocks):
    cache = PrefixCache(SIZE)
    store(cache, blocks, list(range(12)))
    found = match(cache, [*range(9), 77, 78, 79, 80])
    assert found.blocks == (blocks[0], blocks[1])
    assert found.num_tokens == 8


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_full_hit_leaves_exactly_the_last_token_to_compute(blocks, num_blocks):
    """nano-vllm#144: prompt length = k * block size and all blocks hit gave zero tokens."""
    cache = PrefixCache(SIZE)
    tokens = list(range(num_blocks * SIZE))
    store(cache, blocks, tokens)
    found = match(cache, tokens)
    assert len(found.blocks) == num_blocks
    assert found.num_tokens == len(tokens) - 1


def test_the_same_block_after_another_prefix_is_no_hit(blocks):
    cache = PrefixCache(SIZE)
    store(cache, blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert match(cache, [9, 9, 9, 9, 5, 6, 7, 8, 0]).blocks == ()
    assert match(cache, [5, 6, 7, 8, 0]).blocks == ()


def test_salts_do_not_share(blocks):
    """Adapters and tenants: vllm#30931, #42125. No salt is a salt like any other."""
    cache = PrefixCache(SIZE)
    tokens = list(range(9))
    store(cache, blocks, tokens, b"adapter-a")
    assert match(cache, tokens, b"adapter-a").num_tokens == 8
    assert match(cache, tokens, b"adapter-b").num_tokens == 0
    assert match(cache, tokens, b"").num_tokens == 0


def test_equal_keys_of_different_prefixes_never_serve_each_other(blocks, monkeypatch):
    """With a one-bit hash nearly every key collides; what is found must still be right."""
    monkeypatch.setattr(
        prefix_cache, "chain_key", lambda parent, content: bytes([(sum(content) + parent[0]) & 1])
    )
    cache = PrefixCache(SIZE)
    held = {}
    prompts = [list(p) for p in itertools.product([0, 1], repeat=3)]
    prompts = [[bit for bit in p for _ in range(SIZE)] for p in prompts]
    for number, tokens in enumerate(prompts * 2):
        mine = blocks[3 * number : 3 * number + 3]
        store(cache, mine, tokens)
        for index, block in enumerate(mine):
            held[block.block_id] = tuple(tokens[: (index + 1) * SIZE])
        for asked in prompts:
            for depth, block in enumerate(match(cache, [*asked, 5]).blocks, 1):
                assert held[block.block_id] == tuple(asked[: depth * SIZE])


def test_a_child_is_not_reached_through_an_evicted_and_replaced_parent(blocks, monkeypatch):
    """Keys say nothing here: the second entry takes the first one's key, and the first one's child
    holds the tokens asked for. It continues another prefix and must not be served."""
    monkeypatch.setattr(prefix_cache, "chain_key", lambda parent, content: content[:1] * 2)
    cache = PrefixCache(SIZE)
    store(cache, blocks, [1, 7, 7, 7, 2, 2, 2, 2])
    cache.forget(blocks[0])
    store(cache, blocks[2:], [1, 8, 8, 8])
    assert match(cache, [1, 8, 8, 8, 2, 2, 2, 2, 0]).blocks == (blocks[2],)


def test_an_equal_entry_stays_and_the_newcomer_is_nobodys(blocks):
    cache = PrefixCache(SIZE)
    store(cache, blocks, list(range(8)))
    store(cache, blocks[2:], list(range(8)))
    assert match(cache, list(range(9))).blocks == (blocks[0], blocks[1])
    assert blocks[2].key is None and blocks[3].key is None
    assert len(cache) == 2


def test_forgotten_blocks_are_not_found(blocks):
    cache = PrefixCache(SIZE)
    store(cache, blocks, list(range(12)))
    cache.forget(blocks[1])
    assert match(cache, list(range(13))).blocks == (blocks[0],)


def test_looking_up_takes_one_access_for_each_block(blocks):
    """Linear in blocks: doubling the prompt doubles the accesses, and a miss ends the walk."""

    class Counting(dict):
        accesses = 0

        def get(self, *args):
            self.accesses += 1
            return super().get(*args)

    cache = PrefixCache(SIZE)
    cache._entries = Counting()
    tokens = list(range(32 * SIZE))
    store(cache, blocks, tokens)
    for count in (8, 16, 32):
        cache._entries.accesses = 0
        assert len(match(cache, tokens[: count * SIZE]).blocks) == count
        assert cache._entries.accesses == count
    cache._entries.accesses = 0
    match(cache, [999] * 400)
    assert cache._entries.accesses == 1


def test_keys_are_128_bits_and_depend_on_every_token():
    cache = PrefixCache(SIZE)
    tokens = list(range(8))
    keys = cache.keys_of(tokens, b"")
    assert {len(key) for key in keys} == {16}
    for position in range(8):
        changed = [*tokens[:position], 1000, *tokens[position + 1 :]]
        assert cache.keys_of(changed, b"")[-1] != keys[-1]
