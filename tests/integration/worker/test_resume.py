"""A job that is cut off goes on after its last token, and nobody can tell from the answer."""

from pathlib import Path
from typing import Any

import pytest
from serving import InThread, answer, load, payload, serving, wait_until

from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.producer import schemas
from headrace.worker import checkpoint, wire_request
from headrace.worker.bench.memory import MemorySource
from headrace.worker.source import ClaimedJob

LONG: list[tuple[str, dict[str, Any]]] = [
    ("greedy", {"prompt": [7, 8, 9], "max_tokens": 300, "temperature": 0, "ignore_eos": True}),
    ("seeded", {"prompt": [7, 8, 9], "max_tokens": 300, "seed": 11, "ignore_eos": True}),
    ("by-id", {"prompt": [1, 2], "max_tokens": 300, "temperature": 0.7, "ignore_eos": True}),
    ("several", {"prompt": [3] * 40, "max_tokens": 200, "n": 3, "seed": 5, "ignore_eos": True}),
    (
        "penalized",
        {
            "prompt": [4, 5],
            "max_tokens": 250,
            "temperature": 0,
            "ignore_eos": True,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.4,
        },
    ),
]


def tokens_of(result: schemas.Result) -> list[list[int] | None]:
    return [choice.token_ids for choice in result.choices]


def test_a_drained_worker_loses_no_token_and_the_next_goes_on_after_the_last(
    engine: Engine,
) -> None:
    """Greedy, seeded, seeded by the job's id, n > 1, with penalties: the whole answer is that of an
    uninterrupted run, and its tokens are counted once."""
    expected = {name: answer(engine, fields, name) for name, fields in LONG}
    source = MemorySource()
    for name, fields in LONG:
        source.add(payload(**fields), name)
    first = InThread(engine, source, checkpoint_every=0)
    wait_until(lambda: first.value("headrace_engine_generation_tokens_total") > 300, "half-way")
    first.drain.request("SIGTERM")
    first.drain.request("SIGTERM")
    first.stop()
    assert source.depth == (len(LONG), 0)
    assert [item.job.job_id for item in source.released] == [name for name, _ in LONG]
    assert not source.results
    engine.check_integrity()

    with serving(engine, source) as second:
        assert source.wait(len(LONG))
        for name, fields in LONG:
            result = second.result(name)
            assert tokens_of(result) == [s.output_token_ids for s in expected[name]], name
            assert [c.text for c in result.choices] == [s.text for s in expected[name]]
            assert result.usage.completion_tokens == fields["max_tokens"] * fields.get("n", 1)
            assert 0 < result.usage.resumed_from_tokens < result.usage.completion_tokens
            assert source.results[name].job.attempts == 0, "a drain is no attempt"
    assert second.value("headrace_jobs_resumed_total") == len(LONG)
    assert second.value("headrace_job_attempts_total", reason="released") == len(LONG)
    resumed = sum(second.result(name).usage.resumed_from_tokens for name, _ in LONG)
    assert second.value("headrace_resumed_tokens_total") == resumed


def printable_run(tokens: list[int], length: int) -> int:
    """Where `length` printable ASCII bytes follow each other that occur only there."""
    text = bytes(token if token < 256 else 0 for token in tokens)
    for start in range(4, len(tokens) - length - 4):
        piece = text[start : start + length]
        if all(32 < byte < 127 for byte in piece) and text.count(piece) == 1:
            return start
    raise AssertionError("no printable run in this model's output; take another prompt")


def cut_at(sequence: Sequence, count: int, fingerprint: str) -> bytes:
    """The checkpoint that a worker leaves after `count` tokens."""
    part = Sequence("r", sequence.prompt_token_ids, sequence.params)
    part.output_token_ids = sequence.output_token_ids[:count]
    blob = checkpoint.save([part], fingerprint)
    assert blob is not None
    return blob


def test_a_stop_string_that_straddles_the_cut_still_stops(engine: Engine) -> None:
    """Cut before, at every place inside, and right behind the stop string of three tokens."""
    fields: dict[str, Any] = {"prompt": [65, 66, 67], "max_tokens": 400, "seed": 2}
    fields["ignore_eos"] = True
    (whole,) = answer(engine, fields, "x")
    start = printable_run(whole.output_token_ids, 3)
    stop = bytes(whole.output_token_ids[start : start + 3]).decode()
    (stopped,) = answer(engine, {**fields, "stop": stop}, "x")
    assert len(stopped.output_token_ids) == start + 3
    source = MemorySource()
    for cut in range(start - 1, start + 3):
        source.add(payload(**fields, stop=stop), f"cut-{cut}")
        source.checkpoints[f"cut-{cut}"] = cut_at(whole, cut, engine.fingerprint)
    with serving(engine, source) as server:
        assert source.wait(4)
        for cut in range(start - 1, start + 3):
            result = server.result(f"cut-{cut}")
            choice = result.choices[0]
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
            assert choice.text == stopped.text
            assert stop not in choice.text
            assert choice.token_ids == stopped.output_token_ids
            assert result.usage.resumed_from_tokens == cut


