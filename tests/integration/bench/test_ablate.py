"""Ablations, profile and the planner's measurement, on the real engine with a tiny model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.engine.engine import Engine
from headrace.engine.evaluate.process_memory import peak_memory
from headrace.engine.planner.calibration import read_measurement
from headrace.engine.stopping import StopChecker
from headrace.worker.bench import (
    ablate,
    ablate_report,
    attention_scaling,
    measurement,
    step_profile,
    trial,
)
from headrace.worker.bench.__main__ import main
from headrace.worker.bench.subject import Subject, load_subject
from headrace.worker.bench.workloads import BenchRequest

POOL = {"kv_cache_memory_bytes": 16 << 20}


@pytest.fixture(scope="module")
def subject(model: Path, prompts: Path) -> Subject:
    return load_subject(str(model), dtypes=("float32",), prompts=prompts, threads=1, options=POOL)


def requests_of(count: int) -> list[BenchRequest]:
    """40 + i tokens of prompt and 3 + i of answer; no two begin alike."""
    return [BenchRequest(i, [33 + i] + [65 + i] * (39 + i), 3 + i) for i in range(count)]


def load(model: Path, **options: object) -> Engine:
    return Engine.load(trial.config_for(model, "float32", 1, **{**POOL, **options}))


def test_without_a_kv_cache_every_token_pays_for_its_whole_context(model: Path) -> None:
    """A prompt of p and an answer of n computes p + (p+1) + ... + (p+n-1) tokens instead of
    p + n - 1, and the tokens are the same."""
    engine = load(model, enable_prefix_caching=False)
    work = requests_of(3)
    cached, recomputed = trial.run(engine, work), trial.run_without_kv_cache(engine, work)
    assert recomputed.outputs == cached.outputs
    sizes = [(len(r.prompt_token_ids), r.max_tokens) for r in work]
    assert sum(s.num_scheduled_tokens for s in cached.steps) == sum(p + n - 1 for p, n in sizes)
    assert sum(s.num_scheduled_tokens for s in recomputed.steps) == sum(
        p + i for p, n in sizes for i in range(n)
    )


def test_static_batches_wait_for_their_longest(model: Path) -> None:
    """Five requests in batches of two: never more than two run, and both of a batch are given out
    together, the next batch later."""
    engine = load(model)
    work = requests_of(5)
    static, continuous = trial.run(engine, work, group=2), trial.run(engine, work)
    assert static.outputs == continuous.outputs
    assert static.peak_running <= 2
    assert static.finished_s[0] == static.finished_s[1] < static.finished_s[2]
    assert static.finished_s[2] == static.finished_s[3] < static.finished_s[4]
    assert len(set(continuous.finished_s)) > 3


def test_every_technique_is_switched_off_and_changes_no_token(subject: Subject) -> None:
    """A variant that computed something else would make its row worthless. Ten copies of the
    requests do not fit where 8 maximum lengths are reserved, and all fit as blocks."""
    ((name, work),) = subject.work.items()
    more = [
        BenchRequest(i, [*r.prompt_token_ids, 48 + i % 10], r.max_tokens)
        for i, r in enumerate([*work, *work])
    ]
    wide = Subject(
        subject.model, subject.path, subject.tokenizer, ("float32",), 1, {name: more}, POOL
    )
    result = ablate.run(wide, limit=None, repeats=1, lengths=(48, 96))
    rows = {(row["technique"], row["measure"]): row for row in result["rows"]}
    assert {technique for technique, _ in rows} == {
        "KV cache",
        "continuous batching",
        "prefix cache",
        "waiting for a prefix in flight",
        "shared-prefix attention",
        "paged blocks",
        "chunked prefill",
        "deterministic mode",
    }
    for row in rows.values():
        assert row["equal"] == row["requests"] > 0, row
        assert row["on"] is not None
        assert row["off"] is not None
    fit = rows["paged blocks", "sequences that fit at once"]
    assert (fit["on"], fit["off"]) == (12.0, 8.0)
    for found in result["attention"]:
        assert found["largest_difference"] < 1e-4
    text = ablate_report.table(json.loads(json.dumps(result)))
    assert "| 96 |" in text
    assert "shared-prefix attention" in text


def test_a_prefix_cache_that_is_off_computes_every_token(subject: Subject) -> None:
    """The switch is real: with it fewer prompt tokens are computed than there are; off, all."""
    ((_, work),) = subject.work.items()
    prompt = sum(len(r.prompt_token_ids) for r in work)
    computed = []
    for caching in (True, False):
        engine = load(subject.path, enable_prefix_caching=caching)
        steps = trial.run(engine, work).steps
        computed.append(sum(s.num_prompt_tokens for s in steps))
    assert computed[0] < prompt
    assert computed[1] == prompt


def test_a_profile_accounts_for_the_whole_step_and_leaves_no_clock_behind(model: Path) -> None:
    engine = load(model)
    work = requests_of(4)
    before = trial.run(engine, work).outputs
    check = StopChecker.check
    result = step_profile.run(engine, work)
    assert StopChecker.check is check
    assert "execute" not in vars(engine.runner)
    assert not {"schedule", "update"} & vars(engine._scheduler).keys()
    assert trial.run(engine, work).outputs == before
    decode, prefill = result["decode"], result["prefill"]
    assert decode["tokens"] + prefill["tokens"] == sum(
        len(r.prompt_token_ids) + r.max_tokens - 1 for r in work
    )
    for phase in (decode, prefill):
        assert phase["steps"] > 0
        for part in step_profile.PARTS:
            assert phase["seconds"][part] > 0, part
        assert 0 < phase["host_share"] < 1
    assert "| detokenize |" in step_profile.table(result)


def test_nested_clocks_count_no_second_twice() -> None:
    clock = step_profile.Clock()
    inner = clock.timed("sampler", lambda: sum(range(20_000)))
    clock.timed("inputs", lambda: (inner(), inner()))()
    taken = clock.take()
    assert taken["sampler"] > taken["inputs"] > 0
    assert clock.take() == {}


def test_measured_steps_are_what_the_planner_reads(model: Path, tmp_path: Path) -> None:
    points = measurement.measure(load(model), str(model), "fp32")
    assert [(p.kind, p.batch, p.tokens) for p in points] == [
        ("decode", 1, 0),
        ("decode", 8, 0),
        ("decode", 32, 0),
        ("prefill", 1, 64),
        ("prefill", 1, 512),
    ]
    assert all(0 < p.seconds < 10 for p in points)
    card, fitted = read_measurement(measurement.keep(points, tmp_path / "measurement.json"))
    assert card.name.lower() == "cpu"
    assert fitted.points == 5
    assert measurement.scheme_of("bfloat16") == "bf16"
    assert measurement.scheme_of("no-such-scheme") is None


def test_peak_memory_sees_what_was_held_and_given_back() -> None:
    with peak_memory() as peak:
        held = bytearray(64 << 20)
        held[::4096] = b"x" * len(held[::4096])
        del held
    if peak.extra_bytes is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert 60 << 20 < peak.extra_bytes < 90 << 20


def test_attention_beyond_the_models_length_is_not_measured(model: Path) -> None:
    assert attention_scaling.measure(model, 1, lengths=(8192,)) == []


def test_the_profile_command_writes_its_table(model: Path, prompts: Path, tmp_path: Path) -> None:
    arguments = ["--profile", "--model", str(model), "--prompts", str(prompts), "--threads", "1"]
    arguments += ["--kv-cache-memory", "16M"]
    done = CliRunner().invoke(main, [*arguments, "--dtype", "float32", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (profile,) = json.loads((tmp_path / "profile.json").read_text())["profiles"]
    assert profile["workload"] == "mine"
    assert profile["phases"]["decode"]["steps"] > 0
    assert profile["sampling"] == {} and "float32, greedy" in done.output


def test_a_profile_of_sampling_has_as_many_running_as_asked_for(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Six requests with room for four, then for two: the steps are narrower."""
    arguments = ["--profile", "--model", str(model), "--prompts", str(prompts), "--threads", "1"]
    arguments += ["--kv-cache-memory", "16M", "--dtype", "float32", "--out", str(tmp_path)]
    how = ["--temperature", "0.8", "--top-p", "0.9", "--top-k", "20"]
    widths = []
    for running in ("4", "2"):
        done = CliRunner().invoke(main, [*arguments, *how, "--running", running])
        assert done.exit_code == 0, done.output
        assert "float32, temperature 0.8, top_p 0.9, top_k 20" in done.output
        (profile,) = json.loads((tmp_path / "profile.json").read_text())["profiles"]
        assert profile["sampling"] == {"temperature": 0.8, "top_p": 0.9, "top_k": 20}
        decode = profile["phases"]["decode"]
        widths.append(decode["tokens"] / decode["steps"])
    assert widths[0] > 1.5 * widths[1]
    refused = CliRunner().invoke(main, [*arguments, "--top-p", "0.9"])
    assert refused.exit_code == 2 and "--temperature" in refused.output
    refused = CliRunner().invoke(main, ["--ablate", "--running", "4"])
    assert refused.exit_code == 2 and "--profile" in refused.output


def test_schemes_are_measured_beside_each_other(model: Path, prompts: Path, tmp_path: Path) -> None:
    """Fewer bits take less memory and lie further away; one that cannot run says why."""
    names = ["float32", "int8", "int3-g32", "int2-g32"]
    chosen = [argument for name in names for argument in ("--scheme", name)]
    result = CliRunner().invoke(
        main,
        [
            *("--schemes", "--model", str(model), "--prompts", str(prompts), "--repeats", "1"),
            *("--threads", "1", "--kv-cache-memory", "16M", "--out", str(tmp_path), *chosen),
        ],
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "schemes.json").read_text())
    exact, int8, int3, int2 = document["rows"]
    assert [row["scheme"] for row in document["rows"]] == names
    assert exact["linear_bytes"] > 3 * int8["linear_bytes"] > 3 * int3["linear_bytes"]
    assert exact["kl"] is None and 0 < int8["kl"] < int3["kl"]
    assert exact["rates"]["mine"] > 0 and exact["alone"] > 0
    assert "'int2-g32' is not supported" in int2["failure"]
    assert "| int8 |" in result.output and "(1.00)" in result.output
