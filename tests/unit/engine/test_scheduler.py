"""Which tokens are computed when: chunks, prefixes in flight, admission, preemption, order.

All over a toy model that reads its KV slots, so every test also checks that the tokens are right.
"""

import random

import pytest
from toy import EOS, greedy, oracle, run, toy_engine

from headrace.engine.kv.block_manager import BlockManager
from headrace.engine.scheduler import Scheduler, SchedulerLimits
from headrace.engine.step_plan import StepPlan as _Plan

SIZE = 4


def tokens(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def check_answers(engine, sequences):
    eos = engine.eos_token_ids
    for seq in sequences:
        room = engine.limits.max_model_len - seq.num_prompt_tokens
        assert seq.output_token_ids == oracle(seq, eos=eos, room=room)


def rows_of(engine, seq):
    """(start, count) of every row of a sequence, in order."""
    return [
        (row.num_computed_tokens, row.num_scheduled_tokens)
        for batch in engine.runner.batches
        for row in batch.rows
        if row.seq_id == seq.seq_id
    ]


# --- chunks and budget ------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_that_end_with_full_blocks():
    engine = toy_engine(max_num_batched_tokens=10, max_num_seqs=4)
    seq = greedy(tokens(23), 2)
    run(engine, [seq])
    assert rows_of(engine, seq)[:3] == [(0, 8), (8, 8), (16, 7)]
    check_answers(engine, [seq])


def test_decodes_go_on_while_a_long_prompt_is_computed():
    """A decode never waits for a prompt: its token comes first out of the budget."""
    engine = toy_engine(max_num_batched_tokens=8, max_num_seqs=4, eos=())
    short, long = greedy(tokens(4, 1), 12), greedy(tokens(40, 2), 1)
    engine.add(short)
    engine.step()
    engine.add(long)
    for _ in range(5):
        before = len(short.output_token_ids)
        engine.step()
        assert len(short.output_token_ids) == before + 1
    run(engine, [])
    check_answers(engine, [short, long])


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_longer_than_the_chunk_gets_through_with_and_without_caching(caching):
    """sglang#36855: chunked prefill without cache insertion went round in circles."""
    engine = toy_engine(max_num_batched_tokens=8, prefix_caching=caching, max_num_seqs=4)
    seqs = [greedy(tokens(50, n), 3) for n in range(3)]
    run(engine, seqs, max_steps=60)
    check_answers(engine, seqs)
    assert engine.runner.num_computed <= 3 * 53


def test_no_step_exceeds_the_budget_and_no_batch_the_sequences():
    engine = toy_engine(max_num_batched_tokens=16, max_num_seqs=5)
    run(engine, [greedy(tokens(n % 30 + 1, n), 6) for n in range(25)])
    assert max(batch.num_tokens for batch in engine.runner.batches) <= 16
    assert max(len(batch.rows) for batch in engine.runner.batches) <= 5


def test_a_budget_below_the_number_of_sequences_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens is 4"):
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=4)


