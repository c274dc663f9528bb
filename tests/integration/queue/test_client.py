"""What a producer sees, on a real Redis."""

import os
import threading
import time

import pytest
from queue_support import QUEUE, crash, failure, finish_all, new_client, new_source, success

from headrace.producer import (
    CancelOutcome,
    Client,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    JobState,
    QueueFull,
    RedisUnavailable,
    Request,
    ResultTimeout,
    codec,
)
from headrace.worker.source import OutcomeKind, WorkerFacts, WorkerState


def answer_in_background(url: str, count: int) -> threading.Thread:
    def work() -> None:
        source = new_source(url)
        done = 0
        while done < count:
            jobs = source.claim(8, 1.0)
            done += len(finish_all(source, jobs))
        source.unregister()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_job_goes_out_and_its_answer_comes_back(redis_url: str) -> None:
    client = new_client(redis_url)
    worker = answer_in_background(redis_url, 1)
    job = client.submit(
        messages=[{"role": "user", "content": "hi"}], max_tokens=4, metadata={"k": 1}
    )
    assert job.result(timeout=30).text == "an answer"
    assert job.status() is JobState.SUCCEEDED
    worker.join()


def test_submit_many_takes_one_round_trip_a_chunk(redis_url: str) -> None:
    client = new_client(redis_url)
    client.submit("warm up the script")
    before = client.redis.info("stats")["total_commands_processed"]
    calls = client.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    jobs = client.submit_many((f"prompt {i}" for i in range(600)), chunk=200)
    after = client.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert len({job.id for job in jobs}) == 600
    assert after - calls == 3
    assert before > 0


def test_map_gives_results_in_order_and_leaves_nothing_behind(redis_url: str) -> None:
    client = new_client(redis_url)
    worker = answer_in_background(redis_url, 40)
    prompts = [f"p{i}" for i in range(40)]
    results = list(client.map(prompts, window=8, timeout=30, max_tokens=2))
    worker.join()
    assert len(results) == 40
    assert all(result.ok for result in results)
    assert client.redis.keys("*:job:*") == []


def test_a_reader_of_map_that_stops_early_cancels_what_it_had_sent(redis_url: str) -> None:
    client = new_client(redis_url)
    worker = answer_in_background(redis_url, 2)
    stream = client.map([f"p{i}" for i in range(10)], window=2, timeout=30)
    next(stream)
    stream.close()
    worker.join(0)
    end = time.monotonic() + 20
    while client.redis.zcard(f"rq:wip:{QUEUE}"):
        assert time.monotonic() < end
        time.sleep(0.01)
    answer_in_background(redis_url, 0).join()
    counts = client.redis.hgetall(f"rq:x:n:{QUEUE}")
    assert int(counts.get(b"cancelled", 0)) + int(counts[b"succeeded"]) == int(counts[b"accepted"])
    client.submit_many(["let the worker end"] * 2)
    worker.join()


def test_the_same_id_and_body_is_the_same_job_and_another_body_a_conflict(redis_url: str) -> None:
    client = new_client(redis_url)
    first = client.submit("hello", job_id="order-1", max_tokens=4)
    assert client.submit("hello", job_id="order-1", max_tokens=4).id == first.id
    assert client.redis.llen(f"rq:queue:{QUEUE}") == 1
    with pytest.raises(IdempotencyConflict, match="order-1"):
        client.submit("other", job_id="order-1", max_tokens=4)


def test_an_idempotency_key_may_be_any_text(redis_url: str) -> None:
    client = new_client(redis_url)
    key = "invoice 17 / año: 2026"
    assert client.submit("a", idempotency_key=key).id == client.submit("a", idempotency_key=key).id
    with pytest.raises(IdempotencyConflict):
        client.submit("b", idempotency_key=key)


def test_the_same_body_packed_by_another_zlib_is_no_conflict(redis_url: str) -> None:
    client = new_client(redis_url)
    client.submit("hello", job_id="same")
    import zlib

    data = zlib.decompress(client.redis.hget("rq:job:same", "data"))
    client.redis.hset("rq:job:same", "data", zlib.compress(data, 0))
    assert client.submit("hello", job_id="same").id == "same"


