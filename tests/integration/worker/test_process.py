"""The worker as a process: real signals, a real Redis, the real engine on a tiny model."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
import rq
from redis_support import RedisServer
from serving import WorkerProcess, answer, get, wait_until

from headrace.engine.engine import Engine
from headrace.producer import Client, codec
from headrace.producer.errors import JobFailed
from headrace.producer.operations import JobState
from headrace.worker.metrics import PHASES

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(redis_url: str, model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts workers on the test's Redis; ends what is left of them."""
    workers: list[WorkerProcess] = []

    def begin(*arguments: str, url: str = redis_url, served: Path | str = model) -> WorkerProcess:
        log = tmp_path / f"worker-{len(workers)}.log"
        workers.append(WorkerProcess(url, served, log, *arguments))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.end()


def generated(worker: WorkerProcess) -> float:
    return worker.value("headrace_engine_generation_tokens_total")


LONG: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": [7, 8, 9], "max_tokens": 500, "temperature": 0, "ignore_eos": True},
    "seeded": {"prompt": [7, 8, 9], "max_tokens": 500, "seed": 11, "ignore_eos": True},
    "by-id": {"prompt": [1, 2], "max_tokens": 500, "ignore_eos": True},
    "several": {"prompt": [3] * 40, "max_tokens": 300, "n": 2, "seed": 5, "ignore_eos": True},
}


def submit_long(client: Client) -> None:
    for name, fields in LONG.items():
        client.submit(job_id=name, queue="tiny", **fields)


def assert_whole(client: Client, engine: Engine, resumed: bool) -> None:
    """Each answer is that of an uninterrupted run, and was counted once."""
    for name, fields in LONG.items():
        result = client.result(name, timeout=120)
        expected = [s.output_token_ids for s in answer(engine, fields, name)]
        assert [choice.token_ids for choice in result.choices] == expected, name
        assert result.usage.completion_tokens == sum(len(ids) for ids in expected)
        assert (result.usage.resumed_from_tokens > 0) is resumed
        assert result.usage.resumed_from_tokens < result.usage.completion_tokens


def test_sigterm_checkpoints_and_the_next_worker_goes_on_after_the_last_token(
    start: Start, redis_url: str, engine: Engine
) -> None:
    first = start("--drain-timeout", "0.3").wait_ready()
    with Client(redis_url) as client:
        submit_long(client)
        wait_until(lambda: generated(first) > 200, "under way")
        first.signal(signal.SIGTERM)
        assert first.exit_status() == 0, first.log.read_text()
        assert client.redis.zcard("rq:wip:tiny") == 0
        assert client.redis.llen("rq:queue:tiny") == len(LONG)
        assert [w.name for w in client.workers()] == []
        second = start().wait_ready()
        assert_whole(client, engine, resumed=True)
        assert second.value("headrace_jobs_resumed_total") == len(LONG)


def test_after_kill_9_another_worker_finishes_from_the_last_checkpoint(
    start: Start, redis_url: str, engine: Engine
) -> None:
    first = start("--lease-seconds", "2", "--checkpoint-every", "16").wait_ready()
    with Client(redis_url) as client:
        submit_long(client)
        wait_until(lambda: generated(first) > 200, "under way, with checkpoints")
        first.kill()
        assert client.redis.zcard("rq:wip:tiny") == len(LONG), "killed too late to prove anything"
        second = start("--lease-seconds", "2").wait_ready()
        assert_whole(client, engine, resumed=True)
        assert second.value("headrace_leases_expired_total") == len(LONG)
        assert second.value("headrace_job_attempts_total", '{reason="crash"}') == len(LONG)
        second.signal(signal.SIGTERM)
        assert second.exit_status() == 0


