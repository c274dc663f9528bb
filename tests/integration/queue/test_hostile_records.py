"""Whoever can write to Redis can write nonsense; it must not stop the jobs beside it."""

import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from queue_support import QUEUE, crash, failure, finish_all, new_client, new_source, success

from headrace.producer import codec
from headrace.worker.source import FinishCode, OutcomeKind, Released

FIELDS = [
    "status",
    "origin",
    "data",
    "eid",
    "fence",
    "att",
    "crashes",
    "started_at",
    "enqueued_at",
    "dl",
    "ckpt",
    "batch",
    "est",
    "repeats_left",
    "rate_limit_key",
    "rate_limit_concurrency",
    "ended_at",
    "home",
    "ghost",
    "x",
    "max_att",
    "result_ttl",
    "failure_ttl",
    "retries_left",
    "retry_intervals",
    "enqueue_at_front_on_retry",
    "success_callback_name",
    "worker_name",
]
VALUES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"0",
            b"1",
            b"-1",
            b"3",
            b"nan",
            b"inf",
            b"-inf",
            b"1e308",
            b"1e15",
            b"99999999999999999999",
            b"0x10",
            b"[1, 2]",
            b'{"a": 1}',
            b"[[]]",
            b"5",
            b"queued",
            b"started",
            b"a b\nc",
            b"x:y:z",
            b"b:done",
            b"tiny.suspect",
            b"tiny.high@t",
            b"other",
            b"%d%s%s",
            b"2026-11-30T10:55:58.866Z",
            b"1,2,3",
            b"-1,5,x",
            b"os.system",
        ]
    ),
    st.binary(max_size=40),
)
DATA = st.one_of(
    st.just(codec.pack(b'{"prompt":"x"}')),
    st.binary(max_size=60),
    st.binary(max_size=60).map(zlib.compress),
)
IDS = st.one_of(
    st.sampled_from(["h1", "h2"]), st.text(max_size=12), st.sampled_from(["a:b", "", "x" * 300])
)
RECORDS = st.lists(
    st.tuples(IDS, st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8), DATA),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def hands(redis_server):
    client, source = new_client(redis_server.url), new_source(redis_server.url, start=False)
    yield client, source
    source.close()
    client.close()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(records=RECORDS, move=st.sampled_from(["succeed", "fail", "retry", "crash", "release"]))
def test_no_field_of_a_jobs_hash_can_stop_the_others(hands, records, move) -> None:
    client, source = hands
    r = client.redis
    r.flushall()
    good = client.submit("good", job_id="good", batch="b")
    for job_id, fields, data in records:
        record = {"status": b"queued", "origin": QUEUE.encode(), "data": data, **fields}
        if job_id != "good":
            r.hset(f"rq:job:{job_id}", mapping=record)
            r.lpush(f"rq:queue:{QUEUE}", job_id)
            if "dl" in fields:
                r.zadd(f"rq:x:deadline:{QUEUE}", {job_id: 1.0})
    answered = False
    for _ in range(12):
        source.heartbeat()
        jobs = source.claim(8, 0.0)
        mine = [j for j in jobs if j.job_id == "good"]
        others = [j for j in jobs if j.job_id != "good"]
        assert set(finish_all(source, mine)) <= {FinishCode.COMMITTED}
        answered = answered or bool(mine)
        if move == "succeed":
            finish_all(source, others)
        elif move == "fail":
            source.finish([failure(j) for j in others])
        elif move == "retry":
            source.finish([failure(j, OutcomeKind.RETRY) for j in others])
        elif move == "release":
            source.release([Released(j, b"c") for j in others])
            move = "succeed"
        else:
            crash(source)
        source.reap()
        source.heartbeat()
    assert answered
    assert good.result(1).ok
    assert client.batch("b").succeeded >= 1


@pytest.mark.parametrize("kind", ["string", "list", "zset"])
@pytest.mark.parametrize("key", ["job", "results", "executions", "execution", "x:history"])
def test_no_key_of_the_wrong_type_can_stop_the_others(redis_url: str, key: str, kind: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    r = client.redis
    jobs = client.submit_many([f"p{i}" for i in range(3)], job_ids=["a", "bad", "c"])

    def spoil(name: str) -> None:
        r.delete(name)
        {
            "string": lambda: r.set(name, "x"),
            "list": lambda: r.rpush(name, "x"),
            "zset": lambda: r.zadd(name, {"x": 1}),
        }[kind]()

    if key != "execution":
        spoil(f"rq:{key}:bad")
    claimed = source.claim(3, 1.0)
    assert {"a", "c"} <= {j.job_id for j in claimed}
    for job in claimed:
        if job.job_id == "bad" and key == "execution":
            spoil(f"rq:execution:bad:{job.execution_id}")
    source.heartbeat()
    codes = source.finish([success(j) for j in claimed])
    by_id = dict(zip((j.job_id for j in claimed), codes, strict=True))
    assert by_id["a"] is by_id["c"] is FinishCode.COMMITTED
    source.reap()
    assert client.result("a", 1).ok
    assert client.result("c", 1).ok
    assert len(jobs) == 3
    source.unregister()