def test_with_less_budget_than_decodes_everybody_gets_a_turn():
    """The limit is lowered while memory is short; nobody may starve behind the others."""
    engine = toy_engine(max_num_seqs=8, eos=())
    seqs = [greedy(tokens(3, n), 10) for n in range(8)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    engine._faults.token_limit = 3
    for _ in range(8):
        engine.step()
    counts = [len(seq.output_token_ids) for seq in seqs]
    assert max(counts) - min(counts) <= 1
    run(engine, [])
    check_answers(engine, seqs)


# --- prefix cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [SIZE, 2 * SIZE, 5 * SIZE])
def test_the_same_prompt_again_computes_only_its_last_token(length):
    """nano-vllm#144: prompts of whole blocks, all of them cached."""
    engine = toy_engine()
    first, again = greedy(tokens(length), 5), greedy(tokens(length), 5)
    run(engine, [first])
    run(engine, [again])
    assert again.num_cached_tokens == length - 1
    assert rows_of(engine, again)[0] == (length - 1, 1)
    assert again.output_token_ids == first.output_token_ids
    check_answers(engine, [first, again])


def test_two_identical_prompts_admitted_in_one_step_keep_their_own_blocks():
    """mini-sglang PR#142. Without hold-back, so that both compute the same blocks."""
    engine = toy_engine(max_prefix_delay=0, eos=())
    seqs = [greedy(tokens(9), 10), greedy(tokens(9), 14)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    assert len(engine.runner.batches[0].rows) == 2
    run(engine, [])
    check_answers(engine, seqs)


def test_a_salt_keeps_tenants_apart():
    engine = toy_engine()
    first, same, other = (greedy(tokens(12), 3) for _ in range(3))
    first.salt = same.salt = b"a"
    other.salt = b"b"
    for seq in (first, same, other):
        run(engine, [seq])
    assert (same.num_cached_tokens, other.num_cached_tokens) == (11, 0)


def test_a_prefix_in_flight_is_found_when_all_are_submitted_at_once():
    """64 requests behind one 40-token prefix: it is computed once. Total: 40 + 64 x 3 own prompt
    tokens (and one token for each decode)."""
    engine = toy_engine(
        num_blocks=400, max_num_seqs=64, max_num_batched_tokens=64, eos=(), max_prefix_delay=64
    )
    prefix = tokens(40)
    seqs = [greedy([*prefix, n, n, n], 4) for n in range(64)]
    run(engine, seqs)
    assert engine.runner.num_computed == 40 + 64 * 3 + 64 * 3
    assert sorted(seq.num_cached_tokens for seq in seqs) == [0] + [40] * 63
    check_answers(engine, seqs)


def test_nested_prefixes_in_flight_are_each_computed_once():
    """A header, two system prompts behind it, two few-shot blocks behind each."""
    engine = toy_engine(num_blocks=200, max_num_seqs=32, max_num_batched_tokens=256, eos=())
    header = tokens(8, 1)
    seqs = []
    for system in range(2):
        for shot in range(2):
            prefix = [*header, *tokens(12, 10 + system), *tokens(8, 20 + 2 * system + shot)]
            seqs += [greedy([*prefix, n], 2) for n in range(4)]
    random.Random(0).shuffle(seqs)
    run(engine, seqs)
    assert engine.runner.num_computed == 8 + 2 * 12 + 4 * 8 + 16 + 16
    check_answers(engine, seqs)


def test_others_fill_the_batch_while_followers_are_held_back():
    engine = toy_engine(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=64, eos=())
    group = [greedy([*tokens(40), n], 50) for n in range(4)]
    alone = [greedy(tokens(5, n), 50) for n in range(50, 53)]
    for seq in (*group, *alone):
        engine.add(seq)
    engine.step()
    first = {row.seq_id for row in engine.runner.batches[0].rows}
    assert len(first & {seq.seq_id for seq in group}) == 1
    assert first >= {seq.seq_id for seq in alone}


def test_followers_of_a_leader_with_many_chunks_compute_nothing_twice():
    """160 tokens of prefix in chunks of 4: the follower waits until the last chunk is there."""
    engine = toy_engine(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=4, eos=())
    seqs = [greedy([*tokens(160), n], 1) for n in range(3)]
    run(engine, seqs)
    assert engine.runner.num_computed == 160 + 3
    check_answers(engine, seqs)


def test_a_leader_that_ends_early_sets_its_followers_free():
    engine = toy_engine(num_blocks=100, max_num_seqs=4, max_num_batched_tokens=8)
    seqs = [greedy([*tokens(60), n], 2) for n in range(3)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    leader = engine.runner.batches[0].rows[0].seq_id
    engine.abort(leader)
    rest = [seq for seq in seqs if seq.seq_id != leader]
    run(engine, [])
    check_answers(engine, rest)


def test_a_groups_prefix_stays_until_its_last_child():
    """The pool holds the prefix and little else. Between two members of the group strangers run,
    whose blocks would push the prefix out if it were not pinned."""
    engine = toy_engine(num_blocks=16, max_num_seqs=1, max_num_batched_tokens=64, eos=())
    prefix = tokens(24)
    group = [greedy([*prefix, n], 2) for n in range(4)]
    for seq in group:
        engine.add(seq)
    strangers = [greedy(tokens(20, 100 + n), 2) for n in range(4)]
    for seq in strangers:
        engine.add(seq)
    run(engine, [])
    assert sorted(seq.num_cached_tokens for seq in group) == [0, 24, 24, 24]
    check_answers(engine, [*group, *strangers])


def test_pins_give_way_when_the_pool_is_needed():
    """A prefix of half the pool is pinned for one that waits; a running sequence grows into it."""
    engine = toy_engine(num_blocks=8, max_num_seqs=1, eos=())
    prefix = tokens(16)
    seqs = [greedy([*prefix, n], 12) for n in range(3)]
    big = greedy(tokens(4, 9), 28)
    run(engine, [*seqs, big])
    check_answers(engine, [*seqs, big])


# --- shared-prefix groups ---------------------------------------------------------------------


def test_rows_that_share_computed_blocks_are_announced_as_a_group():
    engine = toy_engine(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=64, eos=())
    seqs = [greedy([*tokens(12), n], 6) for n in range(6)]
    alone = greedy(tokens(9, 77), 6)
    run(engine, [*seqs, alone])
    largest = max(
        (group for batch in engine.runner.batches for group in batch.prefix_groups),
        key=lambda group: len(group.seq_ids),
    )
    assert set(largest.seq_ids) == {seq.seq_id for seq in seqs}
    assert largest.num_shared_blocks == 3


def test_groups_can_be_switched_off():
    limits = SchedulerLimits(8, 64)
    scheduler = Scheduler(limits, BlockManager(64, SIZE), group_prefixes=False)
    engine = toy_engine()
    engine._scheduler = scheduler
    run(engine, [greedy([*tokens(12), n], 6) for n in range(6)])
    assert not any(batch.prefix_groups for batch in engine.runner.batches)


# --- admission and preemption -----------------------------------------------------------------


def test_admission_reserves_what_answers_are_expected_to_need():
    """Each needs 2 blocks now and 4 in the end (8 + 7 tokens); 16 blocks hold 4 of them, although
    8 would fit at first. Their lengths are certain, so nobody is ever preempted."""
    engine = toy_engine(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=128, eos=())
    seqs = [greedy(tokens(8, n), 8, ignore_eos=True) for n in range(8)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    assert engine._scheduler.num_running == 4
    run(engine, [])
    assert sum(seq.num_preemptions for seq in seqs) == 0
    check_answers(engine, seqs)


def test_the_expected_length_is_what_answers_really_had():
    """max_tokens is 100, but all answers have 5 tokens: the guess follows the answers."""

    def model(read, params, seed, index):
        return EOS if len(read) % 10 == 9 else 1

    engine = toy_engine(num_blocks=300, model=model)
    run(engine, [greedy(tokens(5, n), 100) for n in range(60)])
    predictor = engine._scheduler.predictor
    assert 4 <= predictor.average <= 7


def test_a_wrong_guess_preempts_the_last_admitted_and_gives_equal_answers():
    engine = toy_engine(num_blocks=12, max_num_seqs=4, expected_output=1.0, eos=())
    seqs = [greedy(tokens(8, n), 20) for n in range(4)]
    run(engine, seqs)
    assert sum(seq.num_preemptions for seq in seqs) > 0
    first = engine.runner.batches[0].rows[0].seq_id
    assert next(s for s in seqs if s.seq_id == first).num_preemptions == 0
    check_answers(engine, seqs)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("ahead", [0, 1])
def test_preemption_at_every_length_around_a_block_border_is_exact(caching, ahead):
    """nano-vllm PR#217: preempted at block size + 1, the re-computed token was lost. nano-vllm#144:
    a preempted sequence was taken for one that decodes."""
    for prompt in (1, SIZE - 1, SIZE, SIZE + 1):
        for length in range(prompt + 1, 3 * SIZE + 2):
            engine = toy_engine(prefix_caching=caching, steps_in_flight=ahead, eos=())
            seq, other = greedy(tokens(prompt), 3 * SIZE + 4), greedy(tokens(5, 9), 20)
            engine.add(seq)
            engine.add(other)
            while seq.num_tokens < length:
                engine.step()
            scheduler = engine._scheduler
            scheduler._preempt(_Plan(0, 0), scheduler._entries[seq.seq_id])
            run(engine, [])
            assert seq.num_preemptions == 1
            check_answers(engine, [seq, other])


def test_a_preempted_sequence_takes_back_what_it_had_from_the_cache():
    engine = toy_engine(num_blocks=12, max_num_seqs=4, expected_output=1.0, eos=())
    seqs = [greedy(tokens(8, n), 20) for n in range(4)]
    run(engine, seqs)
    preempted = sum(seq.num_preemptions for seq in seqs)
    needed = sum(seq.num_tokens - 1 for seq in seqs)
    assert preempted and engine.runner.num_computed < needed + preempted * 16


@pytest.mark.parametrize("caching", [True, False])
def test_a_tight_pool_and_a_long_prompt_make_progress_without_thrash(caching):
    """vllm#25538: with a chunk smaller than the prompt, sequences preempted each other for ever."""
    engine = toy_engine(
        num_blocks=16,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        prefix_caching=caching,
        expected_output=1.0,
        eos=(),
    )
    seqs = [greedy(tokens(40, 1), 20), *(greedy(tokens(6, n), 30) for n in range(2, 8))]
    run(engine, seqs, max_steps=600)
    preemptions = sum(seq.num_preemptions for seq in seqs)
    assert preemptions <= 2 * len(seqs)
    assert engine.runner.num_computed <= 3 * sum(seq.num_tokens for seq in seqs)
    check_answers(engine, seqs)


def test_a_sequence_as_large_as_the_pool_runs_alone():
    engine = toy_engine(num_blocks=8, max_num_seqs=4, expected_output=1.0, eos=())
    big = greedy(tokens(20), None)
    small = [greedy(tokens(4, n), 10) for n in range(1, 4)]
    run(engine, [big, *small])
    assert big.num_tokens == 32
    check_answers(engine, [big, *small])


def test_arrivals_do_not_overtake_a_preempted_sequence():
    engine = toy_engine(num_blocks=10, max_num_seqs=4, expected_output=1.0, eos=())
    seqs = [greedy(tokens(8, n), 16) for n in range(3)]
    for seq in seqs:
        engine.add(seq)
    victim = None
    late = []
    for n in range(400):
        engine.step()
        engine.check_integrity()
        victim = victim or next((seq for seq in seqs if seq.num_preemptions), None)
        if victim and len(late) < 5:
            late.append(greedy(tokens(4, 50 + n), 4))
            engine.add(late[-1])
        if not engine.has_unfinished:
            break
    assert victim is not None and len(late) == 5
    admitted = [new.seq_id for batch in engine.runner.batches for new in batch.added]
    again = len(admitted) - 1 - admitted[::-1].index(victim.seq_id)
    assert all(admitted.index(seq.seq_id) > again for seq in late)
    check_answers(engine, [*seqs, *late])


# --- one step in flight -----------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [10, 16, 64])
def test_with_a_step_in_flight_the_answers_are_the_same(blocks):
    """vllm PRs #45357, #48481: many sequences end while the next step is launched already."""
    answers = []
    for ahead in (0, 1):
        engine = toy_engine(
            num_blocks=blocks,
            max_num_seqs=6,
            steps_in_flight=ahead,
            expected_output=2.0,
            eos=(EOS, *range(40)),
        )
        seqs = [greedy([*tokens(n % 9), n, 1], n % 11 + 1) for n in range(40)]
        run(engine, seqs)
        check_answers(engine, seqs)
        answers.append([seq.output_token_ids for seq in seqs])
    assert answers[0] == answers[1]


def test_a_step_is_launched_before_the_tokens_of_the_last_are_read():
    engine = toy_engine(steps_in_flight=1, eos=())
    seq = greedy(tokens(5), 6)
    engine.add(seq)
    engine.step()
    assert len(engine.runner.batches) == 1 and not seq.output_token_ids
    engine.step()
    assert len(engine.runner.batches) == 2 and len(seq.output_token_ids) == 1
    run(engine, [])
    assert len(engine.runner.batches) == 6, "none is launched for a token beyond the limit"


# --- cost -------------------------------------------------------------------------------------


def test_the_cost_of_a_step_does_not_depend_on_how_many_wait():
    """Counted, not timed: Python calls in `schedule`, with 10 and with 5,000 waiting."""
    import cProfile
    import pstats

    calls = []
    for waiting in (10, 5000):
        engine = toy_engine(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=64, eos=())
        for n in range(8 + waiting):
            engine.add(greedy([*tokens(8, n % 5), n % 256, n // 256], 100))
        for _ in range(5):
            engine.step()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(10):
            engine.step()
        profile.disable()
        calls.append(pstats.Stats(profile).total_calls)
        assert engine._scheduler.num_waiting == waiting
    assert calls[1] <= calls[0] * 1.1
