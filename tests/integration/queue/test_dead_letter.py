"""`headrace dead`: what operators see of jobs that were given up, and what they can do."""

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result
from queue_support import QUEUE, balance, crash, failure, finish_all, new_client, new_source

from headrace.producer import cli
from headrace.worker.source import OutcomeKind

Run = Callable[..., Result]


@pytest.fixture
def run(redis_url: str) -> Run:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.main, ["dead", *arguments, "--redis-url", redis_url])

    return invoke


def test_a_dead_job_is_listed_shown_with_its_history_requeued_and_dropped(
    redis_url: str, run: Run
) -> None:
    client = new_client(redis_url)
    assert run("list").output == "no dead jobs\n"
    client.submit("x", job_id="killer")
    client.submit("y", job_id="tired", max_attempts=1)
    for _ in range(3):
        source = new_source(redis_url, max_crashes=3)
        while [job.job_id for job in source.held] != ["killer"]:
            for job in source.claim(8, 0.0):
                if job.job_id == "tired":
                    source.finish([failure(job, OutcomeKind.RETRY, "out_of_luck")])
        crash(source)
        source.reap()
        source.unregister()
    listed = run("list").output
    assert "killer  tiny" in listed
    assert "3 crashes, 0 attempts  worker_lost: " in listed
    assert "tired  tiny" in listed
    assert "0 crashes, 1 attempts  out_of_luck: it broke" in listed
    assert {job["job"] for job in json.loads(run("list", "--json").output)} == {"killer", "tired"}

    shown = run("show", "killer").output
    assert shown.startswith("killer in tiny: 3 crashes, 0 attempts\n")
    assert shown.count("event=worker lost") == 3
    history = json.loads(run("show", "killer", "--json").output)["history"]
    assert [event["fence"] for event in history] == [1, 2, 3]
    assert len({event["worker"] for event in history}) == 3
    assert "event=attempt failed" in run("show", "tired").output

    requeued = run("requeue", "killer", "nobody")
    assert requeued.output == "killer: requeued\nnobody: no failed job of that id\n"
    assert requeued.exit_code == 1
    source = new_source(redis_url)
    (job,) = source.claim(8, 1.0)
    assert (job.job_id, job.crashes) == ("killer", 0)
    finish_all(source, [job])
    assert client.result("killer", 1).ok
    assert run("drop", "tired").output == "tired: dropped\n"
    assert run("list").output == "no dead jobs\n"
    assert client.redis.keys("*tired*") == []
    assert balance(client, QUEUE) == 0
    source.unregister()
