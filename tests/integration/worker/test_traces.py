"""Traces from a producer through a real Redis and a real worker to a collector."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collector import Collector, attributes
from serving import WorkerProcess

from headrace.producer import Client, JobFailed
from headrace.producer.codec import FUNCTION

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "shop=7", "order": 12}

ABSENT = """
import pathlib, sys
frame = sys._getframe(1)
while frame.f_code.co_filename.startswith("<frozen importlib"):
    frame = frame.f_back
with pathlib.Path(__file__).with_name("importers").open("a") as sink:
    print(frame.f_code.co_filename, file=sink)
raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry")
"""
"""Stands for a package that is not installed, and writes down who asked for it."""

Start = Callable[[], WorkerProcess]


@pytest.fixture
def start(redis_url: str, model: Path, tmp_path: Path) -> Iterator[Start]:
    workers: list[WorkerProcess] = []

    def begin() -> WorkerProcess:
        workers.append(WorkerProcess(redis_url, model, tmp_path / "worker.log"))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.end()


def drained(worker: WorkerProcess) -> list[dict[str, Any]]:
    worker.signal(signal.SIGTERM)
    assert worker.exit_status() == 0, worker.log.read_text()
    return worker.lines()


def test_a_traced_job_says_so_in_the_log_and_in_its_result_and_opentelemetry_is_not_imported(
    start: Start, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "path" / "opentelemetry"
    fake.mkdir(parents=True)
    fake.joinpath("__init__.py").write_text(ABSENT)
    monkeypatch.setenv("PYTHONPATH", str(fake.parent))
    worker = start()
    with Client(redis_url, queue="tiny") as client:
        answered = client.submit([1, 2], max_tokens=3, metadata=TRACED)
        refused = client.submit([1, 2], max_tokens=3, temperature=-1.0, metadata=TRACED)
        untraced = client.submit([1, 2], max_tokens=3, metadata={"order": 13})
        assert answered.result(timeout=120).metadata == TRACED
        with pytest.raises(JobFailed) as failure:
            refused.result(timeout=60)
        assert failure.value.result is not None
        assert failure.value.result.metadata == TRACED
        assert untraced.result(timeout=60).metadata == {"order": 13}
    lines = drained(worker)
    importers = fake / "importers"
    asked = importers.read_text().splitlines() if importers.exists() else []
    assert not [path for path in asked if "redis" not in Path(path).parts], asked
    said = {line.get("job_id"): line for line in lines if "job_id" in line}
    for job, message in ((answered, "answered: "), (refused, "refused: invalid_request")):
        line = said[job.id]
        assert line["message"].startswith(message)
        assert (line["trace_id"], line["traceparent"]) == (TRACE, TRACED["traceparent"])
    assert untraced.id not in said


def test_spans_reach_the_collector_under_the_callers_span(
    start: Start, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    worker = start().wait_ready()
    with Client(redis_url, queue="tiny") as client:
        answered = client.submit(
            [1, 2, 3], max_tokens=4, n=2, seed=1, ignore_eos=True, metadata=TRACED
        )
        refused = client.submit([1], temperature=-1.0, metadata=TRACED)
        untraced = client.submit([1, 2], max_tokens=3)
        unsampled = client.submit(
            [1], max_tokens=1, metadata={"traceparent": f"00-{TRACE}-{PARENT}-00"}
        )
        for job in (answered, untraced, unsampled):
            job.result(timeout=120)
        with pytest.raises(JobFailed):
            refused.result(timeout=60)
    drained(worker)
    collector.close()

    by_job: dict[str, dict[str, Any]] = {}
    for span in collector.spans:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.trace_state == "shop=7"
        job_id = attributes(span.attributes)["messaging.message.id"]
        by_job.setdefault(job_id, {})[span.name] = span
    assert by_job.keys() == {answered.id, refused.id}

    spans = by_job[answered.id]
    assert spans.keys() == {"wait tiny", "text_completion tiny"}
    wait, work = spans["wait tiny"], spans["text_completion tiny"]
    (first,) = work.events
    assert first.name == "first token"
    assert wait.start_time_unix_nano <= wait.end_time_unix_nano == work.start_time_unix_nano
    assert work.start_time_unix_nano <= first.time_unix_nano <= work.end_time_unix_nano
    found = attributes(work.attributes)
    assert {name: value for name, value in found.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.seed": 1,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
    }
    assert (found["messaging.destination.name"], found["headrace.delivery"]) == ("tiny", 1)

    failed = by_job[refused.id]["text_completion tiny"]
    assert attributes(failed.attributes)["error.type"] == "invalid_request"
    assert failed.status.code == failed.status.STATUS_CODE_ERROR

    service = collector.services[0]
    assert service["service.name"] == "headrace-worker"
    assert service["deployment.environment.name"] == "test"
    for name in ("gen_ai.server.request.duration", "gen_ai.server.time_to_first_token"):
        (points,) = collector.histograms[name]
        assert points.count == 3, "every job that the engine had, traced or not"
        assert attributes(points.attributes)["gen_ai.request.model"] == "tiny"


def test_without_a_collector_jobs_are_answered_and_the_worker_drains(
    start: Start, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    collector.close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    worker = start()
    with Client(redis_url, queue="tiny") as client:
        job = client.submit([1, 2], max_tokens=3, ignore_eos=True, metadata=TRACED)
        assert job.result(timeout=120).usage.completion_tokens == 3
    drained(worker)


def test_a_job_of_another_language_with_a_bad_traceparent_fails_by_name(
    start: Start, redis_url: str
) -> None:
    """RQ's own client checks nothing; the worker does."""
    import redis
    import rq

    connection = redis.Redis.from_url(redis_url)
    queue = rq.Queue("tiny", connection=connection, serializer="json")
    body = {"prompt": [1], "metadata": {"traceparent": "yes"}}
    job = queue.enqueue(FUNCTION, body)
    start()
    with Client(redis_url, queue="tiny") as client, pytest.raises(JobFailed) as caught:
        client.result(job.id, timeout=120)
    assert (caught.value.failure.code, caught.value.failure.param) == (
        "invalid_request",
        "metadata",
    )
    connection.close()
