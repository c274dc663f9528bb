"""The runner behind its one door: persistent rows, lone failures, noise kept over preemption."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.batch import NewRow, PrefixGroup, SampledTokens, ScheduledBatch, ScheduledRow
from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.machine import available_threads, choose_dtype, cpu_multiplies_bfloat16
from headrace.engine.runner import ModelRunner, load_runner
from headrace.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("runner") / "model")


def load(model: Path, **settings: object) -> ModelRunner:
    config = EngineConfig(str(model), kv_cache_memory_bytes=1 << 22, num_threads=1, max_num_seqs=8)
    return load_runner(replace(config, **settings))  # type: ignore[arg-type]


@pytest.fixture
def runner(model: Path) -> ModelRunner:
    return load(model)


def new(seq_id: int, tokens: Seq[int], params: SamplingParams = GREEDY, prompt: int = 0) -> NewRow:
    return NewRow(seq_id, tokens, prompt or len(tokens), params, 42, 0, (tiny.EOS,))


def step(
    runner: ModelRunner,
    rows: Seq[tuple[int, int, int, Seq[int]]],
    added: Seq[NewRow] = (),
    removed: Seq[int] = (),
    groups: Seq[PrefixGroup] = (),
    samples: bool = True,
) -> SampledTokens:
    """rows: (seq_id, computed, scheduled, new blocks)."""
    scheduled = [ScheduledRow(*row, samples=samples) for row in rows]
    return runner.execute(ScheduledBatch(0, added, removed, scheduled, groups)).result()


def test_sampled_tokens_are_the_next_step_s_input_without_being_told(runner: ModelRunner) -> None:
    prompt = list(range(10, 25))
    first = step(runner, [(1, 0, 15, [3])], [new(1, prompt)]).token_ids[1][0]
    second = step(runner, [(1, 15, 1, [])]).token_ids[1][0]
    third = step(runner, [(1, 16, 1, [9])]).token_ids[1][0]
    step(runner, [], removed=[1])
    logits = runner.logits([*prompt, first, second])
    assert [first, second, third] == logits[14:].argmax(1).tolist()


def test_a_chunk_that_does_not_sample_reports_nothing(runner: ModelRunner) -> None:
    found = step(runner, [(1, 0, 8, [0])], [new(1, range(20))], samples=False)
    assert found == SampledTokens({})


def test_a_row_that_comes_back_after_preemption_draws_what_it_would_have_drawn(
    runner: ModelRunner,
) -> None:
    """Removed, and added again with its output so far as tokens to recompute."""
    params = SamplingParams(temperature=2.0, top_p=0.95, repetition_penalty=1.2)
    prompt = list(range(40, 60))
    tokens = list(prompt)
    tokens += step(runner, [(1, 0, 20, [0, 1])], [new(1, prompt, params)]).token_ids[1]
    for computed in range(20, 27):
        tokens += step(runner, [(1, computed, 1, [])]).token_ids[1]
    expected = step(runner, [(1, 27, 1, [])]).token_ids[1]
    again = [new(1, tokens, params, prompt=20)]
    assert step(runner, [(1, 0, 28, [4, 5])], again, removed=[1]).token_ids[1] == expected


def test_shared_prefix_attention_changes_no_token(runner: ModelRunner) -> None:
    """Three sequences on the blocks of one 64-token prefix, with the group and without."""
    prefix = [(3 * k) % 256 for k in range(64)]
    tails = [[7], [8, 9, 10, 11, 12], [13] * 17]
    answers = []
    for groups in ((), (PrefixGroup((1, 2, 3), 4),)):
        step(runner, [(9, 0, 64, [0, 1, 2, 3])], [new(9, prefix)], samples=False)
        added = [new(index + 1, prefix + tail) for index, tail in enumerate(tails)]
        rows = [
            (index + 1, 64, len(tail), [0, 1, 2, 3, 4 + 2 * index, 5 + 2 * index])
            for index, tail in enumerate(tails)
        ]
        found = [step(runner, rows, added, groups=groups).token_ids]
        decodes = [(index + 1, 64 + len(tail), 1, []) for index, tail in enumerate(tails)]
        found.append(step(runner, decodes, groups=groups).token_ids)
        answers.append(found)
        step(runner, [], removed=[1, 2, 3, 9])
    assert answers[0] == answers[1]


def test_a_sequence_with_nan_fails_alone_and_spoils_no_block(tmp_path: Path) -> None:
    """The embedding of id 200 is NaN. Its blocks are reused afterwards by a shorter sequence."""
    folder = tiny.write_checkpoint(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][200] = torch.nan
    save_file(weights, folder / "model.safetensors")
    runner = load(folder)
    rows = [(1, 0, 20, [0, 1]), (2, 0, 20, [2, 3])]
    sick = [*range(10), 200, *range(9)]
    found = step(runner, rows, [new(1, range(20)), new(2, sick)])
    assert list(found.token_ids) == [1] and found.failures[2].code == "non_finite_logits"
    assert "bfloat16" in found.failures[2].message
    reused = step(runner, [(3, 0, 3, [3])], [new(3, [1, 2, 3])], removed=[1, 2])
    assert not reused.failures
    step(runner, [], removed=[3])
    assert reused.token_ids[3][0] == int(runner.logits([1, 2, 3])[-1].argmax())


def test_more_rows_than_promised_is_an_error_and_removal_makes_room(runner: ModelRunner) -> None:
    rows = [new(index, [1, 2]) for index in range(8)]
    runner.execute(ScheduledBatch(0, rows, (), ()))
    with pytest.raises(EngineError, match="max_num_seqs"):
        runner.execute(ScheduledBatch(0, [new(8, [1])], (), ()))
    with pytest.raises(EngineError, match="already has a row"):
        runner.execute(ScheduledBatch(0, [new(7, [1])], [6], ()))
    runner.execute(ScheduledBatch(0, [new(8, [1])], [5], ()))


def test_rows_grow_beyond_their_first_size(tmp_path: Path) -> None:
    """A 900-token prompt in a batch that began with room for 512."""
    model = tiny.write_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    runner = load(model)
    short = step(runner, [(1, 0, 5, [0])], [new(1, range(5))]).token_ids[1]
    prompt = [k % 250 for k in range(900)]
    rows = [(2, 0, 900, range(1, 58)), (1, 5, 1, [])]
    found = step(runner, rows, [new(2, prompt)]).token_ids
    step(runner, [], removed=[1, 2])
    assert found[2][0] == int(runner.logits(prompt)[-1].argmax())
    assert found[1][0] == int(runner.logits([*range(5), *short])[-1].argmax())


def test_warming_up_leaves_the_runner_as_it_was(model: Path) -> None:
    warm, cold = load(model), load(model)
    warm.warm_up()
    assert torch.equal(warm.logits(range(30)), cold.logits(range(30)))


def test_logits_refuses_while_sequences_run(runner: ModelRunner) -> None:
    step(runner, [(1, 0, 2, [0])], [new(1, [1, 2])])
    with pytest.raises(EngineError, match="idle"):
        runner.logits([1])


def test_bfloat16_runs_where_it_is_asked_for(tmp_path: Path) -> None:
    """Emulated on most CPUs, so never chosen there; the same answers within its rounding: 2**-8
    relative on logits of up to 8, over two layers."""
    model = tiny.write_checkpoint(tmp_path / "model", dtype="bfloat16")
    narrow, wide = load(model, dtype="bfloat16"), load(model, dtype="float32")
    assert (narrow.dtype, wide.dtype) == ("bfloat16", "float32")
    difference = (narrow.logits(range(40)) - wide.logits(range(40))).abs()
    assert 0 < difference.mean() < 0.05 and difference.max() < 0.5


@pytest.mark.parametrize(("native", "wanted"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_sixteen_bit_only_where_the_cpu_multiplies_it(
    native: bool, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.machine.cpu_multiplies_bfloat16", lambda: native)
    assert choose_dtype("auto", "bfloat16") is wanted
    assert choose_dtype("auto", "float32") is torch.float32
    assert choose_dtype("float16", "bfloat16") is torch.float16


@pytest.mark.parametrize(
    ("flags", "native"),
    [("fpu avx512f avx512_bf16", True), ("fpu amx_bf16", True), ("avx512f avx512_vnni", False)],
)
def test_bfloat16_is_read_from_cpuinfo(
    flags: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"processor\t: 0\nmodel name\t: bf16 lake\nflags\t\t: {flags}\n"
    monkeypatch.setattr(Path, "read_text", lambda self, *args, **kwargs: text)
    assert cpu_multiplies_bfloat16() is native


@pytest.mark.parametrize(
    ("quota", "wanted"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1)]
)
def test_threads_follow_the_cgroup_quota(
    quota: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a quota of 1.5 CPUs on a host of 8 gets 2 threads."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(Path, "read_text", lambda self, *args, **kwargs: quota)
    assert available_threads() == wanted