def test_a_character_that_straddles_the_cut_is_decoded_whole(engine: Engine) -> None:
    """Each byte is a token here: cut inside the three bytes of a euro sign."""
    fields: dict[str, Any] = {"prompt": [1], "max_tokens": 4, "temperature": 0}
    fields["ignore_eos"] = True
    euro = list("€".encode())
    source = MemorySource()
    for cut in (2, 3):
        fresh = Sequence("r", [1], wire_request.to_params(schemas.Request(**fields), {}))
        fresh.output_token_ids = euro[:cut]
        # The model is made to continue with the sign's last byte, or after it with a full stop.
        following = [*euro, ord(".")][cut]
        bias = {"logit_bias": {str(following): 100}}
        blob = checkpoint.save([fresh], engine.fingerprint)
        assert blob is not None
        source.add(payload(**{**fields, **bias, "max_tokens": cut + 1}), f"cut-{cut}")
        source.checkpoints[f"cut-{cut}"] = blob
    with serving(engine, source) as server:
        assert source.wait(2)
        assert server.result("cut-2").choices[0].text == "€"
        assert server.result("cut-3").choices[0].text == "€."


@pytest.mark.parametrize("kind", ["other model", "other prompt", "garbage"])
def test_a_checkpoint_that_does_not_fit_starts_over_and_says_so(
    engine: Engine, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"prompt": [7, 8, 9], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    (whole,) = answer(engine, fields, "job")
    fingerprint = "other" if kind == "other model" else engine.fingerprint
    wrong = Sequence("r", [7, 8], whole.params) if kind == "other prompt" else whole
    wrong.output_token_ids = [1, 2, 3, 4] if kind == "other prompt" else whole.output_token_ids
    blob = b"\x80garbage" if kind == "garbage" else cut_at(wrong, 4, fingerprint)
    source = MemorySource()
    source.add(payload(**fields), "job")
    source.checkpoints["job"] = blob
    with caplog.at_level("WARNING", logger="headrace"), serving(engine, source) as server:
        assert source.wait(1)
        result = server.result("job")
    assert result.choices[0].token_ids == whole.output_token_ids
    assert result.usage.resumed_from_tokens == 0
    assert server.value("headrace_checkpoints_refused_total") == 1
    assert any("starting over" in record.getMessage() for record in caplog.records)


def test_n_answers_resume_together_even_when_one_had_ended(engine: Engine) -> None:
    fields: dict[str, Any] = {"prompt": [9, 9], "max_tokens": 60, "n": 2, "seed": 4}
    fields["ignore_eos"] = True
    expected = answer(engine, fields, "job")
    request = schemas.Request.model_validate(fields)
    parts = wire_request.to_sequences(request, ClaimedJob("job", "e", "q", b""), engine)
    parts[0].output_token_ids = expected[0].output_token_ids
    parts[0].finish_reason, parts[0].text = expected[0].finish_reason, expected[0].text
    parts[1].output_token_ids = expected[1].output_token_ids[:17]
    blob = checkpoint.save(parts, engine.fingerprint)
    assert blob is not None
    source = MemorySource()
    source.add(payload(**fields), "job")
    source.checkpoints["job"] = blob
    with serving(engine, source) as server:
        assert source.wait(1)
        result = server.result("job")
    assert tokens_of(result) == [s.output_token_ids for s in expected]
    assert (result.usage.completion_tokens, result.usage.resumed_from_tokens) == (120, 77)


def test_long_jobs_leave_a_checkpoint_every_so_many_tokens(engine: Engine) -> None:
    """200 tokens, one checkpoint each 32: at 32, 64, ... 192. A short job leaves none."""
    source = MemorySource()
    source.add(payload(prompt=[1], max_tokens=200, ignore_eos=True), "long")
    source.add(payload(prompt=[2], max_tokens=20, ignore_eos=True), "short")
    saved: list[tuple[str, int]] = []
    store = source.checkpoint

    def counted(progress: Any) -> None:
        for job, blob in progress:
            saved.append((job.job_id, blob.count(b",")))
        store(progress)

    source.checkpoint = counted  # type: ignore[method-assign]
    with serving(engine, source, checkpoint_every=32):
        assert source.wait(2)
    assert 3 <= len(saved) <= 6, "a newer one may replace one that still waits, no more are made"
    assert {name for name, _ in saved} == {"long"}
    assert not source.checkpoints, "a finished job needs none"


def test_log_probabilities_survive_the_cut(engine: Engine) -> None:
    fields: dict[str, Any] = {"prompt": [5], "max_tokens": 200, "temperature": 0}
    fields |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 1}
    (whole,) = answer(engine, fields, "job")
    source = MemorySource()
    source.add(payload(**fields), "job")
    first = InThread(engine, source, checkpoint_every=0)
    wait_until(lambda: first.value("headrace_engine_generation_tokens_total") > 20, "under way")
    first.drain.request("SIGTERM")
    first.drain.hurry()
    first.stop()
    with serving(engine, source) as second:
        assert source.wait(1)
        result = second.result("job")
    entries = result.choices[0].logprobs
    assert result.usage.resumed_from_tokens > 0
    assert entries is not None and len(entries) == 200
    for got, wanted in zip(entries, whole.logprobs, strict=True):
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_a_drain_with_time_left_finishes_everything(engine: Engine) -> None:
    source = MemorySource(payload(prompt=[i + 1], max_tokens=60, ignore_eos=True) for i in range(8))
    server = InThread(engine, source, grace=60.0)
    wait_until(lambda: server.loop.num_running == 8, "all run")
    server.stop("SIGTERM")
    assert len(source.results) == 8
    assert not source.released


