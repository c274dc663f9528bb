"""The serving loop with the real engine: what goes in comes out once, whatever is among it."""

import json
import pickle
import time
from typing import Any

import pytest
import tiny
from delayed_device import LateRunner
from serving import InThread, answer, payload, serving, wait_until

from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.worker.bench.memory import MemorySource
from headrace.worker.serving_engine import EngineBroken
from headrace.worker.source import OutcomeKind, SourceUnavailable


def test_every_job_gets_the_answer_it_would_get_alone(engine: Engine) -> None:
    """Forty jobs through sixteen slots: more than the batch holds, so slots are refilled."""
    requests: list[dict[str, Any]] = [
        {"prompt": list(range(1, 2 + i)), "max_tokens": 4 + i % 7, "temperature": 0}
        if i % 2
        else {"prompt": list(range(1, 2 + i)), "max_tokens": 4 + i % 7, "seed": i}
        for i in range(40)
    ]
    expected = [answer(engine, fields, "x")[0].output_token_ids for fields in requests]
    source = MemorySource(payload(**fields) for fields in requests)
    with serving(engine, source) as server:
        assert source.wait(40)
        got = [server.result(f"job-{i + 1}").choices[0].token_ids for i in range(40)]
    assert got == expected
    assert server.value("headrace_jobs_completed_total", outcome="succeeded") == 40
    assert server.value("headrace_engine_time_to_first_token_seconds_count") == 40
    assert source.depth == (0, 0)


