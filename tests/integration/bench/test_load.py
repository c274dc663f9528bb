"""`headrace bench --load` against a real worker on a real Redis."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.producer import Client
from headrace.worker.bench import load_report
from headrace.worker.bench.__main__ import main
from headrace.worker.bench.load import LoadDriver, LoadPlan, LoadRun
from headrace.worker.bench.service import Service, private_service


def bench(*arguments: str) -> Result:
    """In this process: its imports are the costly part."""
    return CliRunner().invoke(main, ["--load", *arguments])


@pytest.fixture(scope="module")
def service(model: Path) -> Any:
    with private_service(
        str(model), dtype="float32", threads=1, arguments=("--kv-cache-memory", "16M")
    ) as ready:
        yield ready


def offer(service: Service, plan: LoadPlan, name: str, tokens: int = 6) -> LoadRun:
    requests = [
        {"prompt": f"request {i}", "max_tokens": tokens, "ignore_eos": True} for i in range(64)
    ]
    return LoadDriver(
        service.client, requests, plan, queue=service.queue, batch=name, tick=service.watch
    ).run()


def test_a_closed_loop_keeps_so_many_under_way(service: Service) -> None:
    """20 requests, 3 at a time: at no moment are more than 3 between due and ended, and somewhere
    3 are. Little's law over the whole run: mean under way = rate times mean total."""
    run = offer(service, LoadPlan(concurrency=3, requests=20), "closed")
    assert [s.failure for s in run.samples] == [""] * 20
    assert all(s.output_tokens == 6 and s.prompt_tokens > 0 for s in run.samples)
    events = sorted(
        [(s.due, 1) for s in run.samples] + [(s.ended or 0.0, -1) for s in run.samples],
        key=lambda event: (event[0], event[1]),
    )
    level, peak = 0, 0
    for _, change in events:
        level += change
        peak = max(peak, level)
    assert peak == 3
    summary = load_report.summarize(run)
    mean = summary["latency"]["total"]["mean"]
    assert 1.0 < summary["requests_per_s"] * mean <= 3.0
    for sample in run.samples:
        assert 0 <= sample.queue_wait <= sample.time_to_first_token <= sample.total + 0.002


def test_an_open_loop_sends_when_due_whatever_the_service_does(service: Service) -> None:
    """Arrivals are those of the seed, and none waits for an answer before it is sent."""
    plan = LoadPlan(rate=200.0, requests=30, seed=4)
    run = offer(service, plan, "open", tokens=20)
    assert [s.due for s in run.samples] == list(plan.arrivals())
    assert run.backlog > 0, "30 requests in 0.15 s: some are still under way at the last arrival"
    assert all(s.sent >= s.due for s in run.samples)
    assert not any(s.failure for s in run.samples)


def test_what_is_not_answered_in_time_is_cancelled_and_counted(redis_url: str) -> None:
    """No worker: every request is unfinished, none counts as fast, none stays in Redis."""
    with Client(redis_url) as client:
        driver = LoadDriver(
            client,
            [{"prompt": "x", "max_tokens": 1}],
            LoadPlan(concurrency=2, requests=2, drain=0.2),
            queue="nobody",
            batch="lost",
        )
        run = driver.run()
        assert [s.failure for s in run.samples] == ["unfinished", "unfinished"]
        summary = load_report.summarize(run, p99=1e9)
        assert summary["passed"] is False
        assert summary["failures"] == {"unfinished": 2}
        assert client.results(["lost-0", "lost-1"]) == {}


def test_refused_requests_are_failures_of_the_load(redis_url: str) -> None:
    """Admission control at depth 3 takes three of five; the other two are no answers."""
    with Client(redis_url, max_queue_depth=3) as client:
        run = LoadDriver(
            client,
            [{"prompt": "x", "max_tokens": 1}],
            LoadPlan(concurrency=5, requests=5, drain=0.1),
            queue="full",
            batch="refused",
        ).run()
    assert sorted(s.failure for s in run.samples) == ["queue_full"] * 2 + ["unfinished"] * 3


def test_the_command_judges_the_p99_and_compares_runs(
    service: Service, prompts: Path, tmp_path: Path
) -> None:
    """The same running service twice: once within a limit that always holds, once within one that
    no computer meets. Both leave Redis as they found it."""
    url = service.client.redis.connection_pool.connection_kwargs["path"]
    base = ["--redis-url", f"unix://{url}?db=0", "--prompts", str(prompts)]
    base += ["--out", str(tmp_path), "--requests", "12", "--concurrency", "4"]
    before = set(service.client.redis.keys())
    good = bench(*base, "--p99", "600")
    assert good.exit_code == 0, good.output
    assert "PASS" in good.stdout
    first = json.loads((tmp_path / "load.json").read_text())
    assert first["answered"] == 12
    assert first["goodput"]["share"] == 1.0
    assert (tmp_path / "load.png").stat().st_size > 1000
    (tmp_path / "load.json").rename(tmp_path / "first.json")
    bad = bench(*base, "--p99", "0.000001", "--against", str(tmp_path / "first.json"))
    assert bad.exit_code == 1, bad.output
    assert "FAIL" in bad.stdout
    assert "95 % interval" in bad.stdout
    assert json.loads((tmp_path / "load.json").read_text())["goodput"]["share"] == 0.0
    left = set(service.client.redis.keys()) - before
    assert all(service.client.redis.ttl(key) > 0 for key in left), left
    assert not any(b"rq:job" in key for key in left), left


def test_a_service_without_workers_is_said_so(redis_url: str, tmp_path: Path) -> None:
    done = bench("--redis-url", redis_url, "--out", str(tmp_path))
    assert done.exit_code == 1
    assert "no live worker" in done.output