def test_a_second_sigterm_puts_everything_back_at_once(start: Start, redis_url: str) -> None:
    worker = start("--drain-profile", "on-demand").wait_ready()
    with Client(redis_url) as client:
        client.submit([1], job_id="long", queue="tiny", max_tokens=4000, ignore_eos=True)
        wait_until(lambda: generated(worker) > 0, "under way")
        worker.signal(signal.SIGTERM)
        worker.wait_said("draining")
        status, reason = worker.get("/readyz")
        assert (status, reason) == (503, "draining\n")
        assert worker.get("/healthz")[0] == 200
        assert worker.value("headrace_worker_state", '{state="draining"}') == 1
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.exit_status() == 0
        assert time.monotonic() - began < 10, "of the 120 s that it might have taken"
        assert client.redis.hget("rq:job:long", "ckpt")
        assert client.redis.lrange("rq:queue:tiny", 0, -1) == [b"long"]


def test_sigint_is_sigterm(start: Start, redis_url: str) -> None:
    worker = start().wait_ready()
    with Client(redis_url) as client:
        job = client.submit([1], queue="tiny", max_tokens=300, ignore_eos=True)
        wait_until(lambda: generated(worker) > 0, "under way")
        worker.signal(signal.SIGINT)
        assert worker.exit_status() == 0
        assert job.result(timeout=1).usage.completion_tokens == 300


def test_a_spot_notice_drains_with_the_spot_profile(
    start: Start, redis_url: str, tmp_path: Path
) -> None:
    notice = tmp_path / "notice"
    worker = start("--spot-notice", str(notice)).wait_ready()
    notice.touch()
    assert worker.exit_status() == 0
    assert worker.said("spot notice: draining, 25 s at most")