BAD: list[tuple[bytes, str, str | None]] = [
    (b"\x00\x01garbage", "invalid_payload", None),
    (pickle.dumps([1]), "invalid_payload", None),
    (b"[]", "invalid_payload", None),
    (payload(prompt=""), "empty_prompt", "prompt"),
    (payload(prompt=[]), "empty_prompt", "prompt"),
    (payload(messages=[]), "empty_prompt", "messages"),
    (payload(prompt=[1] * 5000), "prompt_too_long", "prompt"),
    (payload(prompt="x" * 200_000), "prompt_too_long", "prompt"),
    (payload(prompt=[1, 260]), "invalid_request", "prompt"),
    (payload(prompt="a", temperature=-1), "invalid_request", "temperature"),
    (payload(prompt="a", top_p=0), "invalid_request", "top_p"),
    (payload(prompt="a", top_k=-2), "invalid_request", "top_k"),
    (payload(prompt="a", max_tokens=-1), "invalid_request", "max_tokens"),
    (payload(prompt="a", min_tokens=5, max_tokens=4), "invalid_request", "min_tokens"),
    (payload(prompt="a", repetition_penalty=0), "invalid_request", "repetition_penalty"),
    (payload(prompt="a", logprobs=True, top_logprobs=21), "invalid_request", "top_logprobs"),
    (payload(prompt="a", stop=""), "invalid_request", "stop"),
    (payload(prompt="a", stop_token_ids=[260]), "invalid_request", "stop_token_ids"),
    (payload(prompt="a", logit_bias={"260": 1}), "invalid_request", "logit_bias"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_request", "temperature"),
    (payload(prompt="a", tools=[]), "unsupported_parameter", "tools"),
    (payload(prompt="a", tempreature=1), "unknown_parameter", "tempreature"),
    (payload(v=2, prompt="a", novel=1), "unsupported_version", "v"),
    (payload(v=2, prompt="a"), "unsupported_version", "v"),
    (payload(v=0, prompt="a"), "unsupported_version", "v"),
    (payload(prompt="a", model="someone-elses"), "model_not_found", "model"),
]


def test_each_bad_request_fails_alone_and_by_name(engine: Engine) -> None:
    """Good and bad ones take turns in one batch; every good one is answered as if alone."""
    good = {"prompt": [5, 6, 7], "max_tokens": 24, "temperature": 0}
    expected = answer(engine, good, "x")[0].output_token_ids
    source = MemorySource()
    for number, (bad, _, _) in enumerate(BAD):
        source.add(payload(**good), f"good-{number}")
        source.add(bad, f"bad-{number}")
    with serving(engine, source) as server:
        assert source.wait(2 * len(BAD))
        for number, (_, code, param) in enumerate(BAD):
            failure = server.result(f"bad-{number}").failure
            assert failure is not None
            assert (failure.code, failure.param) == (code, param), failure
            assert not failure.retryable
            assert source.results[f"bad-{number}"].kind is OutcomeKind.FAILED
            assert server.result(f"good-{number}").choices[0].token_ids == expected
    assert server.value("headrace_jobs_completed_total", outcome="failed") == len(BAD)


def test_a_prompt_that_is_too_long_says_limit_and_length(engine: Engine) -> None:
    source = MemorySource([payload(prompt=[1] * 5000)])
    with serving(engine, source) as server:
        assert source.wait(1)
        failure = server.result("job-1").failure
    assert failure is not None
    assert "5000" in failure.message and "4096" in failure.message


def test_a_template_that_refuses_fails_that_request(tmp_path: Any) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    model = tiny.write_checkpoint(tmp_path / "strict", chat_template=template)
    from serving import load

    engine = load(model, max_num_seqs=4)
    source = MemorySource(
        [
            payload(messages=[{"role": "system", "content": "a"}], max_tokens=2),
            payload(messages=[{"role": "user", "content": "a"}], max_tokens=2),
        ]
    )
    with serving(engine, source) as server:
        assert source.wait(2)
        failure = server.result("job-1").failure
        assert failure is not None and failure.code == "template_error"
        assert "no system" in failure.message
        assert server.result("job-2").ok
        assert server.result("job-2").object == "chat.completion"


def test_a_job_for_another_model_goes_back_uncharged_while_someone_serves_it(
    engine: Engine,
) -> None:
    source = MemorySource()
    source.others.add(("other", 1))
    source.add(payload(prompt="a", model="other"), "foreign")
    source.add(payload(prompt="a", max_tokens=1), "ours")
    with serving(engine, source) as server:
        assert source.wait(1)
        wait_until(lambda: len(source.released) >= 3, "put back again and again")
        assert server.result("ours").ok
        assert "foreign" not in source.results
        assert all(item.checkpoint is None and not item.to_front for item in source.released)
        before = len(source.released)
        time.sleep(0.5)
        assert len(source.released) - before <= 10, "spins on a job that is not its own"
        source.others.clear()
        assert source.wait(2), "once nobody serves it, it must fail"
        failure = server.result("foreign").failure
    assert failure is not None and failure.code == "model_not_found"


def test_a_newer_schema_is_left_to_a_worker_that_reads_it(engine: Engine) -> None:
    source = MemorySource()
    source.others.add(("tiny", 2))
    source.add(payload(v=2, prompt="a", brand_new=True), "newer")
    with serving(engine, source):
        wait_until(lambda: len(source.released) >= 2, "put back")
        assert not source.results


def test_n_answers_are_told_apart_and_the_prompt_counts_once(engine: Engine) -> None:
    source = MemorySource([payload(prompt=[1] * 40, max_tokens=5, n=4, seed=3)])
    with serving(engine, source) as server:
        assert source.wait(1)
        result = server.result("job-1")
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids or ()) for choice in result.choices}) > 1
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (40, 20)


def test_log_probabilities_travel_as_text_bytes_and_numbers(engine: Engine) -> None:
    fields = {"prompt": "a", "max_tokens": 3, "temperature": 0, "logprobs": True}
    source = MemorySource([payload(**fields, top_logprobs=2)])
    with serving(engine, source) as server:
        assert source.wait(1)
        entries = server.result("job-1").choices[0].logprobs
    assert entries is not None and len(entries) == 3
    for entry in entries:
        assert entry.top is not None and len(entry.top) == 2
        assert entry.logprob == pytest.approx(entry.top[0].logprob)
        assert entry.bytes == entry.top[0].bytes


