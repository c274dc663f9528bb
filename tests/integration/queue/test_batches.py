"""Batches: counts and results without scanning, for any number of readers."""

import pytest
from queue_support import QUEUE, balance, failure, finish_all, new_client, new_source, success
from tcp_proxy import wait_until

from headrace.producer import JobCancelled, JobNotFound
from headrace.worker.source import OutcomeKind


def read_all(client, batch: str, cursor: int = 0, limit: int = 7):
    items = []
    while True:
        part = client.completed(batch, cursor, limit)
        if not part.items:
            return items, cursor
        items += part.items
        cursor = part.cursor


def test_counts_and_state_follow_every_end(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.create_batch("n", {"file": "in.jsonl", "lines": 5})
    client.submit_many([f"p{i}" for i in range(5)], batch="n", max_attempts=1)
    status = client.batch("n")
    assert (status.state, status.total, status.done) == ("running", 5, 0)
    assert status.manifest == {"file": "in.jsonl", "lines": 5}
    a, b, c, d, e = source.claim(5, 1.0)
    client.cancel(e.job_id)
    source.finish(
        [
            success(a),
            failure(b),
            failure(c, OutcomeKind.RETRY),
            failure(d, OutcomeKind.EXPIRED, "expired"),
        ]
    )
    status = client.batch("n")
    assert (status.succeeded, status.failed, status.dead) == (1, 2, 1)
    assert (status.expired, status.cancelled, status.done) == (1, 1, 5)
    assert status.state == "completed"
    with pytest.raises(JobNotFound):
        client.batch("other")
    source.unregister()


def test_results_are_read_in_order_of_completion_by_each_reader_for_itself(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many([f"p{i}" for i in range(30)], batch="n")
    claimed = source.claim(30, 1.0)
    finish_all(source, claimed[20:])
    early, cursor = read_all(client, "n")
    finish_all(source, claimed[:20])
    late, _ = read_all(client, "n", cursor)
    everything, _ = read_all(client, "n")
    assert [job_id for job_id, _ in early + late] == [job_id for job_id, _ in everything]
    assert [job_id for job_id, _ in early] == [j.job_id for j in claimed[20:]]
    assert {job_id for job_id, _ in everything} == {j.id for j in jobs}
    assert all(result.text == "an answer" for _, result in everything)
    source.unregister()


def test_a_trim_by_the_owner_moves_no_cursor(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many([f"p{i}" for i in range(20)], batch="n")
    finish_all(source, source.claim(20, 1.0))
    first = client.completed("n", 0, 8)
    second = client.completed("n", first.cursor, 8, trim=True)
    assert client.redis.llen("rq:x:batch:n:done") == 12
    third = client.completed("n", second.cursor, 8)
    assert third.cursor == 20
    ids = [job_id for part in (first, second, third) for job_id, _ in part.items]
    assert len(set(ids)) == 20
    assert client.completed("n", 0, 8).cursor == 16
    source.unregister()


def test_a_result_that_was_forgotten_is_read_as_gone(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many(["a", "b"], batch="n")
    finish_all(source, source.claim(2, 1.0))
    client.forget([jobs[0].id])
    found = dict(client.completed("n").items)
    assert found[jobs[0].id] is None
    assert found[jobs[1].id].ok
    source.unregister()


def test_cancelling_a_batch_ends_what_waits_what_runs_and_what_comes(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many([f"p{i}" for i in range(600)], batch="n")
    client.submit_many(["later"] * 300, batch="n", start_at=2e9)
    client.submit_many(["high"] * 10, batch="n", priority="high", tenant="t")
    others = client.submit_many([f"o{i}" for i in range(10)])
    running = source.claim(20, 1.0)
    finish_all(source, running[:5])
    status = client.cancel_batch("n")
    assert (status.state, status.total, status.succeeded) == ("cancelled", 910, 5)
    assert status.cancelled == 905
    # Some were told on the command channel already; the rest the heartbeat finds.
    told = set()
    wait_until(lambda: told.update(source.heartbeat()) or source.held == [])
    assert told == set(running[5:])
    with pytest.raises(JobCancelled):
        client.result(jobs[-1].id, 1)
    with pytest.raises(JobCancelled, match="cancelled"):
        client.submit("too late", batch="n")
    assert balance(client) == 0
    assert sorted(j.job_id for j in source.claim(64, 1.0)) == sorted(j.id for j in others)
    assert int(client.redis.hget("rq:x:ghost", QUEUE) or 0) == 0
    source.unregister()


def test_what_a_cancel_missed_ends_when_it_is_met(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many(["a", "b"], batch="n")
    client.redis.hset("rq:x:batch:n", "cancel", "1")
    assert source.claim(2, 0.05) == []
    assert client.batch("n").state == "cancelled"
    assert balance(client) == 0
    source.unregister()
