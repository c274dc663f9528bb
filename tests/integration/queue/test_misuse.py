"""Calls that cannot mean what they say are refused by name, and none of them harms the others."""

import asyncio
import math
import threading
from typing import Any

import numpy
import orjson
import pytest
import redis
from queue_support import QUEUE, balance, finish_all, new_client, new_source

from headrace.engine.errors import RequestError
from headrace.producer import Client
from headrace.producer.aio import AsyncClient
from headrace.producer.errors import InvalidRequest, QueueFull, RedisUnavailable, ResultTimeout
from headrace.worker.lease import RedisSource
from headrace.worker.source import FinishCode, WorkerFacts, WorkerState
from headrace.worker.wire_request import parse_request


@pytest.mark.parametrize("max_tokens", [10**12, 10**14, 2**53, 2**63 - 1])
def test_max_tokens_that_mean_no_limit_stop_neither_the_queue_nor_a_worker(
    redis_url: str, max_tokens: int
) -> None:
    with new_client(redis_url) as client:
        source = new_source(redis_url)
        client.submit("x", job_id="huge", max_tokens=max_tokens, n=128, batch="b")
        client.submit("x", job_id="good", max_tokens=7, batch="b")
        client.submit("x", job_id="many", max_tokens=max_tokens, tenant="t", batch="b")
        assert client.batch("b").total == 3
        counters = client.redis.hgetall(f"rq:x:n:{QUEUE}")
        assert int(counters[b"output_tokens"]) == 10**9 + 7 + 10**9
        jobs = source.claim(8, 0.0)
        assert {job.job_id for job in jobs} == {"huge", "good", "many"}
        assert finish_all(source, jobs) == [FinishCode.COMMITTED] * 3
        assert client.batch("b").succeeded == 3
        counters = client.redis.hgetall(f"rq:x:n:{QUEUE}")
        assert int(counters[b"output_tokens"]) == 0
        assert int(counters[b"done_est_output"]) == 2 * 10**9 + 7
        assert balance(client) == 0
        source.close()


@pytest.mark.parametrize("window", [0, -5, 1.5, "3", None, True])
def test_a_window_that_lets_nothing_through_is_refused_and_not_an_empty_answer(
    redis_url: str, window: Any
) -> None:
    with new_client(redis_url) as client, pytest.raises(InvalidRequest, match="window"):
        list(client.map(["a", "b"], window=window))

    async def through_asyncio() -> None:
        async with AsyncClient(redis_url, queue=QUEUE) as client:
            async for _ in client.map(["a", "b"], window=window):
                pass

    with pytest.raises(InvalidRequest, match="window"):
        asyncio.run(through_asyncio())


@pytest.mark.parametrize("requests", ["hello", b"hello", {"prompt": "x"}, None, 5])
def test_one_request_where_many_are_asked_for_is_not_taken_letter_by_letter(
    redis_url: str, requests: Any
) -> None:
    with new_client(redis_url) as client:
        for call in (client.submit_many, lambda some: list(client.map(some))):
            with pytest.raises(InvalidRequest, match="list of requests"):
                call(requests)
        assert client.redis.keys("rq:job:*") == []


@pytest.mark.parametrize("item", [None, 5, [1.5], [[1]]])
def test_what_is_no_request_among_many_is_refused_by_name(redis_url: str, item: Any) -> None:
    with new_client(redis_url) as client, pytest.raises(InvalidRequest):
        client.submit_many(["x", item])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 5.0),
        ("temperature", "0.5"),
        ("temperature", True),
        ("n", "2"),
        ("seed", "7"),
        ("ignore_eos", 1),
        ("logprobs", "true"),
        ("stop_token_ids", ["5"]),
        ("logit_bias", {5: "1"}),
        ("prompt", ["5"]),
        ("prompt", [True]),
    ],
)
def test_a_number_written_as_text_is_refused_by_the_client_as_it_is_by_the_worker(
    redis_url: str, field: str, value: Any
) -> None:
    request = {"prompt": "x", field: value}
    with pytest.raises(RequestError, match=field):
        parse_request(orjson.dumps(request, option=orjson.OPT_NON_STR_KEYS))
    with new_client(redis_url) as client:
        with pytest.raises(InvalidRequest, match=field) as found:
            client.submit(**request)
        assert str(found.value.param).split(".")[0] == field
        assert "list[" not in str(found.value) and "str" not in str(found.value.param)
        assert client.redis.keys("rq:job:*") == []


