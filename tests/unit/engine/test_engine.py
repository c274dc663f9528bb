"""The engine over a toy model: what it refuses, how sequences end, and what faults cost whom."""

import pytest
from toy import EOS, ToyTokenizer, drain, greedy, oracle, run, toy_engine

from headrace.engine.errors import EngineError, RequestError
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import FinishReason, Sequence, SequenceStatus

PROMPT = [10, 20, 30, 40, 50]


def refusal(engine, seq):
    with pytest.raises(RequestError) as caught:
        engine.add(seq)
    engine.check_integrity()
    assert not engine.has_unfinished
    return caught.value


# --- what is refused --------------------------------------------------------------------------


def test_an_empty_prompt_is_refused():
    assert refusal(toy_engine(), greedy([])).code == "empty_prompt"


@pytest.mark.parametrize("length", [32, 33, 1000])
def test_a_prompt_that_leaves_no_room_is_refused_with_limit_and_length(length):
    """mini-sglang answered nothing at all to these."""
    error = refusal(toy_engine(max_model_len=32), greedy([1] * length))
    assert error.code == "prompt_too_long"
    assert str(length) in error.message and "32" in error.message


def test_the_pool_limits_the_length_too():
    engine = toy_engine(num_blocks=4, block_size=4, max_model_len=100)
    assert refusal(engine, greedy([1] * 16)).code == "prompt_too_long"
    run(engine, [greedy([1] * 15)])


def test_one_too_long_among_others_fails_alone():
    """vllm#1655: 2 of 3 prompts answered, but 3 outputs; #16732: the whole batch raised."""
    engine = toy_engine(max_model_len=32)
    good = [greedy(PROMPT, 3), greedy([7, 7], 3)]
    engine.add(good[0])
    with pytest.raises(RequestError):
        engine.add(greedy([1] * 40))
    engine.add(good[1])
    done = drain(engine)
    assert {id(seq) for seq in done} == {id(seq) for seq in good}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"stop_token_ids": (260,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {260: 1.0}}, "logit_bias"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop": ("",)}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(params, param):
    error = refusal(toy_engine(), greedy(PROMPT, **params))
    assert error.param == param


@pytest.mark.parametrize("token", [260, -1, 10**9])
def test_a_token_outside_the_vocabulary_is_refused(token):
    """It would index past the embedding."""
    assert str(token) in refusal(toy_engine(), greedy([1, token, 2])).message


# --- how sequences end ------------------------------------------------------------------------


def test_every_sequence_ends_exactly_once_with_the_right_tokens_and_text():
    engine = toy_engine(eos=(EOS, *range(30)))
    seqs = [greedy([*PROMPT, n], n % 13) for n in range(40)]
    done = run(engine, seqs)
    assert sorted(map(id, done)) == sorted(map(id, seqs))
    for seq in seqs:
        assert seq.output_token_ids == oracle(seq, eos=engine.eos_token_ids)
        ended_by_eos = bool(seq.output_token_ids) and seq.output_token_ids[-1] in range(30)
        shown = seq.output_token_ids[:-1] if ended_by_eos else seq.output_token_ids
        assert seq.text == ToyTokenizer().decode(shown)
        assert seq.status is SequenceStatus.FINISHED and seq.finish_time >= seq.arrival_time > 0


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_no_token_and_one_token_are_answers_too(max_tokens):
    """vllm#6521 crashed at 0."""
    engine = toy_engine(max_model_len=5 + max_tokens, eos=())
    seq = greedy(PROMPT, max_tokens)
    assert run(engine, [seq]) == [seq]
    assert len(seq.output_token_ids) == max_tokens
    assert seq.finish_reason is FinishReason.LENGTH


def test_without_max_tokens_the_answer_ends_at_the_models_limit():
    engine = toy_engine(max_model_len=20, eos=())
    seq = greedy(PROMPT, None)
    run(engine, [seq])
    assert seq.num_tokens == 20 and seq.finish_reason is FinishReason.LENGTH


