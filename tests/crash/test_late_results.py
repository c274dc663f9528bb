"""A worker that comes back after its lease: its late result is refused and counted, and no token
of it is in the answer.

The two workers of each test have other weights under one name, so that whose tokens they are can be
seen.
"""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import serving
from crash_support import audit, counters, progress_in_redis, wait_results
from queue_support import QUEUE, crash, new_client, new_source, success
from redis_support import RedisServer
from serving import answer, wait_until

from headrace.engine.engine import Engine
from headrace.producer import Client
from headrace.worker.source import FinishCode

WORKER = ("--lease-seconds", "3", "--checkpoint-every", "16", "--max-num-seqs", "16")
JOBS: dict[str, dict[str, Any]] = {
    f"job-{i}": {"prompt": [65 + i] * 4, "max_tokens": 150, "seed": i, "ignore_eos": True}
    for i in range(8)
}


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("other"), seed=7)


@pytest.fixture(scope="module")
def other_engine(other_model: Path) -> Engine:
    return serving.load(other_model, max_num_seqs=16)


def assert_all_from(engine: Engine, client: Client) -> None:
    results = wait_results(client, list(JOBS))
    for name, fields in JOBS.items():
        (whole,) = answer(engine, fields, name)
        assert results[name].choices[0].token_ids == whole.output_token_ids, name
        assert results[name].usage.resumed_from_tokens == 0, "another fingerprint starts over"


def test_stopped_with_the_answer_in_hand_its_late_result_is_refused_and_counted(
    start: Any, redis_url: str, other_model: Path, other_engine: Engine
) -> None:
    with Client(redis_url, queue="tiny") as client:
        for name, fields in JOBS.items():
            client.submit(job_id=name, batch="all", **fields)
        zombie = start(
            *WORKER,
            HEADRACE_TEST_KILL_AT="before_finish",
            HEADRACE_TEST_KILL_SIGNAL="STOP",
        )
        wait_until(lambda: stopped(zombie.process.pid), "it has stopped itself")
        assert client.redis.zcard("rq:x:lease:tiny") == len(JOBS), "nothing was sent"
        heir = start(*WORKER, model=other_model)
        assert_all_from(other_engine, client)
        zombie.signal(signal.SIGCONT)
        late = len(JOBS)
        wait_until(
            lambda: (
                zombie.value("headrace_results_fenced_total")
                + zombie.value("headrace_jobs_lost_total")
                >= late
            ),
            "every late result is refused or given up",
        )
        fenced = zombie.value("headrace_results_fenced_total")
        assert fenced >= 1, "what it held was sent, and refused"
        assert zombie.value("headrace_jobs_completed_total", '{outcome="succeeded"}') == 0
        assert counters(client, ["tiny"])["fenced"] == fenced
        assert_all_from(other_engine, client)
        assert client.batch("all").succeeded == len(JOBS)
        for worker in (zombie, heir):
            worker.signal(signal.SIGTERM)
            assert worker.exit_status() == 0
        assert audit(client, ["tiny"], list(JOBS)) == []


def test_stopped_in_the_middle_past_its_lease_its_tokens_and_checkpoints_never_mix(
    start: Any, redis_url: str, other_model: Path, other_engine: Engine
) -> None:
    with Client(redis_url, queue="tiny") as client:
        for name, fields in JOBS.items():
            client.submit(job_id=name, batch="all", **fields)
        zombie = start(
            *WORKER,
            HEADRACE_TEST_KILL_AT="mid_generation:60",
            HEADRACE_TEST_KILL_SIGNAL="STOP",
        )
        wait_until(lambda: stopped(zombie.process.pid), "it has stopped itself")
        assert any(progress_in_redis(client, name) for name in JOBS)
        heir = start(*WORKER, model=other_model).wait_ready()
        wait_until(
            lambda: heir.value("headrace_checkpoints_refused_total") > 0,
            "the heir has begun, and not with the zombie's tokens",
        )
        # While the heir works: the zombie's checkpoints and answers come late now.
        zombie.signal(signal.SIGCONT)
        assert_all_from(other_engine, client)
        wait_until(
            lambda: (
                zombie.value("headrace_results_fenced_total")
                + zombie.value("headrace_jobs_lost_total")
                >= len(JOBS)
            ),
            "the zombie knows",
        )
        for worker in (zombie, heir):
            worker.signal(signal.SIGTERM)
            assert worker.exit_status() == 0
        assert audit(client, ["tiny"], list(JOBS)) == []


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_one_outcome_given_twice_in_a_group_counts_once(redis_url: str) -> None:
    """Both answers of an n=2 job can end in one step; its result must still be one."""
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit("x", job_id="twice", batch="b")
    (job,) = source.claim(1, 1.0)
    codes = source.finish([success(job, "first"), success(job, "second")])
    assert codes == [FinishCode.COMMITTED, FinishCode.OURS_EARLIER]
    assert client.result("twice", 1).text == "first"
    status = client.batch("b")
    assert (status.succeeded, status.cancelled, status.done) == (1, 0, 1)
    assert audit(client, [QUEUE], ["twice"]) == []
    source.unregister()


def test_late_progress_is_not_stored(redis_url: str) -> None:
    client, zombie, heir = new_client(redis_url), new_source(redis_url), new_source(redis_url)
    client.submit("x", job_id="a")
    (late,) = zombie.claim(1, 1.0)
    crash(zombie)
    heir.reap()
    (job,) = heir.claim(1, 1.0)
    heir.checkpoint([(job, b"the heir's")])
    zombie.checkpoint([(late, b"the zombie's")])
    assert client.redis.hget("rq:job:a", "ckpt") == b"the heir's"
    for source in (zombie, heir):
        source.unregister()


def test_redis_away_for_longer_than_the_lease_costs_no_job_a_crash(
    start: Any, tmp_path: Path, engine: Engine
) -> None:
    """Three outages, each twice the lease, with three workers: whoever is back first must not take
    the others' jobs for lost, or three slow restarts of Redis would make good jobs dead."""
    server = RedisServer(appendonly="yes", appendfsync="always")
    try:
        with Client(server.url, queue="tiny", retry_for=60.0) as client:
            jobs = {
                f"job-{i}": {"prompt": [i + 1], "max_tokens": 1500, "seed": i, "ignore_eos": True}
                for i in range(12)
            }
            workers = [
                start(*WORKER[:4], "--max-num-seqs", "4", "--look-ahead", "0", url=server.url)
                for _ in range(3)
            ]
            for worker in workers:
                worker.wait_ready()
            for name, fields in jobs.items():
                client.submit(job_id=name, **fields)
            wait_until(lambda: client.redis.zcard("rq:x:lease:tiny") == len(jobs), "all run")
            for _ in range(3):
                server.kill()
                time.sleep(4.0)
                server.start()
                time.sleep(2.5)
            results = wait_results(client, list(jobs))
            assert {r.usage.completion_tokens for r in results.values()} == {1500}
            counted = counters(client, ["tiny"])
            assert counted["lapsed"] == counted["fenced"] == 0
            assert audit(client, ["tiny"], list(jobs)) == []
    finally:
        server.stop()