def end(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_worker_ends_when_the_process_that_started_it_is_killed(
    redis_url: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    log = tmp_path / "child.log"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[2:], stderr=open(sys.argv[1], 'ab'))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    command = [sys.executable, "-P", "-m", "headrace.worker.cli", "--model", str(model)]
    command += ["--redis-url", redis_url, "--port", "0", "--exit-with-parent"]
    command += ["--log-format", "json", "--kv-cache-memory", "16M", "--num-threads", "1"]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(log), *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    request.addfinalizer(lambda: end(parent.pid, child))
    wait_until(lambda: "ready: " in log.read_text(), "the child is ready")
    with Client(redis_url) as client:
        client.submit([1], job_id="long", queue="tiny", max_tokens=4000, ignore_eos=True)
        wait_until(lambda: client.status("long") is JobState.RUNNING, "it works")
        parent.kill()
        parent.wait()
        wait_until(lambda: not Path(f"/proc/{child}").exists(), "the child has ended", 15.0)
        assert client.redis.lrange("rq:queue:tiny", 0, -1) == [b"long"], "its job was put back"
    parent.stdout.close()


def test_a_model_that_cannot_be_used_is_said_before_anything_is_claimed(
    start: Start, redis_url: str, model: Path, tmp_path: Path
) -> None:
    """A folder that is not there, a file cut in half, an architecture that is not served."""
    named = {"missing": "exist", "truncated": "model.safetensors", "foreign": "t5"}
    for kind in ("truncated", "foreign"):
        broken = tmp_path / kind / "tiny"
        broken.mkdir(parents=True)
        for file in model.iterdir():
            data = file.read_bytes()
            if kind == "foreign" and file.name == "config.json":
                data = b'{"model_type": "t5"}'
            if kind == "truncated" and file.suffix == ".safetensors":
                data = data[: len(data) // 2]
            (broken / file.name).write_bytes(data)
    with Client(redis_url) as client:
        client.submit("a", job_id="waiting", queue="tiny")
        workers = {kind: start(served=tmp_path / kind / "tiny") for kind in named}
        for kind, worker in workers.items():
            assert worker.exit_status() == 3
            errors = [line["message"] for line in worker.lines() if line["level"] == "error"]
            assert len(errors) == 1, errors
            assert errors[0].startswith("the model cannot be used: ")
            assert named[kind] in errors[0]
            assert "Traceback" not in worker.log.read_text()
        assert client.redis.hget("rq:job:waiting", "fence") is None, "claimed by a broken worker"
        assert client.workers() == []


def test_a_stock_rq_worker_is_told_which_command_to_use(redis_url: str) -> None:
    connection = redis.Redis.from_url(redis_url)
    queue = rq.Queue("stock", connection=connection, serializer="json")
    job = queue.enqueue(codec.FUNCTION, {"prompt": "a"})
    worker = rq.SimpleWorker([queue], connection=connection, serializer="json")
    worker.work(burst=True, logging_level="CRITICAL")
    assert job.get_status(refresh=True) == "failed"
    result = job.latest_result()
    assert result is not None and "headrace worker --model MODEL" in result.exc_string


def test_a_redis_that_is_down_at_the_start_is_said_and_ends_the_worker(start: Start) -> None:
    began = time.monotonic()
    worker = start("--connect-timeout", "0.5", url="redis://127.0.0.1:1/0")
    assert worker.exit_status() == 4
    assert worker.said(r"cannot use Redis at redis://127\.0\.0\.1:1/0: .*refused.*--redis-url")
    assert "Traceback" not in worker.log.read_text()
    assert time.monotonic() - began < 60


def test_a_redis_that_dies_in_the_middle_is_waited_for_and_nothing_is_lost(
    start: Start, tmp_path: Path
) -> None:
    """kill -9 of Redis (its file synced at every write) while twelve jobs run and more wait."""
    server = RedisServer(appendonly="yes", appendfsync="always")
    try:
        worker = start("--max-num-seqs", "8", url=server.url).wait_ready()
        with Client(server.url) as client:
            jobs = client.submit_many(
                [{"prompt": [i + 1], "max_tokens": 150 + i, "ignore_eos": True} for i in range(40)],
                queue="tiny",
            )
            wait_until(
                lambda: worker.value("headrace_jobs_completed_total", '{outcome="succeeded"}') > 4,
                "some are done",
            )
            server.kill()
            wait_until(lambda: not worker.value("headrace_worker_source_available"), "it noticed")
            assert worker.get("/healthz")[0] == 200
            time.sleep(1.0)
            server.start()
            for i, job in enumerate(jobs):
                assert job.result(timeout=120).usage.completion_tokens == 150 + i
            assert worker.value("headrace_worker_source_available") == 1
            assert worker.value("headrace_results_fenced_total") == 0
            worker.signal(signal.SIGTERM)
            assert worker.exit_status() == 0
            assert client.redis.zcard("rq:wip:tiny") == 0
    finally:
        server.stop()


def test_a_worker_says_what_it_serves_and_shows_what_it_does(start: Start, redis_url: str) -> None:
    worker = start("--queue", "first", "--queue", "second", "--served-model-name", "mine")
    wait_until(lambda: worker.said("metrics and health on"), "it listens while it loads")
    assert worker.get("/readyz") == (503, "loading\n")
    assert worker.value("headrace_worker_state", '{state="loading"}') == 1
    worker.wait_ready()
    assert worker.get("/readyz") == (200, "ok\n")
    with Client(redis_url) as client:
        good = client.submit("hello", queue="second", model="mine", max_tokens=8, ignore_eos=True)
        bad = client.submit("hello", queue="first", temperature=-3)
        assert good.result(timeout=30).usage.completion_tokens == 8
        with pytest.raises(JobFailed, match=r"temperature is -3\.0"):
            bad.result(timeout=30)
        (facts,) = client.workers()
        assert (facts.model, facts.state, facts.queues) == ("mine", "ready", ("first", "second"))
        assert float(facts.facts["cold_start_seconds"]) > 0
    shown = worker.get("/metrics")[1]
    assert 'headrace_model_info{dtype="float32"' in shown
    phases = {
        phase: worker.value("headrace_worker_cold_start_seconds", f'{{phase="{phase}"}}')
        for phase in PHASES
    }
    assert all(seconds > 0 for seconds in phases.values()), phases
    parts = ("import", "compile", "load", "quantize", "warm_up")
    assert sum(phases[part] for part in parts) <= phases["total"], "one after another"
    assert phases["connect"] < phases["total"], "beside them"
    assert worker.value("headrace_model_load_seconds") == pytest.approx(
        phases["load"] + phases["quantize"]
    )
    assert worker.said("cold start by phase") and worker.said("first token ")
    assert generated(worker) == 8
    assert worker.value("headrace_job_queue_wait_seconds_count") == 2
    assert worker.value("headrace_jobs_completed_total", '{outcome="failed"}') == 1
    assert worker.value("vllm:generation_tokens_total", '{model_name="mine"}') == 8
    assert get(worker.address + "/nothing")[0] == 404


HANGING = """
import pathlib, sys, time
from headrace.worker import cli, process, start

def load(config, cold_start):
    engine = start.load_engine(config, cold_start)
    step = engine.step
    def hang():
        if pathlib.Path(sys.argv[1]).exists():
            time.sleep(10_000)
        return step()
    engine.step = hang
    return engine

process.WorkerProcess.__init__.__kwdefaults__["load_engine"] = load
cli.worker(sys.argv[2:])
"""


def test_a_hung_step_lets_its_leases_lapse_and_fails_the_health_check(
    start: Start, redis_url: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The threads that renew and answer are alive all the while; only the engine is not."""
    flag = tmp_path / "hang"
    hung = WorkerProcess(
        redis_url,
        model,
        tmp_path / "hung.log",
        *("--hang-timeout", "1", "--lease-seconds", "2"),
        program=["-c", HANGING, str(flag)],
    )
    request.addfinalizer(hung.end)
    hung.wait_ready()
    with Client(redis_url) as client:
        client.submit([1], job_id="long", queue="tiny", max_tokens=3000, ignore_eos=True)
        wait_until(lambda: generated(hung) > 0, "under way")
        flag.touch()
        hung.wait_said("hangs: leases are no longer renewed")
        status, reason = hung.get("/healthz")
        assert (status, reason) == (503, "engine step hangs for more than 1 s\n")
        assert hung.value("headrace_worker_stalled") == 1
        other = start("--lease-seconds", "2").wait_ready()
        assert client.result("long", timeout=120).usage.completion_tokens == 3000
        assert other.value("headrace_leases_expired_total") == 1
        # What a container runtime does with a failed health check: the drain can't wait for it.
        hung.signal(signal.SIGTERM)
        hung.wait_said("SIGTERM: draining")
        hung.signal(signal.SIGTERM)
        assert hung.exit_status() == 0
        assert client.result("long", timeout=1).ok


def test_a_step_that_outlasts_the_drain_costs_no_job_its_progress(
    redis_url: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A step can't be interrupted; the main thread puts back what the engine's has in hand."""
    flag = tmp_path / "hang"
    worker = WorkerProcess(
        redis_url,
        model,
        tmp_path / "worker.log",
        *("--drain-timeout", "1", "--checkpoint-every", "0"),
        program=["-c", HANGING, str(flag)],
    )
    request.addfinalizer(worker.end)
    worker.wait_ready()
    with Client(redis_url) as client:
        client.submit([1], job_id="long", queue="tiny", max_tokens=3000, ignore_eos=True)
        wait_until(lambda: generated(worker) > 20, "under way")
        flag.touch()
        worker.signal(signal.SIGTERM)
        assert worker.exit_status() == 0
        assert worker.said("a step outlasts the drain: putting 1 jobs back from here")
        kept = orjson.loads(client.redis.hget("rq:job:long", "ckpt"))
        assert kept["a"][0]["at"] > 20
        assert client.redis.lrange("rq:queue:tiny", 0, -1) == [b"long"]
        assert client.redis.hmget("rq:job:long", "crashes", "att") == [None, None]
        assert client.workers() == []


def test_sigterm_while_loading_ends_the_worker_with_nothing_claimed(
    start: Start, redis_url: str
) -> None:
    with Client(redis_url) as client:
        client.submit("a", job_id="waiting", queue="tiny")
        worker = start()
        worker.wait_said("metrics and health on")
        wait_until(lambda: bool(client.workers()), "registered while it loads")
        assert client.workers()[0].state == "loading"
        worker.signal(signal.SIGTERM)
        assert worker.exit_status() == 0
        assert worker.said("while loading: nothing was claimed")
        assert client.redis.hget("rq:job:waiting", "fence") is None
        assert client.workers() == []
