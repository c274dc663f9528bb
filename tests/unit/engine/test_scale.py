"""What grows with what: prompts, waiting and running sequences counted in calls, not in seconds."""

import random
import sys
from collections.abc import Callable

from toy import greedy, toy_engine

from headrace.engine.batch import SampledTokens
from headrace.engine.kv import prefix_cache
from headrace.engine.kv.block_manager import BlockManager
from headrace.engine.kv.block_pool import Block
from headrace.engine.kv.prefix_cache import PrefixCache
from headrace.engine.scheduler import Scheduler, SchedulerLimits

SIZE = 16


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def calls_of(function: Callable[[], object]) -> int:
    """Python and C calls while it runs."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def decoding(running: int, waiting: int) -> Scheduler:
    """`running` sequences that decode, their prompts computed, and `waiting` behind them."""
    limits = SchedulerLimits(running, max(2 * SIZE * running, 2048))
    scheduler = Scheduler(limits, BlockManager(running * 4, SIZE))
    for index in range(running + waiting):
        seq = greedy(tokens(SIZE + 3, index), 40)
        seq.seq_id, seq.max_output_tokens = index + 1, 40
        scheduler.add(seq)
    for _ in range(3):
        one_step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (running, waiting)
    return scheduler


def one_step(scheduler: Scheduler) -> None:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, SampledTokens({row.seq_id: [7] for row in batch.rows}))


def test_a_step_costs_the_same_with_ten_thousand_waiting_as_with_ten() -> None:
    few, many = decoding(16, 10), decoding(16, 10_000)
    assert calls_of(lambda: one_step(many)) == calls_of(lambda: one_step(few))


def test_a_step_costs_each_of_1024_sequences_what_it_costs_each_of_64() -> None:
    few, many = decoding(64, 0), decoding(1024, 0)
    per_sequence = calls_of(lambda: one_step(few)) / 64
    assert calls_of(lambda: one_step(many)) / 1024 <= per_sequence


def test_prefix_keys_and_their_lookup_take_one_step_a_block(monkeypatch) -> None:
    """Twice the blocks are twice the keys and twice the look-ups, no more."""
    hashed = 0
    chain_key = prefix_cache.chain_key

    def counted(parent: bytes, content: bytes) -> bytes:
        nonlocal hashed
        hashed += 1
        assert len(content) == SIZE * prefix_cache.TOKEN_BYTES
        return chain_key(parent, content)

    monkeypatch.setattr(prefix_cache, "chain_key", counted)
    for blocks in (100, 200):
        cache, prompt = PrefixCache(SIZE), tokens(blocks * SIZE, blocks)
        hashed = 0
        keys = cache.keys_of(prompt, b"")
        assert (hashed, len(keys)) == (blocks, blocks)
        parent: bytes | int = b""
        content = prefix_cache.token_content(prompt)
        width = SIZE * prefix_cache.TOKEN_BYTES
        for index, key in enumerate(keys):
            part = content[index * width : (index + 1) * width]
            parent = cache.insert(Block(index), key, parent, part)
        assert cache.match(prompt, keys, b"").num_tokens == blocks * SIZE - 1


def test_each_of_a_thousand_system_prompts_at_once_is_computed_once() -> None:
    """1,000 prompts of 32 tokens, two questions of 5 behind each: the second finds the first's."""
    engine = toy_engine(
        num_blocks=4000, block_size=SIZE, max_num_seqs=64, max_num_batched_tokens=2048, eos=()
    )
    heads = [tokens(2 * SIZE, seed) for seed in range(1000)]
    order = [(head, question) for question in range(2) for head in range(1000)]
    random.Random(0).shuffle(order)
    for head, question in order:
        engine.add(greedy(heads[head] + tokens(5, 5000 + 2 * head + question), 2))
    computed = finished = 0
    while engine.has_unfinished:
        output = engine.step()
        computed += output.stats.num_prompt_tokens
        finished += len(output.finished)
        assert all(seq.failure is None for seq in output.finished)
    engine.check_integrity()
    assert finished == 2000
    assert computed == 1000 * (2 * SIZE + 5) + 1000 * 5


def test_a_context_of_32k_tokens_takes_blocks_as_it_is_computed_step_by_step() -> None:
    """Every step computes a chunk of the budget; the blocks held are those of the whole prompt, 16
    tokens each, and one answer token more."""
    length = 32_768
    engine = toy_engine(
        num_blocks=length // SIZE + 1, block_size=SIZE, max_num_batched_tokens=2048, eos=()
    )
    seq = greedy(tokens(length - 5, 1), 2)
    engine.add(seq)
    chunks, most = [], 0.0
    while engine.has_unfinished:
        stats = engine.step().stats
        chunks.append(stats.num_scheduled_tokens)
        most = max(most, stats.kv_usage)
    assert chunks == [2048] * 15 + [2043, 1]
    assert most * (length // SIZE + 1) <= length // SIZE
    assert seq.failure is None and len(seq.output_token_ids) == 2