def test_numbers_and_token_ids_of_numpy_are_taken_for_what_they_are(redis_url: str) -> None:
    with new_client(redis_url) as client:
        source = new_source(redis_url)
        ids = numpy.array([1, 2, 3])
        client.submit(ids, max_tokens=numpy.int64(5), temperature=numpy.float32(0.5))
        client.submit(list(ids), stop_token_ids=ids, job_id="second")
        payloads = {job.job_id: orjson.loads(job.payload) for job in source.claim(2, 0.0)}
        second = payloads.pop("second")
        assert second == {"prompt": [1, 2, 3], "stop_token_ids": [1, 2, 3]}
        assert list(payloads.values()) == [
            {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0.5}
        ]
        source.close()


def answered(source: RedisSource, count: int) -> None:
    done = 0
    while done < count:
        done += len(finish_all(source, source.claim(8, 1.0)))
    source.unregister()


ONE_BAD = ["a", {"prompt": "b", "max_tokens": "5", "custom_id": "bad"}, "c"]


def test_a_request_that_cannot_be_sent_is_its_own_failure_in_map_and_stops_no_other(
    redis_url: str,
) -> None:
    worker = threading.Thread(target=answered, args=(new_source(redis_url), 4))
    worker.start()
    with new_client(redis_url, max_payload_bytes=4096) as client:
        requests = [*ONE_BAD, "x" * 5000, {"prompt": "d", "priority": "high"}, "e"]
        found = list(client.map(requests, job_ids=list("ABCDEF"), timeout=30, max_tokens=3))
        assert [result.ok for result in found] == [True, False, True, False, False, True]
        assert [result.job_id for result in found] == ["A", "", "C", "", "", "F"]
        assert found[1].custom_id == "bad"
        codes = [result.failure.code for result in found if result.failure]
        assert codes == ["invalid_request", "payload_too_large", "invalid_request"]
        assert [r.failure.param for r in found if r.failure] == ["max_tokens", None, "priority"]

    async def through_asyncio() -> list[bool]:
        async with AsyncClient(redis_url, queue=QUEUE) as client:
            return [result.ok async for result in client.map(ONE_BAD[1:2])]

    assert asyncio.run(through_asyncio()) == [False]
    with new_client(redis_url) as client:
        list(client.map(["g"], timeout=30))
    worker.join()


@pytest.mark.parametrize(
    "options", [{"max_tokens": "5"}, {"deadline": math.nan}, {"depth": 3}, {"priority": "urgent"}]
)
def test_what_is_wrong_with_all_requests_of_map_is_raised_at_once(
    redis_url: str, options: dict[str, Any]
) -> None:
    with new_client(redis_url) as client, pytest.raises(InvalidRequest, match=next(iter(options))):
        next(client.map([5, "a"], **options))


def test_map_that_finds_the_queue_full_ends_all_that_it_had_sent(redis_url: str) -> None:
    with new_client(redis_url, max_queue_depth=3) as client:
        with pytest.raises(QueueFull):
            list(client.map([f"p{i}" for i in range(8)], window=4))
        assert balance(client) == 0
        counts = client.redis.hgetall(f"rq:x:n:{QUEUE}")
        assert int(counts[b"cancelled"]) == int(counts[b"accepted"]) == 3