def test_a_cancelled_job_leaves_the_batch_and_the_others_go_on(engine: Engine) -> None:
    source = MemorySource()
    source.add(payload(prompt="a", max_tokens=3000, ignore_eos=True), "long")
    source.add(payload(prompt="b", max_tokens=200, ignore_eos=True), "short")
    with serving(engine, source, checkpoint_every=0) as server:
        wait_until(lambda: server.loop.num_running == 2, "both run")
        source.lose("long")
        server.heartbeat()
        assert source.wait(1)
        wait_until(lambda: server.loop.num_running == 0, "the cancelled one is gone")
        assert set(source.results) == {"short"}
        assert server.value("headrace_jobs_lost_total") == 1


def test_a_deadline_that_passes_while_running_ends_the_job_explicitly(engine: Engine) -> None:
    source = MemorySource()
    soon = time.time() + 0.4
    source.add(payload(prompt="a", max_tokens=3900, ignore_eos=True), "late", deadline=soon)
    with serving(engine, source) as server:
        assert source.wait(1)
        assert source.results["late"].kind is OutcomeKind.EXPIRED
        failure = server.result("late").failure
        assert failure is not None and failure.code == "expired"
        wait_until(lambda: engine.kv_usage == 0.0, "its blocks are free")


def test_an_absent_queue_loses_no_result_and_no_job(engine: Engine) -> None:
    source = MemorySource()
    for i in range(6):
        source.add(payload(prompt=[i + 1], max_tokens=60, ignore_eos=True))
    with serving(engine, source) as server:
        wait_until(lambda: server.loop.num_running == 6, "all run")
        source.down = True
        wait_until(lambda: server.loop.num_running == 0, "all have ended")
        assert not source.results
        wait_until(lambda: not server.value("headrace_worker_source_available"), "told")
        source.down = False
        source.add(payload(prompt="a", max_tokens=1))
        assert source.wait(7)
        assert server.value("headrace_worker_source_available") == 1
    assert source.depth == (0, 0)


