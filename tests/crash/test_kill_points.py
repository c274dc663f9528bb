"""kill -9 of a worker at each named point: one terminal result for each job, none lost.

A victim dies at a point of `worker.kill_points`, or half-way through sending a script. Redis is
looked at as the victim left it, then another worker takes over, and every answer must be that of a
run that nothing interrupted.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_support import audit, counters, progress_in_redis, wait_results
from redis_support import RedisServer
from serving import answer, wait_until
from tcp_proxy import TcpProxy

from headrace.engine.engine import Engine
from headrace.producer import Client, scripts
from headrace.worker.kill_points import POINTS

WORKER = ("--lease-seconds", "2", "--checkpoint-every", "16", "--max-num-seqs", "16")
DRAINING = {"drain_begun", "before_release", "after_release"}
LATER = {"mid_generation": 30, "after_checkpoint": 3}

JOBS: dict[str, dict[str, Any]] = {
    **{
        f"short-{i}": {"prompt": [65 + i] * 3, "max_tokens": 12 + i, "temperature": 0}
        for i in range(6)
    },
    **{f"long-{i}": {"prompt": [97 + i] * 5, "max_tokens": 400, "seed": i} for i in range(4)},
    "two-0": {"prompt": [3] * 20, "max_tokens": 240, "n": 2, "seed": 5},
    "two-1": {"prompt": [4] * 20, "max_tokens": 240, "n": 2, "temperature": 0},
}


def queue_names(count: int) -> list[str]:
    return ["tiny"] if count == 1 else [f"queue-{i}" for i in range(count)]


def submit_all(client: Client, queues: list[str]) -> None:
    for number, (name, fields) in enumerate(JOBS.items()):
        queue = queues[number % len(queues)]
        client.submit(job_id=name, queue=queue, batch="all", ignore_eos=True, **fields)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> dict[str, list[list[int]]]:
    whole = {}
    for name, fields in JOBS.items():
        parts = answer(engine, {**fields, "ignore_eos": True}, name)
        whole[name] = [part.output_token_ids for part in parts]
    return whole


def take_over(
    start: Callable[..., Any],
    client: Client,
    queues: list[str],
    expected: dict[str, list[list[int]]],
) -> None:
    """The victim is dead. Another worker must end everything, from where it had come."""
    leased = sum(client.redis.zcard(f"rq:x:lease:{queue}") for queue in queues)
    kept = {name: progress_in_redis(client, name) for name in JOBS}
    ended = set(client.results(list(JOBS)))
    heir = start(*WORKER, *(x for queue in queues for x in ("--queue", queue)))
    results = wait_results(client, list(JOBS))
    for name, tokens in expected.items():
        result = results[name]
        assert [choice.token_ids for choice in result.choices] == tokens, name
        assert result.usage.completion_tokens == sum(map(len, tokens)), "counted once"
        if name not in ended:
            assert result.usage.resumed_from_tokens == kept[name], "the checkpoint is honoured"
    status = client.batch("all")
    assert (status.succeeded, status.total) == (len(JOBS), len(JOBS))
    listed = [job_id for job_id, _ in client.completed("all", limit=1000).items]
    assert sorted(listed) == sorted(JOBS)
    heir.signal(signal.SIGTERM)
    assert heir.exit_status() == 0, heir.log.read_text()
    assert audit(client, queues, list(JOBS)) == []
    counted = counters(client, queues)
    assert counted["lapsed"] == leased, "each lease that was left was taken back once"
    assert counted["fenced"] == counted["dead"] == 0


@pytest.mark.parametrize("count", [1, 3], ids=["one-queue", "three-queues"])
@pytest.mark.parametrize("point", POINTS)
def test_worker_killed_at_a_named_point_each_job_ends_once(
    point: str, count: int, start: Any, redis_url: str, expected: Any
) -> None:
    queues = queue_names(count)
    served = [x for queue in queues for x in ("--queue", queue)]
    where = f"{point}:{LATER.get(point, 1)}"
    with Client(redis_url) as client:
        submit_all(client, queues)
        grace = ("--drain-timeout", "0.5") if point in DRAINING else ()
        victim = start(*WORKER, *grace, *served, HEADRACE_TEST_KILL_AT=where)
        if point in DRAINING:
            wait_until(lambda: len(client.results(list(JOBS))) > 1, "it is under way")
            victim.signal(signal.SIGTERM)
        victim.wait_killed()
        leased = sum(client.redis.zcard(f"rq:x:lease:{queue}") for queue in queues)
        ended = len(client.results(list(JOBS)))
        assert (leased > 0) is (point != "after_release"), "killed where it was meant to be"
        if point in ("after_claim", "after_start", "before_finish"):
            assert ended == 0
        if point == "after_finish":
            assert 0 < ended < len(JOBS)
            assert leased <= len(JOBS) - ended
        if point in ("after_checkpoint", *DRAINING):
            assert any(progress_in_redis(client, name) for name in JOBS)
        take_over(start, client, queues, expected)


@pytest.mark.parametrize("script", ["claim", "finish", "checkpoint", "release"])
def test_worker_killed_while_it_sends_a_script_nothing_of_it_is_applied(
    script: str,
    start: Any,
    redis_server: RedisServer,
    redis_url: str,
    expected: Any,
    small_model: Path,
) -> None:
    """Half of the request reaches Redis, then the worker is gone."""
    text = scripts.load("headrace.worker", script)
    proxy = TcpProxy(redis_server.port)
    try:
        with Client(redis_url) as client:
            client.redis.script_load(text.text)
            submit_all(client, ["tiny"])
            victim = start(*WORKER, "--drain-timeout", "0.5", url=proxy.url)
            proxy.halve(text.sha.encode(), victim.kill)
            if script == "release":
                wait_until(lambda: len(client.results(list(JOBS))) > 1, "it is under way")
                victim.signal(signal.SIGTERM)
            assert victim.exit_status() == -9
            assert proxy.halved
            applied = {
                "claim": client.redis.llen("rq:queue:tiny") < len(JOBS),
                "finish": bool(client.results(list(JOBS))),
                "checkpoint": any(progress_in_redis(client, name) for name in JOBS),
                "release": client.redis.llen("rq:queue:tiny") > 0,
            }
            assert not applied[script]
            take_over(start, client, ["tiny"], expected)
    finally:
        proxy.close()