def test_no_id_is_lost_when_a_later_request_of_the_same_call_cannot_be_sent(
    redis_url: str,
) -> None:
    requests: list[Any] = [f"p{i}" for i in range(7)] + [{"prompt": "x", "top_k": 1.5}]

    async def through_asyncio() -> InvalidRequest:
        async with AsyncClient(redis_url, queue=QUEUE) as client:
            with pytest.raises(InvalidRequest) as raised:
                await client.submit_many(requests, chunk=3)
            return raised.value

    with new_client(redis_url) as client:
        with pytest.raises(InvalidRequest, match=r"requests\[7\]: top_k") as raised:
            client.submit_many(requests, chunk=3)
        for error in (raised.value, asyncio.run(through_asyncio())):
            assert error.index == 7 and len(error.accepted) == 6
            assert [client.status(job_id).value for job_id in error.accepted] == ["queued"] * 6


def test_token_ids_are_a_prompt_among_many_too(redis_url: str) -> None:
    with new_client(redis_url) as client:
        source = new_source(redis_url)
        (job,) = client.submit_many([[1, 2, 3]])
        (claimed,) = source.claim(1, 0.0)
        assert claimed.job_id == job.id and b'"prompt":[1,2,3]' in claimed.payload
        source.close()


def test_an_id_and_an_idempotency_key_contradict_each_other(redis_url: str) -> None:
    with new_client(redis_url) as client, pytest.raises(InvalidRequest, match="not both"):
        client.submit("x", job_id="a", idempotency_key="k")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_have_is_refused_and_not_left_out(
    redis_url: str, number: float
) -> None:
    """orjson writes null for it, and null means "not asked for"."""
    with new_client(redis_url) as client:
        with pytest.raises(InvalidRequest, match="temperature"):
            client.submit("x", temperature=number)
        with pytest.raises(InvalidRequest, match="logit_bias"):
            client.submit("x", logit_bias={3: number})
        with pytest.raises(InvalidRequest, match="metadata"):
            client.submit("x", metadata={"deep": [{"er": number}]})
        with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
            client.submit("x", chat_template_kwargs={"a": number})


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def test_a_callers_data_may_be_nested_as_deeply_as_every_part_can_carry(redis_url: str) -> None:
    with new_client(redis_url) as client:
        client.submit("x", metadata=nested(100))
        for levels in (101, 200, 253, 5000):
            with pytest.raises(InvalidRequest, match="nested deeper than 100"):
                client.submit("x", metadata=nested(levels))


@pytest.mark.parametrize("timeout", [math.nan, "5", [1]])
def test_a_timeout_that_is_no_number_is_refused_and_not_waited_out(
    redis_url: str, timeout: Any
) -> None:
    with new_client(redis_url) as client:
        job = client.submit("x")
        with pytest.raises(InvalidRequest, match="timeout"):
            job.result(timeout)


@pytest.mark.parametrize("timeout", [0, -1, -math.inf, 1e-9])
def test_no_time_to_wait_is_a_timeout(redis_url: str, timeout: float) -> None:
    with new_client(redis_url) as client, pytest.raises(ResultTimeout):
        client.submit("x").result(timeout)


@pytest.mark.parametrize("cursor, limit", [("x", 1), (0, "y"), (1.5, 2), (-1, 2), (0, -1)])
def test_a_cursor_that_is_no_place_in_a_batch_is_refused(
    redis_url: str, cursor: Any, limit: Any
) -> None:
    with new_client(redis_url) as client, pytest.raises(InvalidRequest, match="whole number"):
        client.completed("b", cursor, limit)


@pytest.mark.parametrize("manifest", [[1], {"a": object()}, 5])
def test_a_manifest_that_is_no_json_object_is_refused(redis_url: str, manifest: Any) -> None:
    with new_client(redis_url) as client, pytest.raises(InvalidRequest, match="manifest"):
        client.create_batch("b", manifest)


def test_a_connection_that_decodes_answers_is_refused_by_name(redis_url: str) -> None:
    """Jobs are packed bytes; without this they get in and their results can't be read."""
    with pytest.raises(RedisUnavailable, match="decode_responses"):
        Client(client=redis.Redis.from_url(redis_url, decode_responses=True))
    with pytest.raises(RedisUnavailable, match="decode_responses"):
        AsyncClient(client=redis.asyncio.Redis.from_url(redis_url, decode_responses=True))
    join = "&" if "?" in redis_url else "?"
    with pytest.raises(RedisUnavailable, match="decode_responses"):
        Client(f"{redis_url}{join}decode_responses=true")