def test_a_job_that_failed_raises_with_its_code_and_its_metadata(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    job = client.submit("x", metadata={"row": 7}, custom_id="c7")
    source.finish([failure(one, code="prompt_too_long") for one in source.claim(1, 1.0)])
    with pytest.raises(JobFailed, match="prompt_too_long: it broke") as caught:
        job.result(timeout=1)
    assert caught.value.failure.code == "prompt_too_long"
    assert caught.value.result.metadata == {"row": 7}
    assert caught.value.result.custom_id == "c7"
    source.unregister()


def test_a_result_that_does_not_come_is_a_timeout_and_the_job_goes_on(redis_url: str) -> None:
    job = new_client(redis_url).submit("x")
    started = time.monotonic()
    with pytest.raises(ResultTimeout, match="queued"):
        job.result(timeout=0.2)
    assert time.monotonic() - started >= 0.2
    assert job.status() is JobState.QUEUED


def test_an_unknown_job_is_not_found(redis_url: str) -> None:
    client = new_client(redis_url)
    for ask in (client.status, client.result, client.explain):
        with pytest.raises(JobNotFound, match="nobody"):
            ask("nobody")
    assert client.cancel("nobody") is CancelOutcome.NOT_FOUND


def test_a_waiter_wakes_when_the_job_is_cancelled(redis_url: str) -> None:
    client = new_client(redis_url)
    job = client.submit("x")
    threading.Timer(0.2, job.cancel).start()
    started = time.monotonic()
    with pytest.raises(JobCancelled):
        job.result(timeout=30)
    assert time.monotonic() - started < 10


def test_cancel_says_what_it_met_in_every_state(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    queued = client.submit("queued")
    assert queued.cancel() is CancelOutcome.WAS_QUEUED
    assert queued.cancel() is CancelOutcome.ALREADY_CANCELLED
    later = client.submit("scheduled", start_at=time.time() + 3600)
    assert later.status() is JobState.SCHEDULED
    assert later.cancel() is CancelOutcome.WAS_SCHEDULED
    running = client.submit("running")
    (claimed,) = source.claim(1, 1.0)
    assert running.cancel() is CancelOutcome.WAS_RUNNING
    assert running.status() is JobState.CANCELLED
    assert source.finish([success(claimed)])[0].value == "gone"
    done = client.submit("done")
    finish_all(source, source.claim(1, 1.0))
    assert done.cancel() is CancelOutcome.ALREADY_SUCCEEDED
    failed = client.submit("failed")
    source.finish([failure(one) for one in source.claim(1, 1.0)])
    assert failed.cancel() is CancelOutcome.ALREADY_FAILED
    for job in (queued, later, running):
        with pytest.raises(JobCancelled):
            job.result(timeout=1)
    source.unregister()


def test_a_running_job_that_is_cancelled_is_told_to_its_worker_at_once(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    told = threading.Event()
    lost = []
    source.on_lost = lambda jobs: (lost.extend(jobs), told.set())
    job = client.submit("x")
    source.claim(1, 1.0)
    job.cancel()
    assert told.wait(10)
    assert [one.job_id for one in lost] == [job.id]
    assert source.held == []
    source.unregister()


def test_a_deadline_that_passes_in_the_queue_is_an_explicit_result(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    waiting = client.submit("x", deadline=time.time() + 0.1, metadata={"a": 1})
    claimed_late = client.submit("y", deadline=time.time() + 0.1)
    time.sleep(0.2)
    assert source.claim(1, 0.0) == []
    source.reap()
    for job in (waiting, claimed_late):
        with pytest.raises(JobExpired) as caught:
            job.result(timeout=1)
        assert caught.value.failure.code == "expired"
    assert client.results([waiting.id])[waiting.id].metadata == {"a": 1}
    source.unregister()


def test_forget_deletes_ended_jobs_and_leaves_the_others(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    done, waiting = client.submit("a"), client.submit("b")
    finish_all(source, source.claim(1, 1.0))
    assert client.forget([done.id, waiting.id, "nobody"]) == 1
    with pytest.raises(JobNotFound):
        done.status()
    assert waiting.status() is JobState.QUEUED
    source.unregister()


def test_a_cancelled_job_that_is_forgotten_leaves_no_ghost(redis_url: str) -> None:
    client = new_client(redis_url)
    jobs = client.submit_many(["a", "b", "c"])
    jobs[1].cancel()
    assert client.forget([jobs[1].id]) == 1
    assert client.redis.llen(f"rq:queue:{QUEUE}") == 2
    assert int(client.redis.hget("rq:x:ghost", QUEUE) or 0) == 0


def test_without_a_queue_the_one_that_workers_serve_is_taken(redis_url: str) -> None:
    client = Client(redis_url)
    with pytest.raises(InvalidRequest, match="no live worker"):
        client.submit("x")
    assert client.submit("x", model="other").id
    source = new_source(redis_url)
    source.announce(WorkerFacts(QUEUE, WorkerState.READY, (QUEUE,)))
    client.submit("x")
    assert client.redis.llen(f"rq:queue:{QUEUE}") == 1
    assert client.redis.llen("rq:queue:other") == 1
    source.unregister()


def test_workers_say_what_they_serve_until_they_end(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    other = new_source(redis_url)
    source.announce(WorkerFacts("m", WorkerState.READY, (QUEUE,), slots=8))
    (info,) = client.workers()
    assert (info.model, info.state, info.queues, info.facts["slots"]) == (
        "m",
        "ready",
        (QUEUE,),
        "8",
    )
    assert other.served_elsewhere("m", QUEUE, 1)
    assert not other.served_elsewhere("n", QUEUE, 1)
    assert not other.served_elsewhere("m", QUEUE, 2)
    assert not source.served_elsewhere("m", QUEUE, 1)
    source.announce(WorkerFacts("m", WorkerState.DRAINING, (QUEUE,)))
    assert not other.served_elsewhere("m", QUEUE, 1)
    source.unregister()
    assert client.workers() == []
    other.unregister()


def test_more_jobs_than_the_queue_may_hold_are_refused_with_what_got_in(redis_url: str) -> None:
    client = new_client(redis_url, max_queue_depth=5)
    client.submit_many(["a", "b"])
    with pytest.raises(QueueFull, match="5 waiting jobs") as caught:
        client.submit_many([f"p{i}" for i in range(6)])
    assert len(caught.value.accepted) == 3
    with pytest.raises(QueueFull):
        client.submit("one more")
    assert client.redis.llen(f"rq:queue:{QUEUE}") == 5


def test_submit_many_waits_for_space_and_then_goes_on(redis_url: str) -> None:
    client = new_client(redis_url, max_queue_depth=4)
    worker = answer_in_background(redis_url, 20)
    jobs = client.submit_many([f"p{i}" for i in range(20)], block=30)
    worker.join()
    assert len(jobs) == 20
    assert all(client.result(job.id, 10).ok for job in jobs)


def test_queued_bytes_are_limited_too(redis_url: str) -> None:
    client = new_client(redis_url, max_queue_bytes=1000)
    client.submit("x" * 500)
    with pytest.raises(QueueFull, match="payload bytes"):
        client.submit("x" * 600)
    source = new_source(redis_url)
    finish_all(source, source.claim(1, 1.0))
    client.submit("x" * 600)
    source.unregister()


def test_a_request_that_cannot_be_sent_says_which_field(redis_url: str) -> None:
    client = new_client(redis_url)
    for fields, param in [
        ({"prompt": "x", "tools": []}, "tools"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "deadline": 5.0}, "deadline"),
        ({"prompt": "x", "metadata": {"o": object()}}, None),
        ({}, None),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            client.submit(**fields)
        assert caught.value.param == param
    assert client.redis.keys("rq:job:*") == []


def test_a_redis_that_is_not_there_is_a_clear_error() -> None:
    client = Client("redis://127.0.0.1:1/0", queue=QUEUE, retry_for=0.2)
    started = time.monotonic()
    with pytest.raises(RedisUnavailable, match="does not answer"):
        client.submit("x")
    assert time.monotonic() - started < 5


def test_requests_and_mappings_take_defaults_only_where_they_say_nothing(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many(
        ["text", {"prompt": "mapping", "max_tokens": 1}, Request(prompt="request")], max_tokens=9
    )
    requests = [
        codec.parse_request(__import__("orjson").loads(j.payload)) for j in source.claim(3, 1)
    ]
    assert [(r.prompt, r.max_tokens) for r in requests] == [
        ("text", 9),
        ("mapping", 1),
        ("request", 9),
    ]
    source.unregister()


def test_explain_says_where_a_job_stands_and_why(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many([f"p{i}" for i in range(5)], max_tokens=100)
    third = client.explain(jobs[2].id)
    assert (third.position, third.jobs_ahead) == (3, 2)
    assert "no live worker" in third.reason
    facts = WorkerFacts(QUEUE, WorkerState.READY, (QUEUE,), slots=1, decode_tokens_per_second=50.0)
    source.announce(facts)
    source.claim(1, 1.0)
    third = client.explain(jobs[2].id)
    assert third.jobs_ahead == 1
    assert "1 jobs are ahead" in third.reason
    assert third.tokens_ahead > 100
    assert third.starts_in == pytest.approx((third.tokens_ahead * 1.5) / 50, rel=0.1)
    running = client.explain(jobs[0].id)
    assert (running.state, running.worker) == (JobState.RUNNING, source.name)
    later = client.submit("later", start_at=time.time() + 60)
    assert client.explain(later.id).not_before == pytest.approx(time.time() + 60, abs=5)
    crash(source)
    source.reap()
    suspect = client.explain(jobs[0].id)
    assert suspect.crashes == 1
    assert "small company" in suspect.reason
    source.unregister()


def test_the_kind_of_a_failed_outcome_is_kept_apart(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many(["a", "b", "c"])
    a, b, c = source.claim(3, 1.0)
    source.finish([success(a), failure(b), failure(c, OutcomeKind.EXPIRED, "expired")])
    counts = client.redis.hgetall(f"rq:x:n:{QUEUE}")
    assert (counts[b"succeeded"], counts[b"failed"], counts[b"expired"]) == (b"1", b"1", b"1")
    source.unregister()


def test_a_client_is_shared_by_threads_and_by_the_children_of_its_process(redis_url: str) -> None:
    """A connection used on both sides of a fork would give one the other's replies."""
    client = new_client(redis_url)
    client.submit("before", job_id="before")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for index in range(50):
                client.submit(f"c{index}", job_id=f"child-{index}")
                if client.status(f"child-{index}") is not JobState.QUEUED:
                    break
            else:
                status = 0
        finally:
            os._exit(status)
    wrong: list[str] = []

    def work(number: int) -> None:
        for index in range(50):
            name = f"thread-{number}-{index}"
            if client.submit("t", job_id=name).id != name:
                wrong.append(name)
            if client.status(name) is not JobState.QUEUED:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert wrong == []
    assert client.redis.llen(f"rq:queue:{QUEUE}") == 1 + 50 + 400
