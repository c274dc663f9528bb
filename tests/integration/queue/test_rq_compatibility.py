"""Our jobs are RQ's jobs: everything that stock RQ offers works beside us, on the real package."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
import rq
from queue_support import QUEUE, balance, failure, finish_all, new_client, new_source, success
from rq.command import send_stop_execution_command, send_stop_job_command
from rq.job import Job, JobStatus
from rq.registry import clean_registries
from rq.scheduler import RQScheduler
from tcp_proxy import wait_until

from headrace.producer import JobCancelled, codec
from headrace.worker.source import FinishCode, OutcomeKind, Released


@pytest.fixture
def connection(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url)


def stock_queue(connection: redis.Redis, name: str = QUEUE) -> rq.Queue:
    return rq.Queue(name, connection=connection, serializer="json")


def rq_info(url: str) -> str:
    command = [str(Path(sys.executable).with_name("rq")), "info", "--url", url]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    return run.stdout


def test_rq_info_shows_right_counts(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many([f"p{i}" for i in range(10)])
    running = source.claim(6, 1.0)
    source.finish([success(running[0]), success(running[1]), failure(running[2])])
    shown = rq_info(redis_url)
    assert QUEUE in shown
    assert "4, 3 executing, 2 finished, 1 failed" in shown
    assert f"busy {QUEUE}. jobs: 2 finished, 1 failed" in shown
    finish_all(source, running[3:])
    finish_all(source, source.claim(4, 1.0))
    shown = rq_info(redis_url)
    assert "0, 0 executing, 9 finished, 1 failed" in shown
    assert f"idle {QUEUE}. jobs: 9 finished, 1 failed" in shown
    source.unregister()
    assert "0 workers" in rq_info(redis_url)
    assert balance(client) == 0


def test_a_job_of_ours_is_fetched_by_rq_with_all_it_shows(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("hello", max_tokens=4)
    job = Job.fetch(sent.id, connection=connection, serializer="json")
    assert job.func_name == codec.FUNCTION
    assert job.args == [{"prompt": "hello", "max_tokens": 4}]
    assert job.get_status() is JobStatus.QUEUED
    assert abs(job.enqueued_at.timestamp() - time.time()) < 60
    assert "hello" not in job.description
    assert sent.id in stock_queue(connection).job_ids
    (claimed,) = source.claim(1, 1.0)
    job.refresh()
    assert job.get_status() is JobStatus.STARTED
    assert job.worker_name == source.name
    (execution,) = job.get_executions()
    assert execution.worker_name == source.name
    assert stock_queue(connection).started_job_registry.get_job_ids() == [sent.id]
    finish_all(source, [claimed])
    job.refresh()
    latest = job.latest_result()
    assert latest.type is latest.Type.SUCCESSFUL
    assert latest.return_value["choices"][0]["text"] == "an answer"
    assert latest.execution_id == claimed.execution_id
    assert job.get_status() is JobStatus.FINISHED
    assert stock_queue(connection).finished_job_registry.get_job_ids() == [sent.id]
    assert job.ended_at >= job.started_at
    assert job.get_executions() == []
    source.unregister()


def test_a_failure_is_in_rqs_failed_registry_with_its_text(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("x")
    source.finish([failure(one, code="prompt_too_long") for one in source.claim(1, 1.0)])
    job = Job.fetch(sent.id, connection=connection, serializer="json")
    assert job.is_failed
    assert "prompt_too_long: it broke" in job.latest_result().exc_string
    assert stock_queue(connection).failed_job_registry.get_job_ids() == [sent.id]
    source.unregister()


def test_a_stock_enqueue_of_our_functions_name_is_served(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    job = stock_queue(connection).enqueue(codec.FUNCTION, {"prompt": "from stock"})
    (claimed,) = source.claim(1, 1.0)
    assert claimed.payload == b'{"prompt":"from stock"}'
    finish_all(source, [claimed])
    assert job.latest_result().return_value["choices"][0]["text"] == "an answer"
    assert client.result(job.id).text == "an answer"
    assert balance(client) == 0
    source.unregister()


def test_a_job_enqueued_by_plain_redis_commands_is_served(redis_url, connection) -> None:
    """The wire format that any language can write."""
    import json
    import zlib

    data = zlib.compress(json.dumps([codec.FUNCTION, None, [{"prompt": "raw"}], {}]).encode())
    connection.hset("rq:job:raw1", mapping={"status": "queued", "origin": QUEUE, "data": data})
    connection.sadd("rq:queues", f"rq:queue:{QUEUE}")
    connection.rpush(f"rq:queue:{QUEUE}", "raw1")
    source = new_source(redis_url)
    assert [codec.parse_request(json.loads(j.payload)).prompt for j in source.claim(1, 1.0)] == [
        "raw"
    ]
    source.unregister()


def test_our_function_refuses_to_run_under_a_stock_worker(redis_url, connection) -> None:
    client = new_client(redis_url)
    sent = client.submit("x")
    worker = rq.SimpleWorker([QUEUE], connection=connection, serializer="json")
    worker.work(burst=True, logging_level="CRITICAL")
    job = Job.fetch(sent.id, connection=connection, serializer="json")
    assert job.is_failed
    assert "headrace worker" in job.latest_result().exc_string


def test_a_stock_retry_is_honoured(redis_url, connection) -> None:
    source = new_source(redis_url)
    job = stock_queue(connection).enqueue(
        codec.FUNCTION, {"prompt": "x"}, retry=rq.Retry(max=2, interval=[0, 100])
    )
    for expected in (FinishCode.RETRIED, FinishCode.RETRIED):
        (claimed,) = source.claim(1, 1.0) or [None]
        assert source.finish([failure(claimed, OutcomeKind.RETRY)]) == [expected]
        if job.get_status() is JobStatus.SCHEDULED:
            break
    assert job.get_status() is JobStatus.SCHEDULED
    due = connection.zscore(f"rq:scheduled:{QUEUE}", job.id)
    assert due == pytest.approx(time.time() + 100, abs=5)
    connection.zadd(f"rq:scheduled:{QUEUE}", {job.id: 0})
    (claimed,) = source.claim(1, 1.0)
    assert source.finish([failure(claimed, OutcomeKind.RETRY)]) == [FinishCode.DEAD]
    assert job.get_status() is JobStatus.FAILED
    source.unregister()


def test_a_stock_requeue_of_a_failed_job_runs_it_again_without_old_charges(
    redis_url, connection
) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("x", max_attempts=1)
    source.finish([failure(j, OutcomeKind.RETRY) for j in source.claim(1, 1.0)])
    connection.hset(f"rq:job:{sent.id}", "crashes", 2)
    Job.fetch(sent.id, connection=connection, serializer="json").requeue()
    (claimed,) = source.claim(1, 1.0)
    assert claimed.crashes == 0
    assert connection.ttl(f"rq:job:{sent.id}") == -1
    finish_all(source, [claimed])
    assert client.result(sent.id).text == "an answer"
    source.unregister()


def test_stock_cancel_of_a_queued_job(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("x")
    Job.fetch(sent.id, connection=connection, serializer="json").cancel()
    assert source.claim(1, 0.05) == []
    with pytest.raises(JobCancelled):
        sent.result(timeout=1)
    assert balance(client) == 0
    source.unregister()


def test_stock_cancel_of_a_running_job_is_seen_by_the_heartbeat(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("x", batch="b")
    (claimed,) = source.claim(1, 1.0)
    Job.fetch(sent.id, connection=connection, serializer="json").cancel()
    assert source.heartbeat() == [claimed]
    assert source.finish([success(claimed)]) == [FinishCode.GONE]
    assert sent.status().value == "cancelled"
    assert client.batch("b").cancelled == 1
    assert connection.keys("rq:execution*") == []
    assert connection.zcard(f"rq:x:lease:{QUEUE}") == 0
    assert balance(client) == 0
    source.unregister()


def test_stock_delete_of_a_running_job_leaves_nothing_and_no_result_comes_back(
    redis_url, connection
) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("x")
    (claimed,) = source.claim(1, 1.0)
    Job.fetch(sent.id, connection=connection, serializer="json").delete()
    assert source.finish([success(claimed)]) == [FinishCode.GONE]
    assert connection.exists(f"rq:job:{sent.id}", f"rq:results:{sent.id}") == 0
    assert connection.zcard(f"rq:x:lease:{QUEUE}") == 0
    assert balance(client) == 0
    source.unregister()


@pytest.mark.parametrize("by", ["job", "execution"])
def test_rqs_stop_commands_stop_the_named_job_among_many(redis_url, connection, by) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many([f"p{i}" for i in range(20)])
    claimed = source.claim(20, 1.0)
    lost = []
    source.on_lost = lost.extend
    target = claimed[13]
    if by == "job":
        send_stop_job_command(connection, target.job_id, serializer="json")
    else:
        send_stop_execution_command(connection, target.job_id, target.execution_id)
    wait_until(lambda: lost)
    assert lost == [target]
    job = Job.fetch(target.job_id, connection=connection, serializer="json")
    assert job.is_stopped
    assert target.job_id in stock_queue(connection).failed_job_registry
    others = [j for j in claimed if j is not target]
    assert set(finish_all(source, others)) == {FinishCode.COMMITTED}
    assert len(jobs) == 20
    assert balance(client) == 0
    source.unregister()


def test_nonsense_on_the_command_channel_does_not_end_the_listening(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit("x")
    (claimed,) = source.claim(1, 1.0)
    lost = []
    source.on_lost = lost.extend
    for message in (b"", b"{", b"[1]", b'{"command":5}', b'{"command":"stop-job"}', b"\xff"):
        connection.publish(f"rq:pubsub:{source.name}", message)
    send_stop_job_command(connection, claimed.job_id, serializer="json")
    wait_until(lambda: lost)
    source.unregister()


def test_rqs_cleanups_and_scheduler_never_touch_a_running_job(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many([f"p{i}" for i in range(5)])
    claimed = source.claim(5, 1.0)
    for _ in range(3):
        clean_registries(stock_queue(connection))
        rq_info(redis_url)
    assert source.heartbeat() == []
    assert set(finish_all(source, claimed)) == {FinishCode.COMMITTED}
    assert balance(client) == 0
    source.unregister()


def test_a_stale_whole_hash_save_over_a_running_job_makes_no_second_result(
    redis_url, connection
) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("x")
    stale = Job.fetch(sent.id, connection=connection, serializer="json")
    (claimed,) = source.claim(1, 1.0)
    stale.save()
    connection.rpush(f"rq:queue:{QUEUE}", sent.id)
    assert new_source(redis_url, start=False).claim(1, 0.05) == []
    assert finish_all(source, [claimed]) == [FinishCode.COMMITTED]
    assert connection.xlen(f"rq:results:{sent.id}") == 1
    source.unregister()


def test_a_scheduled_job_is_promoted_once_by_us_or_by_rqs_scheduler(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many([f"p{i}" for i in range(20)], start_at=time.time() + 0.3)
    time.sleep(1.1)
    scheduler = RQScheduler([QUEUE], connection=connection, serializer="json")
    scheduler.acquire_locks()
    first = source.claim(10, 1.0)
    scheduler.enqueue_scheduled_jobs()
    rest = source.claim(20, 0.2)
    claimed = [*first, *rest]
    assert sorted(j.job_id for j in claimed) == sorted(j.id for j in jobs)
    finish_all(source, claimed)
    assert balance(client) == 0
    source.unregister()


def test_rate_limited_jobs_hold_their_slot_until_they_end(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    queue = stock_queue(connection)
    limit = rq.RateLimit("api", 2)
    jobs = [queue.enqueue(codec.FUNCTION, {"prompt": str(i)}, rate_limit=limit) for i in range(5)]
    seen = []
    while len(seen) < 5:
        claimed = source.claim(5, 1.0)
        assert 1 <= len(claimed) <= 2
        assert connection.zcard("rq:rl:api:allowed") <= 2
        seen += [j.job_id for j in claimed]
        source.release([Released(claimed[0])])
        (again,) = source.claim(1, 1.0)
        finish_all(source, [again, *claimed[1:]])
    assert sorted(seen) == sorted(j.id for j in jobs)
    assert connection.zcard("rq:rl:api:allowed") == 0
    assert balance(client) == 0
    source.unregister()


def test_a_rate_limited_job_that_is_deleted_while_it_runs_frees_its_slot(
    redis_url, connection
) -> None:
    source = new_source(redis_url)
    queue, limit = stock_queue(connection), rq.RateLimit("api", 1)
    first = queue.enqueue(codec.FUNCTION, {"prompt": "1"}, rate_limit=limit)
    second = queue.enqueue(codec.FUNCTION, {"prompt": "2"}, rate_limit=limit)
    (claimed,) = source.claim(2, 1.0)
    first.delete()
    source.finish([success(claimed)])
    assert [j.job_id for j in source.claim(2, 1.0)] == [second.id]
    source.unregister()


def test_dependents_follow_through_the_outbox(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    queue = stock_queue(connection)
    parent = queue.enqueue(codec.FUNCTION, {"prompt": "parent"})
    child = queue.enqueue(codec.FUNCTION, {"prompt": "child"}, depends_on=parent)
    assert child.get_status() is JobStatus.DEFERRED
    (claimed,) = source.claim(2, 1.0)
    finish_all(source, [claimed])
    assert connection.lrange("rq:x:outbox", 0, -1) == [parent.id.encode()]
    source.reap()
    assert connection.llen("rq:x:outbox") == 0
    assert [j.job_id for j in source.claim(2, 1.0)] == [child.id]
    assert client.status(child.id).value == "running"
    source.unregister()


def test_callbacks_and_webhooks_that_a_job_names_are_never_run(
    redis_url, connection, tmp_path
) -> None:
    """Importable names and URLs in Redis are code execution for whoever can write there."""
    source = new_source(redis_url)
    mark = tmp_path / "ran"
    job = stock_queue(connection).enqueue(
        codec.FUNCTION,
        {"prompt": "x"},
        on_success=rq.Callback("os.mkdir"),
        on_failure=rq.Callback(f"pathlib.Path({str(mark)!r}).touch"),
        webhooks=[rq.Webhook("http://127.0.0.1:1/", "finished")],
    )
    finish_all(source, source.claim(1, 1.0))
    source.reap()
    assert job.get_status() is JobStatus.FINISHED
    assert connection.llen("rq:x:outbox") == 0
    assert not mark.exists()
    source.unregister()


def test_a_callback_that_the_operator_allows_is_run_with_the_jobs_id(redis_url, connection) -> None:
    import queue_callbacks

    queue_callbacks.called.clear()
    source = new_source(redis_url, allowed_callbacks=frozenset({"queue_callbacks.record"}))
    job = stock_queue(connection).enqueue(
        codec.FUNCTION, {"prompt": "x"}, on_success=rq.Callback("queue_callbacks.record")
    )
    finish_all(source, source.claim(1, 1.0))
    source.reap()
    assert queue_callbacks.called == [job.id]
    source.unregister()


def test_repeating_jobs_are_refused_by_name(redis_url, connection) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    job = stock_queue(connection).enqueue(
        codec.FUNCTION, {"prompt": "x"}, repeat=rq.Repeat(times=2, interval=1)
    )
    assert source.claim(1, 0.05) == []
    assert client.results([job.id])[job.id].failure.code == "unsupported_job"
    source.unregister()


def test_a_stock_worker_may_share_the_queue_until_it_dies_mid_pop(redis_url, connection) -> None:
    """A stock worker killed between its pop and its start leaves the id in `:intermediate`."""
    from headrace.producer import health

    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("x")
    connection.lmove(f"rq:queue:{QUEUE}", f"rq:queue:{QUEUE}:intermediate", "LEFT", "RIGHT")
    assert balance(client) == 0
    findings = client.run(health.examine())
    assert [f.kind for f in findings] == ["intermediate"]
    client.run(health.repair(findings, client.settings))
    assert [j.job_id for j in source.claim(1, 1.0)] == [sent.id]
    source.unregister()