def test_min_tokens_forbids_every_end_before_it():
    """An EOS-happy model: half of all tokens would end the answer."""
    engine = toy_engine(eos=tuple(range(130)))
    seqs = [greedy([*PROMPT, n], 30, min_tokens=12) for n in range(10)]
    run(engine, seqs)
    for seq in seqs:
        assert len(seq.output_token_ids) >= 12
        assert not any(token < 130 for token in seq.output_token_ids[:11])
        assert seq.output_token_ids == oracle(seq, eos=engine.eos_token_ids)


def test_a_resumed_sequence_goes_on_as_if_it_had_never_stopped():
    """After every number of outputs: same tokens, same text, also across a half character."""
    text = "a世b世c".encode()

    def model(read, params, seed, index):
        return text[len(read) - len(PROMPT)]

    whole = greedy(PROMPT, len(text))
    run(toy_engine(model=model), [whole])
    assert whole.text == "a世b世c"
    for done in range(len(text) + 1):
        engine = toy_engine(model=model)
        seq = greedy(PROMPT, len(text))
        seq.output_token_ids = whole.output_token_ids[:done]
        run(engine, [seq])
        assert (seq.output_token_ids, seq.text) == (whole.output_token_ids, whole.text)
        assert seq.finish_reason is FinishReason.LENGTH


def test_a_seed_draws_the_same_whatever_runs_beside_it():
    """vllm#51226: a seed was ignored when a neighbour had none."""
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=6)
    outputs = set()
    for neighbours in (0, 1, 16):
        engine = toy_engine(num_blocks=200, max_num_seqs=20, eos=())
        seq = Sequence("r", PROMPT, params, seed=7)
        others = [
            Sequence("r", [*PROMPT, n], SamplingParams(temperature=1.0, max_tokens=6), seed=n)
            for n in range(neighbours)
        ]
        run(engine, [*others, seq])
        outputs.add(tuple(seq.output_token_ids))
    assert len(outputs) == 1


def test_the_answers_of_one_request_differ_and_share_its_prompt():
    engine = toy_engine(eos=())
    params = SamplingParams(temperature=1.0, max_tokens=6)
    seqs = [Sequence("r", [*range(12)], params, seed=3, sample_index=n) for n in range(4)]
    run(engine, seqs)
    assert len({tuple(seq.output_token_ids) for seq in seqs}) == 4
    assert engine.runner.num_computed <= 12 + 4 * 6


def test_aborting_ends_now_with_what_is_there():
    engine = toy_engine(eos=())
    seqs = [greedy([*PROMPT, n], 20) for n in range(12)]
    for seq in seqs:
        engine.add(seq)
    for _ in range(3):
        engine.step()
    for seq in (seqs[0], seqs[-1]):
        assert engine.abort(seq.seq_id) is seq
        assert seq.finish_reason is FinishReason.ABORTED
        engine.check_integrity()
    assert engine.abort(seqs[0].seq_id) is None
    done = drain(engine)
    assert len(done) == 10
    for seq in done:
        assert seq.output_token_ids == oracle(seq, eos=())


def test_what_the_engine_says_of_itself():
    engine = toy_engine(max_num_seqs=4, eos=())
    assert engine.num_free_slots == 4 and not engine.has_unfinished
    for n in range(6):
        engine.add(greedy([n, *PROMPT], 4))
    assert engine.num_free_slots == 0 and engine.num_unfinished == 6
    stats = engine.step().stats
    assert stats.num_running == 4 and stats.num_waiting == 2
    assert stats.num_prompt_tokens == stats.num_scheduled_tokens == 24
    assert stats.num_output_tokens == 4
    assert stats.prefix_cache_queries == 24
    assert 0 < stats.kv_usage < 1 and 0 < stats.host_seconds <= stats.seconds
    drain(engine)
    assert engine.kv_usage == 0.0


# --- twins ------------------------------------------------------------------------------------