def test_a_drain_puts_the_unbegun_back_at_once_and_in_their_order(engine: Engine) -> None:
    """Sixteen run, four wait; the four go back before the sixteen are done, and stay in front of
    what nobody had claimed."""
    source = MemorySource(
        payload(prompt=[i + 1], max_tokens=300, ignore_eos=True) for i in range(30)
    )
    server = InThread(engine, source, look_ahead=4, grace=60.0)
    wait_until(lambda: server.value("headrace_engine_running_sequences") == 16, "full")
    wait_until(lambda: source.depth == (10, 20), "claimed ahead")
    server.stop("SIGTERM")
    assert len(source.results) == 16
    assert [item.job.job_id for item in source.released] == [f"job-{i}" for i in range(17, 21)]
    left = source.claim(14, 0.0)
    assert [job.job_id for job in left] == [f"job-{i}" for i in range(17, 31)]


def test_a_drain_that_runs_out_of_time_puts_the_rest_back_with_its_progress(
    engine: Engine,
) -> None:
    source = MemorySource()
    source.add(payload(prompt=[1], max_tokens=4000, ignore_eos=True), "endless")
    source.add(payload(prompt=[2], max_tokens=5, ignore_eos=True), "brief")
    server = InThread(engine, source, grace=0.6, checkpoint_every=0)
    wait_until(lambda: server.loop.num_running > 0, "they run")
    server.stop("spot notice")
    assert set(source.results) == {"brief"}
    assert source.checkpoints["endless"]
    assert source.depth == (1, 0)


def test_a_deterministic_worker_goes_on_with_the_very_same_numbers(model: Path) -> None:
    """Interrupted in a full batch, resumed by a worker that takes the prompts in other chunks: the
    tokens, the bits of their log-probabilities and the digest are those of a run alone. A worker
    without the mode does not take the checkpoint over."""
    fields = [
        {
            "prompt": [3 + index] * (20 + 9 * index),
            "max_tokens": 150,
            "temperature": index % 2,
            "seed": index,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
        }
        for index in range(5)
    ]
    engine = load(model, deterministic=True, max_num_seqs=8)
    expected = [answer(engine, given, "job")[0] for given in fields]
    source = MemorySource()
    for index, given in enumerate(fields):
        source.add(payload(**given), str(index))
    first = InThread(engine, source, checkpoint_every=0)
    wait_until(lambda: first.value("headrace_engine_generation_tokens_total") > 150, "half-way")
    first.drain.request("SIGTERM")
    first.drain.hurry()
    first.stop()
    blob = source.checkpoints["0"]
    other = load(model, deterministic=True, max_num_seqs=4, max_num_batched_tokens=64)
    with serving(other, source) as second:
        assert source.wait(len(fields))
        for index, whole in enumerate(expected):
            result = second.result(str(index))
            assert result.usage.resumed_from_tokens > 0
            assert result.system_fingerprint == engine.digest
            assert result.choices[0].token_ids == whole.output_token_ids
            entries = result.choices[0].logprobs
            assert entries is not None
            assert [entry.logprob for entry in entries] == [e.logprob for e in whole.logprobs]
    plain = load(model, max_num_seqs=4)
    assert plain.digest != engine.digest
    fresh = Sequence("r", expected[0].prompt_token_ids, expected[0].params)
    assert checkpoint.restore(blob, [fresh], plain.fingerprint).started_over
    assert checkpoint.restore(blob, [fresh], other.fingerprint).tokens > 0