class Poisoned:
    """The engine with a host half that raises for one request, as a bug of ours would."""

    def __init__(self, engine: Engine, marker: int) -> None:
        self._engine = engine
        self._marker = marker
        self._added: dict[int, Sequence] = {}
        self.raised = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, sequence: Sequence) -> None:
        self._engine.add(sequence)
        self._added[sequence.seq_id] = sequence

    def step(self) -> Any:
        for sequence in self._added.values():
            poisoned = sequence.prompt_token_ids[0] == self._marker
            if poisoned and not sequence.finished and len(sequence.output_token_ids) >= 3:
                self.raised += 1
                raise KeyError("a bug")
        return self._engine.step()


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_exception_in_the_engine_fails_the_job_that_causes_it_and_no_other(
    engine: Engine, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows at the third token; 11 others have as many by then and must not pay for it. With a
    step `ahead`, one is in flight when everything is taken out of the engine."""
    requests = [{"prompt": [i + 1], "max_tokens": 10, "ignore_eos": True} for i in range(12)]
    expected = [
        answer(engine, fields, f"job-{i + 1}")[0].output_token_ids
        for i, fields in enumerate(requests)
    ]
    source = MemorySource(payload(**fields) for fields in requests)
    if ahead:
        monkeypatch.setattr(engine, "runner", LateRunner(engine.runner))
        monkeypatch.setattr(engine, "_steps_in_flight", ahead)
    poisoned = Poisoned(engine, marker=8)
    with serving(poisoned, source) as server:
        assert source.wait(12)
        for i in range(12):
            if i == 7:
                continue
            assert server.result(f"job-{i + 1}").choices[0].token_ids == expected[i]
        failure = server.result("job-8").failure
    assert failure is not None and failure.code == "engine_error" and failure.retryable
    assert source.results["job-8"].kind is OutcomeKind.RETRY
    assert source.results["job-8"].job.attempts == 2, "an error of the engine is tried three times"
    assert server.value("headrace_engine_errors_total") == poisoned.raised


class Broken(Poisoned):
    def step(self) -> Any:
        output = self._engine.step()
        if len(output.progressed) and len(output.progressed[0].output_token_ids) > 4:
            raise MemoryError("the device is gone")
        return output

    def check_integrity(self) -> None:
        raise RuntimeError("books do not balance")


def test_a_broken_engine_keeps_progress_and_leases_and_puts_the_unbegun_back(
    model: Any,
) -> None:
    from serving import load

    engine = load(model, max_num_seqs=2)
    source = MemorySource(payload(prompt=[i + 1], max_tokens=50, ignore_eos=True) for i in range(5))
    server = InThread(Broken(engine, 0), source, look_ahead=3)
    wait_until(lambda: server.error is not None, "it gives up")
    assert isinstance(server.error, EngineBroken)
    assert server.loop.courier.stop(5) == 0
    assert source.depth == (3, 2), "two in the batch stay leased, to be charged as a crash"
    assert len(source.checkpoints) == 2
    assert not source.results


def test_results_are_not_held_back_when_the_engine_is_idle(engine: Engine) -> None:
    """With a flush every ten seconds a lone result would take that long."""
    source = MemorySource()
    with serving(engine, source, flush_seconds=10.0, flush_count=64):
        began = time.monotonic()
        source.add(payload(prompt="a", max_tokens=1))
        assert source.wait(1, timeout=5.0)
        assert time.monotonic() - began < 5.0


def test_results_are_delivered_in_groups(engine: Engine) -> None:
    source = MemorySource(payload(prompt=[i + 1], max_tokens=2) for i in range(64))
    groups: list[int] = []
    finish = source.finish

    def counted(outcomes: Any) -> Any:
        groups.append(len(outcomes))
        return finish(outcomes)

    source.finish = counted  # type: ignore[method-assign]
    with serving(engine, source, look_ahead=64, flush_seconds=0.05):
        assert source.wait(64)
    assert len(groups) <= 12, groups


def test_one_result_that_the_queue_refuses_does_not_hold_up_the_others(engine: Engine) -> None:
    source = MemorySource(payload(prompt=[i + 1], max_tokens=2) for i in range(8))
    finish = source.finish

    def picky(outcomes: Any) -> Any:
        if any(outcome.job.job_id == "job-3" for outcome in outcomes):
            raise ValueError("refused")
        return finish(outcomes)

    source.finish = picky  # type: ignore[method-assign]
    with serving(engine, source):
        assert source.wait(7)
    assert "job-3" not in source.results
    assert source.depth == (0, 1), "its lease is left to lapse"


def test_a_claim_is_tried_again_until_the_queue_answers(engine: Engine) -> None:
    source = MemorySource([payload(prompt="a", max_tokens=1)])
    failures = [SourceUnavailable("one"), SourceUnavailable("two"), RuntimeError("a bug")]
    claim = source.claim

    def unreliable(max_jobs: int, wait_seconds: float) -> Any:
        if failures:
            raise failures.pop()
        return claim(max_jobs, wait_seconds)

    source.claim = unreliable  # type: ignore[method-assign]
    with serving(engine, source):
        assert source.wait(1, timeout=30)


def test_no_more_is_claimed_than_slots_and_a_small_look_ahead(engine: Engine) -> None:
    """What is claimed is invisible to other workers: 16 slots and 4 ahead, of 100."""
    source = MemorySource(
        payload(prompt=[i + 1], max_tokens=400, ignore_eos=True) for i in range(100)
    )
    most = 0
    with serving(engine, source, look_ahead=4) as server:
        for _ in range(40):
            most = max(most, source.depth[1])
            time.sleep(0.01)
        assert most == 20
        server.drain.request("enough")
        server.drain.hurry()


def test_nothing_a_job_says_reaches_the_log(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "the-patients-name"
    source = MemorySource(
        [
            payload(prompt=secret, max_tokens=1),
            payload(prompt=secret, temperature=-1),
            payload(prompt=secret, metadata={"a": secret}, tools=[secret]),
            json.dumps(secret).encode(),
        ]
    )
    with caplog.at_level("DEBUG"), serving(engine, source):
        assert source.wait(4)
    assert len(caplog.records) >= 3
    assert secret not in caplog.text