def test_identical_greedy_requests_are_computed_once():
    engine = toy_engine(deduplicate=True, eos=())
    twins = [greedy(PROMPT, 8) for _ in range(5)]
    other = greedy([*PROMPT, 1], 8)
    done = run(engine, [*twins, other])
    assert len(done) == 6
    assert engine.runner.num_computed == (5 + 7) + (6 + 7) - 4
    for seq in twins:
        assert seq.output_token_ids == oracle(seq, eos=()) and seq.text == twins[0].text
        assert seq.finish_reason is FinishReason.LENGTH and seq.finish_time > 0
    assert len({id(seq.output_token_ids) for seq in twins}) == 5, "nobody shares a list"


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 9},
        {"stop": ("x",)},
        {"temperature": 0.5},
        {"logprobs": 2},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
    ],
)
def test_any_other_setting_is_another_request(change):
    engine = toy_engine(deduplicate=True, eos=())
    engine.add(greedy(PROMPT, 8))
    engine.add(greedy(PROMPT, **{"max_tokens": 8, **change}))
    engine.step()
    engine.step()
    assert engine._scheduler.num_running == 2
    drain(engine)


def test_another_salt_is_another_request_and_a_seed_without_noise_is_not():
    engine = toy_engine(deduplicate=True, eos=())
    seqs = [greedy(PROMPT, 8), greedy(PROMPT, 8, seed=5), greedy(PROMPT, 8)]
    seqs[2].salt = b"tenant"
    for seq in seqs:
        engine.add(seq)
    engine.step()
    engine.step()
    assert engine._scheduler.num_running == 2
    drain(engine)


def test_aborting_a_twin_leaves_the_others():
    for gone in range(3):
        engine = toy_engine(deduplicate=True, eos=())
        twins = [greedy(PROMPT, 8) for _ in range(3)]
        for seq in twins:
            engine.add(seq)
        for _ in range(3):
            engine.step()
        assert engine.abort(twins[gone].seq_id) is twins[gone]
        engine.check_integrity()
        done = drain(engine)
        assert len(done) == 2
        for seq in done:
            assert seq.output_token_ids == oracle(seq, eos=())
        assert engine.runner.num_computed <= 5 + 7 + 4, "at most one block was computed again"


# --- faults -----------------------------------------------------------------------------------


def poisoned(seq_ids):
    """A device that breaks whenever one of these sequences is in the batch."""

    def fault(batch):
        if seq_ids & {row.seq_id for row in batch.rows}:
            raise RuntimeError("device-side assert")

    return fault


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("bad", [{1}, {4}, {8}, {2, 7}])
def test_a_sequence_that_breaks_the_step_fails_alone(bad, ahead):
    engine = toy_engine(fault=poisoned(bad), eos=(), steps_in_flight=ahead)
    seqs = [greedy([*PROMPT, n], 6) for n in range(8)]
    done = run(engine, seqs, max_steps=200)
    assert len(done) == 8
    for seq in seqs:
        if seq.seq_id in bad:
            assert seq.finish_reason is FinishReason.FAILED
            assert seq.failure.code == "internal_error" and seq.failure.retryable
            assert "device-side assert" in seq.failure.message
        else:
            assert seq.output_token_ids == oracle(seq, eos=())


def test_the_search_for_the_culprit_takes_logarithmic_steps():
    engine = toy_engine(
        num_blocks=600, max_num_seqs=64, max_num_batched_tokens=512, fault=poisoned({40}), eos=()
    )
    seqs = [greedy([*PROMPT, n], 2) for n in range(64)]
    run(engine, seqs)
    assert len(engine.runner.batches) <= 2 + 2 * 6 + 4


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_that_fails_once_costs_nobody_anything(ahead):
    for when in range(8):
        count = 0

        def fault(batch, _when=when):
            nonlocal count
            count += 1
            if count == _when + 1:
                raise RuntimeError("a cosmic ray")

        engine = toy_engine(fault=fault, eos=(), steps_in_flight=ahead)
        seqs = [greedy([*PROMPT, n], 6) for n in range(8)]
        run(engine, seqs)
        assert not any(seq.failure for seq in seqs)
        for seq in seqs:
            assert seq.output_token_ids == oracle(seq, eos=())


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("CUDA out of memory"), RuntimeError("can't allocate memory")],
)
def test_out_of_memory_makes_smaller_batches_and_everybody_is_answered(error):
    """The device can take 7 tokens at once, the budget says 32."""

    def fault(batch):
        if batch.num_tokens > 7:
            raise error

    engine = toy_engine(fault=fault, eos=())
    seqs = [greedy([*PROMPT, n], 6) for n in range(8)] + [greedy(range(40), 3)]
    run(engine, seqs, max_steps=400)
    for seq in seqs:
        assert seq.output_token_ids == oracle(seq, eos=())


