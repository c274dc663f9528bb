"""Random workloads through the whole host half, against an oracle without cache, batch or blocks.

Every step: the books balance (`check_integrity`), and the toy runner checks each row, each block
table, each announced group. At the end: every sequence ended once, with the oracle's tokens.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from toy import EOS, ToyTokenizer, drain, oracle, step, toy_engine

from headrace.engine.errors import RequestError
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import FinishReason, Sequence

EOS_IDS = (EOS, *range(12))
"""About one token in twenty ends an answer, so lengths are far from what max_tokens suggests."""

prompts = st.tuples(
    st.sampled_from([(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9, 9, 9, 9, 9)]),
    st.lists(st.integers(0, 3), max_size=12),
).map(lambda parts: [*parts[0], *parts[1]])

adds = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.sampled_from([20, 12, 7, None, 2, 1, 0]),
        "min_tokens": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "temperature": st.sampled_from([0.0, 0.0, 1.0]),
        "seed": st.integers(0, 2),
        "salt": st.sampled_from([b"", b"", b"t"]),
    }
)
operations = st.lists(
    st.one_of(
        st.lists(adds, min_size=3, max_size=8).map(lambda burst: ("add", burst)),
        st.integers(0, 20).map(lambda index: ("abort", index)),
        st.integers(1, 6).map(lambda count: ("step", count)),
    ),
    min_size=2,
    max_size=12,
)
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([10, 12, 16, 24, 64]),
        "block_size": st.sampled_from([2, 4, 1]),
        "max_num_seqs": st.sampled_from([6, 4, 2, 1]),
        "max_num_batched_tokens": st.sampled_from([12, 7, 40]),
        "max_prefix_delay": st.sampled_from([0, 1, 8]),
        "prefix_caching": st.sampled_from([True, True, False]),
        "deduplicate": st.booleans(),
        "steps_in_flight": st.sampled_from([0, 1]),
        "expected_output": st.sampled_from([1.0, 1.0, 20.0]),
    }
)


def to_sequence(add):
    limit = add["max_tokens"]
    params = SamplingParams(
        max_tokens=limit,
        min_tokens=add["min_tokens"] if limit is None else min(add["min_tokens"], limit),
        temperature=add["temperature"],
        ignore_eos=add["ignore_eos"],
    )
    return Sequence("r", list(add["prompt"]), params, seed=add["seed"], salt=add["salt"])


def play(engine, steps):
    """Runs the operations; returns all that were taken in, and how each ended."""
    sequences, ended = [], []
    for kind, value in steps:
        if kind == "add":
            for seq in map(to_sequence, value):
                try:
                    engine.add(seq)
                except RequestError as error:
                    assert error.code in ("empty_prompt", "prompt_too_long")
                else:
                    sequences.append(seq)
        elif kind == "abort" and sequences:
            seq = engine.abort(sequences[value % len(sequences)].seq_id)
            ended += [seq] if seq is not None else []
        elif kind == "step":
            for _ in range(value):
                ended += step(engine).finished
        engine.check_integrity()
    return sequences, ended + drain(engine)


def check(engine, sequences, ended):
    assert sorted(map(id, ended)) == sorted(map(id, sequences)), "each ends exactly once"
    for seq in sequences:
        room = engine.limits.max_model_len - seq.num_prompt_tokens
        expected = oracle(seq, eos=EOS_IDS, room=room)
        if seq.finish_reason is FinishReason.ABORTED:
            assert seq.output_token_ids == expected[: len(seq.output_token_ids)]
        elif seq.finish_reason is not FinishReason.FAILED:
            assert seq.output_token_ids == expected
            ended_by_id = seq.finish_reason is FinishReason.STOP
            assert seq.text == ToyTokenizer().decode(expected[:-1] if ended_by_id else expected)
    assert engine.kv_usage == 0.0 and not engine.has_unfinished


@settings(max_examples=100, deadline=None)
@given(engines, operations)
def test_any_workload_gives_the_oracles_tokens_and_balanced_books(options, steps):
    engine = toy_engine(eos=EOS_IDS, **options)
    sequences, ended = play(engine, steps)
    check(engine, sequences, ended)
    assert all(seq.failure is None for seq in sequences)


@settings(max_examples=60, deadline=None)
@given(
    engines,
    operations,
    st.sets(st.integers(1, 15), max_size=2),
    st.sets(st.integers(1, 15), max_size=2),
    st.sets(st.integers(0, 40), max_size=3),
    st.sets(st.integers(0, 40), max_size=3),
    st.one_of(st.none(), st.integers(4, 12)),
)
def test_faults_of_any_kind_hurt_only_whose_they_are(
    options, steps, broken, nan, flaky, unlaunched, memory
):
    """`broken` and `nan` sequences always fail, some steps fail once, in the middle (`flaky`) or
    when launched, and large steps lack memory."""
    count = 0

    def fault(batch):
        nonlocal count
        count += 1
        if memory is not None and batch.num_tokens > memory:
            raise MemoryError
        if count in flaky and count - 1 not in flaky:
            raise RuntimeError("passes")
        if broken & {row.seq_id for row in batch.rows}:
            raise RuntimeError("stays")

    def refuse(batch):
        if batch.step in unlaunched and batch.step - 1 not in unlaunched:
            raise RuntimeError("not launched")

    engine = toy_engine(
        eos=EOS_IDS, fault=fault, refuse=refuse, nan=lambda number, _read: number in nan, **options
    )
    sequences, ended = play(engine, steps)
    check(engine, sequences, ended)
    attributable = memory is None and not (flaky and unlaunched)
    if attributable and not options["deduplicate"]:
        for seq in sequences:
            if seq.failure is not None:
                assert seq.seq_id in broken | nan
