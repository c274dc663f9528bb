"""The exporter tells the truth about every state of a real queue, and says when it cannot."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_support import RedisServer, free_port
from serving import get, sample, wait_until

from headrace.producer import Client, codec
from headrace.producer.schemas import Choice, Result, Usage
from headrace.worker import metrics
from headrace.worker.depth import Assumed, DepthReader
from headrace.worker.exporter import make_server
from headrace.worker.lease import RedisSource
from headrace.worker.lease_settings import LeaseSettings
from headrace.worker.source import (
    ClaimedJob,
    Outcome,
    OutcomeKind,
    WorkerFacts,
    WorkerState,
)

QUEUE = "work"


class Exporter:
    def __init__(self, url: str, **assumed: Any) -> None:
        self._server = make_server(url, "127.0.0.1", 0, (QUEUE,), Assumed(**assumed))
        self._server.start()
        self.base = "http://{}:{}".format(*self._server.address)

    def text(self) -> str:
        return get(self.base + "/metrics")[1]

    def jobs(self) -> dict[str, float]:
        text = self.text()
        return {
            state: sample(text, "headrace_queue_jobs", f'{{queue="{QUEUE}",state="{state}"}}')
            for state in metrics.QUEUE_STATES
        }

    def value(self, name: str, extra: str = "") -> float:
        return sample(self.text(), name, f'{{queue="{QUEUE}"{extra}}}')

    @property
    def outstanding(self) -> float:
        return self.value("headrace_queue_outstanding_jobs")

    def json(self, queue: str = QUEUE) -> Any:
        return json.loads(get(f"{self.base}/queues/{queue}")[1])

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def exporter(redis_url: str) -> Iterator[Exporter]:
    exporter = Exporter(redis_url, cold_start=60.0)
    yield exporter
    exporter.stop()


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url, queue=QUEUE) as client:
        yield client


@contextlib.contextmanager
def worker(url: str, **settings: Any) -> Iterator[RedisSource]:
    source = RedisSource.from_url(url, [QUEUE], settings=LeaseSettings(**settings))
    source.start()
    yield source
    with contextlib.suppress(Exception):
        source.unregister()
    source.close()


def done(job: ClaimedJob, prompt: int = 10, output: int = 5) -> Outcome:
    result = Result(
        job_id=job.job_id,
        choices=[Choice(index=0, text="x", finish_reason="stop")],
        usage=Usage(prompt_tokens=prompt, completion_tokens=output),
    )
    return Outcome(job, OutcomeKind.SUCCEEDED, codec.encode_result(result), prompt, output)


def failed(job: ClaimedJob, kind: OutcomeKind) -> Outcome:
    return Outcome(job, kind, codec.encode_result(codec.failed(job.job_id, "x", "y")))


def test_a_queue_that_nobody_has_used_is_empty_and_not_missing(exporter: Exporter) -> None:
    text = exporter.text()
    assert sample(text, "headrace_queue_source_available") == 1
    assert exporter.jobs() == {"queued": 0, "scheduled": 0, "running": 0}
    assert exporter.outstanding == 0
    assert exporter.value("headrace_queue_replicas_required") == 0
    assert exporter.json("never-heard-of")["outstanding_jobs"] == 0


def test_every_state_of_a_job_is_counted_where_it_is(
    exporter: Exporter, client: Client, redis_url: str
) -> None:
    """50 accepted: 30 wait, 10 run, 5 are scheduled soon, 5 next week; then all but those end."""
    client.submit_many([{"prompt": f"p{i}"} for i in range(40)])
    for i in range(10):
        delay = 20 if i < 5 else 7 * 86400
        client.submit(f"later {i}", start_at=time.time() + delay)
    with worker(redis_url) as source:
        claimed = source.claim(10, 1.0)
        assert exporter.jobs() == {"queued": 30, "scheduled": 10, "running": 10}
        assert exporter.outstanding == 30 + 10 + 5, "next week's jobs need no worker now"
        assert exporter.value("headrace_jobs_enqueued_total") == 50
        assert 0 < exporter.value("headrace_queue_oldest_job_age_seconds") < 60
        for index, job in enumerate(claimed):
            kind = OutcomeKind.FAILED if index % 2 else OutcomeKind.SUCCEEDED
            source.finish([done(job) if kind is OutcomeKind.SUCCEEDED else failed(job, kind)])
        assert exporter.jobs() == {"queued": 30, "scheduled": 10, "running": 0}
        assert exporter.outstanding == 35
        assert exporter.value("rq_jobs", ',status="finished"') == 5
        assert exporter.value("rq_jobs", ',status="failed"') == 5


def test_all_in_flight_and_none_pending_is_not_idle(
    exporter: Exporter, client: Client, redis_url: str
) -> None:
    """Pending alone reads 0 here, and scaling on it takes busy workers away
    (kedacore/keda#6719)."""
    client.submit_many([{"prompt": "p"} for _ in range(8)])
    with worker(redis_url) as source:
        source.claim(8, 1.0)
        assert exporter.jobs()["queued"] == 0
        assert exporter.outstanding == 8
        assert exporter.value("headrace_queue_replicas_required") >= 1


def test_a_retry_that_waits_its_turn_is_outstanding(
    exporter: Exporter, client: Client, redis_url: str
) -> None:
    client.submit("p")
    with worker(redis_url, backoff_first=30.0) as source:
        (job,) = source.claim(1, 1.0)
        source.finish([failed(job, OutcomeKind.RETRY)])
    assert exporter.jobs() == {"queued": 0, "scheduled": 1, "running": 0}
    assert exporter.outstanding == 1


def test_cancelled_jobs_are_not_waited_for(exporter: Exporter, client: Client) -> None:
    """A cancelled id stays in the list until a claim drops it: a ghost, counted and taken off."""
    jobs = client.submit_many([{"prompt": f"p{i}"} for i in range(10)])
    client.cancel_many([job.id for job in jobs[:9]])
    assert client.redis.llen(f"rq:queue:{QUEUE}") == 10
    assert exporter.jobs()["queued"] == 1
    assert exporter.outstanding == 1
    assert exporter.value("rq_jobs", ',status="canceled"') == 9


def test_priorities_and_tenants_are_one_queue(exporter: Exporter, client: Client) -> None:
    client.submit("a", priority="high")
    client.submit("b", priority="low")
    client.submit("c", tenant="t1")
    client.submit("d", tenant="t2", priority="high")
    assert exporter.jobs()["queued"] == 4
    assert 'queue="work.high"' not in exporter.text()


def test_a_dead_job_is_counted_as_dead(exporter: Exporter, client: Client, redis_url: str) -> None:
    client.submit("p")
    with worker(redis_url, max_attempts=1) as source:
        (job,) = source.claim(1, 1.0)
        source.finish([failed(job, OutcomeKind.RETRY)])
    assert exporter.value("headrace_dead_jobs") == 1
    assert exporter.outstanding == 0


def test_tokens_are_estimated_and_put_right_by_what_workers_count(
    exporter: Exporter, client: Client, redis_url: str
) -> None:
    """The finished half had twice the prompt tokens of the estimate: so has the waiting half."""
    client.submit_many([{"prompt": "x" * 400, "max_tokens": 50} for _ in range(20)])
    prompt = exporter.value("headrace_queue_outstanding_tokens", ',kind="prompt"')
    output = exporter.value("headrace_queue_outstanding_tokens", ',kind="output"')
    assert prompt > 0
    assert output > 0
    with worker(redis_url) as source:
        each = round(prompt / 20)
        source.finish([done(job, 2 * each, 1) for job in source.claim(10, 1.0)])
    after = exporter.value("headrace_queue_outstanding_tokens", ',kind="prompt"')
    assert after == pytest.approx(prompt, rel=0.05), "half the jobs, twice the tokens each"
    assert exporter.value("headrace_queue_outstanding_tokens", ',kind="output"') < output / 2
    assert exporter.json()["outstanding_tokens"] == pytest.approx(
        after + exporter.value("headrace_queue_outstanding_tokens", ',kind="output"')
    )


def test_workers_are_counted_by_state_and_their_rates_decide(
    exporter: Exporter, client: Client, redis_url: str
) -> None:
    """2,000 jobs of about 50 output tokens at 100 a second are 1,000 s of work or more; within
    600 s that takes at least two workers, and a loading one counts as coming."""
    client.submit_many([{"prompt": "p", "max_tokens": 50} for _ in range(2000)])
    facts = WorkerFacts(
        model=QUEUE,
        state=WorkerState.READY,
        queues=(QUEUE,),
        slots=16,
        prefill_tokens_per_second=10_000.0,
        decode_tokens_per_second=100.0,
        cold_start_seconds=20.0,
        started_at=time.time(),
    )
    with worker(redis_url) as first, worker(redis_url) as second:
        first.announce(facts)
        loading = WorkerFacts(QUEUE, WorkerState.LOADING, (QUEUE,), started_at=time.time())
        second.announce(loading)
        assert exporter.value("headrace_queue_workers", ',state="ready"') == 1
        assert exporter.value("headrace_queue_workers", ',state="loading"') == 1
        assert exporter.value("headrace_queue_workers", ',state="draining"') == 0
        output = exporter.value("headrace_queue_outstanding_tokens", ',kind="output"')
        required = exporter.value("headrace_queue_replicas_required")
        assert required >= output / 100 / 600
        assert required >= 2
        assert exporter.json()["replicas_required"] == required
        assert exporter.json()["rates"]["decode_tokens_per_second"] == 100.0


def test_at_zero_workers_the_last_measured_rates_decide(
    exporter: Exporter, client: Client, redis_url: str
) -> None:
    """2,000 jobs of 50 output tokens at 100 a second, due within 600 s, ask for two workers also
    once the worker that measured is gone. Before anybody has measured, one is asked for."""
    client.submit_many([{"prompt": "p", "max_tokens": 50} for _ in range(2000)])
    assert exporter.value("headrace_queue_replicas_required") == 1
    assert exporter.json()["rates"] == {
        "prefill_tokens_per_second": 0.0,
        "decode_tokens_per_second": 0.0,
        "age_seconds": 0.0,
    }
    facts = WorkerFacts(
        QUEUE,
        WorkerState.READY,
        (QUEUE,),
        prefill_tokens_per_second=10_000.0,
        decode_tokens_per_second=100.0,
        cold_start_seconds=20.0,
        started_at=time.time() - 3600,
    )
    with worker(redis_url) as source:
        source.announce(facts)
        there = exporter.value("headrace_queue_replicas_required")
    client.redis.hset(f"rq:x:rates:{QUEUE}", "at", time.time() - 7200)
    assert exporter.value("headrace_queue_workers", ',state="ready"') == 0
    assert exporter.value("headrace_queue_replicas_required") >= there >= 2
    assert exporter.value("headrace_queue_service_tokens_per_second", ',kind="output"') == 100.0
    assert exporter.value("headrace_queue_cold_start_seconds") == 20.0
    assert exporter.value("headrace_queue_rates_age_seconds") == pytest.approx(7200, abs=60)
    assert exporter.json()["rates"]["age_seconds"] == pytest.approx(7200, abs=60)
    assert 0 < client.redis.ttl(f"rq:x:rates:{QUEUE}") <= 30 * 24 * 3600


def test_rates_that_are_no_numbers_count_as_unknown(
    exporter: Exporter, client: Client, redis_url: str
) -> None:
    """Anyone may write to Redis; a scrape goes on."""
    client.submit("p")
    client.redis.hset(
        f"rq:x:rates:{QUEUE}",
        mapping={"prefill": "nan", "decode": "-3", "cold_start": "inf", "at": "yesterday"},
    )
    assert exporter.value("headrace_queue_replicas_required") == 1
    assert exporter.value("headrace_queue_cold_start_seconds") == 60.0


def test_deadlines_are_counted_by_how_near_they_are(exporter: Exporter, client: Client) -> None:
    now = time.time()
    for seconds in (30, 300, 3000):
        client.submit("p", deadline=now + seconds)
    counts = {
        horizon: sample(
            exporter.text(),
            "headrace_queue_deadline_jobs",
            f'{{le_seconds="{horizon}",queue="{QUEUE}"}}',
        )
        for horizon in metrics.DEADLINE_HORIZONS
    }
    assert counts == {"0": 0, "60": 1, "600": 2, "3600": 3, "21600": 3, "86400": 3, "+Inf": 3}


def test_two_exporters_agree(exporter: Exporter, client: Client, redis_url: str) -> None:
    client.submit_many([{"prompt": "p"} for _ in range(7)])
    other = Exporter(redis_url)
    assert exporter.outstanding == other.outstanding == 7
    other.stop()


def test_while_redis_is_away_the_depth_is_unknown_and_not_zero() -> None:
    server = RedisServer(appendonly="yes", appendfsync="always")
    exporter = Exporter(server.url)
    try:
        with Client(server.url, queue=QUEUE) as client:
            client.submit_many([{"prompt": "p"} for _ in range(3)])
            assert exporter.outstanding == 3
            server.kill()
            text = exporter.text()
            assert sample(text, "headrace_queue_source_available") == 0
            assert "headrace_queue_jobs" not in text
            assert "headrace_queue_outstanding" not in text
            assert get(exporter.base + "/queues/work")[0] == 503
            assert get(exporter.base + "/healthz")[0] == 200, "restarting it would not help"
            server.start()
            assert sample(exporter.text(), "headrace_queue_source_available") == 1
            assert exporter.outstanding == 3
    finally:
        exporter.stop()
        server.stop()


def test_the_cost_of_a_read_does_not_grow_with_the_queue(client: Client, redis_url: str) -> None:
    """Commands of one read with 20 jobs and with 5,000; each is of constant cost, whatever the
    length of a list."""
    reader = DepthReader(redis_url, (QUEUE,))

    def commands() -> dict[str, int]:
        client.redis.config_resetstat()
        reader.read()
        stats = client.redis.info("commandstats")
        return {name: entry["calls"] for name, entry in stats.items()}

    client.submit_many([{"prompt": "p"} for _ in range(20)])
    reader.read()
    small = commands()
    client.submit_many([{"prompt": "p"} for _ in range(5000)])
    assert commands() == small
    assert sum(small.values()) < 80
    reader.close()


def test_every_metric_shown_is_one_that_was_declared(exporter: Exporter, client: Client) -> None:
    client.submit("p")
    declared = metrics.all_names()
    for line in exporter.text().splitlines():
        if line and not line.startswith("#") and not line.startswith("process_"):
            name = line.partition("{")[0].partition(" ")[0]
            assert name in declared, name


def test_depth_is_conserved_at_every_scrape_while_jobs_move(
    exporter: Exporter, client: Client, redis_url: str
) -> None:
    """queued + scheduled + running + finished + failed = accepted, in each of many readings."""
    total = 600
    client.submit_many([{"prompt": f"p{i}"} for i in range(total)])
    stop = threading.Event()

    def work() -> None:
        with worker(redis_url) as source:
            while not stop.is_set():
                claimed = source.claim(16, 0.05)
                half = len(claimed) // 2
                source.finish([done(job) for job in claimed[:half]])
                for job in claimed[half:]:
                    kind = OutcomeKind.FAILED if job.fence % 2 else OutcomeKind.RETRY
                    source.finish([failed(job, kind)])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    reader = DepthReader(redis_url, (QUEUE,))
    sums, samples = set(), 0
    end = time.monotonic() + 20
    while time.monotonic() < end:
        depth = reader.read().queues[QUEUE]
        parts = (depth.pending, depth.scheduled, depth.running, depth.finished, depth.failed)
        sums.add(sum(parts))
        samples += 1
        if depth.finished + depth.failed == total:
            break
    stop.set()
    for thread in threads:
        thread.join()
    assert sums == {total}
    assert samples > 20


def test_the_exporter_is_a_process_without_torch_that_ends_on_sigterm(
    redis_url: str, tmp_path: Path
) -> None:
    port = free_port()
    program = (
        "import sys\n"
        "from headrace.worker.exporter import exporter\n"
        "assert not {'torch', 'numpy', 'headrace.engine'} & set(sys.modules), sys.modules\n"
        "exporter()\n"
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stderr=log,
            env={
                **os.environ,
                "HEADRACE_REDIS_URL": redis_url,
                "HEADRACE_EXPORTER_PORT": str(port),
                "HEADRACE_EXPORTER_QUEUES": "one two",
            },
        )

    def up() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        with contextlib.suppress(OSError):
            return get(f"http://127.0.0.1:{port}/healthz")[0] == 200
        return False

    wait_until(up, "it answers")
    text = get(f"http://127.0.0.1:{port}/metrics")[1]
    assert sample(text, "headrace_queue_outstanding_jobs", '{queue="one"}') == 0
    assert sample(text, "headrace_queue_outstanding_jobs", '{queue="two"}') == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