def test_what_does_not_fit_even_alone_fails_with_advice():
    def fault(batch):
        if any(row.seq_id == 3 for row in batch.rows):
            raise MemoryError

    engine = toy_engine(fault=fault, eos=())
    seqs = [greedy([*PROMPT, n], 6) for n in range(5)]
    run(engine, seqs, max_steps=200)
    assert seqs[2].failure.code == "out_of_memory" and seqs[2].failure.retryable
    assert [seq.failure is None for seq in seqs] == [True, True, False, True, True]


def test_after_memory_was_short_batches_grow_again():
    limits = []

    def fault(batch):
        if len(limits) < 1:
            limits.append(1)
            raise MemoryError

    engine = toy_engine(num_blocks=200, fault=fault, eos=())
    run(engine, [greedy(PROMPT, 200), greedy([1, 2], 200)])
    assert engine._faults.token_limit == engine._faults.max_tokens


def test_a_broken_device_is_not_blamed_on_the_sequences():
    def fault(batch):
        raise RuntimeError("the device is lost")

    engine = toy_engine(fault=fault)
    seqs = [greedy([*PROMPT, n], 6) for n in range(8)]
    for seq in seqs:
        engine.add(seq)
    with pytest.raises(EngineError, match="device is lost"):
        for _ in range(100):
            engine.step()
    assert not any(seq.failure for seq in seqs)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_sequence_with_nan_logits_fails_alone(ahead):
    """Qwen3#761: NaN logits gave "!!!!" instead of an error."""
    engine = toy_engine(
        nan=lambda seq_id, read: seq_id == 3 and len(read) > 8, eos=(), steps_in_flight=ahead
    )
    seqs = [greedy([*PROMPT, n], 8) for n in range(6)]
    run(engine, seqs)
    assert seqs[2].failure.code == "numerical_error"
    for seq in seqs:
        if seq is not seqs[2]:
            assert seq.output_token_ids == oracle(seq, eos=())


def test_kv_of_a_failed_sequence_is_never_reused():
    """Its blocks may hold NaN; the same prompt again must compute them anew."""
    engine = toy_engine(nan=lambda seq_id, read: seq_id == 1 and len(read) > 14, eos=())
    prompt = list(range(12))
    run(engine, [greedy(prompt, 8)])
    again = greedy(prompt, 8)
    run(engine, [again])
    assert again.num_cached_tokens == 0
    assert again.output_token_ids == oracle(again, eos=())


def test_interrupts_are_not_swallowed():
    def fault(batch):
        raise KeyboardInterrupt

    engine = toy_engine(fault=fault)
    engine.add(greedy(PROMPT))
    with pytest.raises(KeyboardInterrupt):
        engine.step()


def test_the_toy_model_tells_wrong_blocks_from_right_ones():
    """The tests above prove something only if the toy model notices: swap two slots under it."""
    engine = toy_engine(eos=())
    seq = greedy(range(12), 6)
    engine.add(seq)
    engine.step()
    engine.step()
    slots = engine.runner.slots[engine._scheduler.blocks.block_ids(seq.seq_id)[0]]
    slots[0], slots[1] = slots[1], slots[0]
    with pytest.raises(AssertionError, match="computed"):
        drain(engine)