@pytest.mark.parametrize("protocol", [2, 3])
def test_either_protocol_of_redis_gives_the_same_answers(redis_url: str, protocol: int) -> None:
    url = f"{redis_url}{'&' if '?' in redis_url else '?'}protocol={protocol}"
    with Client(url, queue=QUEUE) as client:
        source = new_source(url)
        source.announce(WorkerFacts(model="m", state=WorkerState.READY, queues=(QUEUE,), slots=1))
        assert [worker.model for worker in client.workers()] == ["m"]
        source.heartbeat()
        assert source.reap() == 0
        jobs = client.submit_many(["a", "b"], batch="b")
        finish_all(source, source.claim(8, 0.0))
        assert [job.result(5).text for job in jobs] == ["an answer"] * 2
        assert client.batch("b").succeeded == 2
        done = [result for _, result in client.completed("b").items if result is not None]
        assert [result.text for result in done] == ["an answer"] * 2
        assert client.explain(jobs[0].id).state.value == "succeeded"
        source.close()


def test_a_database_that_is_not_there_is_said_so(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as plain:
        settings = {**plain.connection_pool.connection_kwargs, "db": 4711}
        kind = plain.connection_pool.connection_class
    pool = redis.ConnectionPool(connection_class=kind, **settings)
    with (
        Client(client=redis.Redis(connection_pool=pool), queue=QUEUE) as client,
        pytest.raises(RedisUnavailable, match="database"),
    ):
        client.submit("x")


def test_an_address_that_is_none_is_said_so() -> None:
    with pytest.raises(RedisUnavailable, match="no Redis URL"):
        Client("redis://[::1/0")


def test_each_request_of_many_goes_to_the_queue_of_its_own_model(redis_url: str) -> None:
    with Client(redis_url) as client:
        prompts = [{"prompt": str(n), "model": model} for n, model in enumerate("abacb")]
        jobs = client.submit_many(prompts)
        waiting = {name: client.redis.lrange(f"rq:queue:{name}", 0, -1) for name in "abc"}
        ids = [job.id.encode() for job in jobs]
        assert waiting == {"a": [ids[0], ids[2]], "b": [ids[1], ids[4]], "c": [ids[3]]}


def test_a_batch_whose_file_is_still_being_sent_is_not_completed(redis_url: str) -> None:
    """`results --follow` would end, with status 0, after what happened to be done by then."""
    with new_client(redis_url) as client:
        source = new_source(redis_url)
        client.create_batch("b", {"requests": 3})
        assert client.batch("b").state == "running"
        client.submit_many(["1", "2"], batch="b")
        finish_all(source, source.claim(8, 0.0))
        status = client.batch("b")
        assert (status.state, status.done, status.total) == ("running", 2, 2)
        client.submit("3", batch="b")
        finish_all(source, source.claim(8, 0.0))
        assert client.batch("b").state == "completed"
        client.create_batch("c", {"requests": 3})
        client.submit("1", batch="c")
        assert client.cancel_batch("c").state == "cancelled"
        source.close()


def test_one_id_where_many_are_asked_for_is_not_taken_letter_by_letter(redis_url: str) -> None:
    """The letters of an id are unknown jobs: nothing found, nothing cancelled, nothing said."""
    with new_client(redis_url) as client:
        job = client.submit("x", job_id="abc")
        for call in (client.results, client.cancel_many, client.forget):
            with pytest.raises(InvalidRequest, match="list of job ids"):
                call(job.id)
        with pytest.raises(InvalidRequest, match="list of job ids"):
            client.submit_many(["x", "y", "z"], job_ids="def")
        assert client.results([]) == {} and client.cancel_many([]) == []
        assert client.submit_many(["x"], job_ids=iter(["g"]))[0].id == "g"
