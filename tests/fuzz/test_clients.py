"""Whatever a caller passes or writes into a file: a typed error that names it, or a job."""

import io
from typing import Any

import hostile
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis_support import RedisServer

from headrace.producer import Client, codec
from headrace.producer.bulk.errors import BadLine
from headrace.producer.bulk.idset import IdSet
from headrace.producer.bulk.lines import LineParser, Task
from headrace.producer.bulk.reader import ReadOptions, read_tasks
from headrace.producer.errors import HeadraceError, JobNotFound
from headrace.producer.operations import CancelOutcome


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(hostile.texts_of_payloads())
    body = draw(hostile.requests())
    if kind == 1:
        return hostile.dumps({"custom_id": draw(hostile.VALUES), **body})
    line = {
        "custom_id": draw(st.one_of(st.text(min_size=1, max_size=4), hostile.VALUES)),
        "method": draw(st.one_of(st.just("POST"), hostile.VALUES)),
        "url": draw(
            st.one_of(st.sampled_from(["/v1/chat/completions", "/v1/completions"]), hostile.VALUES)
        ),
        "body": draw(st.one_of(st.just(body), hostile.VALUES)),
    }
    for name in draw(st.lists(st.sampled_from(sorted(line)), max_size=1)):
        del line[name]
    return hostile.dumps(line)


@hostile.cases(0.1)
@given(
    content=st.lists(lines(), max_size=4),
    end=st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b""]),
)
def test_every_line_of_a_file_is_a_task_or_a_typed_reason(content: list[bytes], end: bytes) -> None:
    file = io.BytesIO(end.join(content))
    with hostile.watched(), IdSet() as ids:
        names = set()
        for item in read_tasks(file, LineParser(), ids, ReadOptions(max_line_bytes=4096)):
            if isinstance(item, Task):
                assert item.custom_id not in names
                names.add(item.custom_id)
                codec.encode_request(item.request)
                item.prefix_key()
            else:
                assert isinstance(item, BadLine)
                assert item.code and item.message and item.line > 0
                assert len(item.message) < 2000


@pytest.fixture(scope="module")
def server() -> Any:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: RedisServer) -> Any:
    with Client(server.url, queue="fuzz", retry_for=1.0) as client:
        client.submit("warm")
        yield client


_OPTIONS = st.dictionaries(
    st.sampled_from(
        [
            "queue",
            "priority",
            "tenant",
            "batch",
            "deadline",
            "start_at",
            "max_attempts",
            "result_ttl",
            "failure_ttl",
            "job_id",
            "idempotency_key",
        ]
    ),
    st.one_of(hostile.NAMES, hostile.NUMBERS),
    max_size=2,
)


@hostile.cases(0.05)
@given(fields=hostile.requests(), given_options=_OPTIONS)
@example(fields={"prompt": "a"}, given_options={"deadline": "soon"})
@example(fields={"prompt": "a"}, given_options={"start_at": float("nan")})
@example(fields={"prompt": "a"}, given_options={"result_ttl": "a day"})
@example(fields={"messages": 0}, given_options={})
@example(fields={"prompt": "a"}, given_options={"job_id": []})
@example(fields={"prompt": "a"}, given_options={"idempotency_key": 7})
@example(fields={"prompt": "a"}, given_options={"idempotency_key": "\ud800"})
@example(fields={"messages": "0"}, given_options={})
def test_a_submission_is_a_job_or_a_typed_error(
    client: Client, server: RedisServer, fields: dict[str, Any], given_options: dict[str, Any]
) -> None:
    before = client.redis.dbsize()
    with hostile.watched(server.port):
        try:
            job = client.submit(**{**fields, **given_options})
        except HeadraceError as error:
            assert str(error)
            assert client.redis.dbsize() == before, "a refused submission leaves nothing"
            return
        job.status()
        assert job.cancel() is not CancelOutcome.NOT_FOUND
        client.forget([job.id])


@hostile.cases(0.02)
@given(name=hostile.NAMES)
def test_a_name_that_cannot_be_a_key_is_refused_by_every_call(
    client: Client, server: RedisServer, name: Any
) -> None:
    calls = [
        lambda: client.status(name),
        lambda: client.result(name, timeout=0.0),
        lambda: client.cancel(name),
        lambda: client.results([name]),
        lambda: client.forget([name]),
        lambda: client.batch(name),
        lambda: client.completed(name),
        lambda: client.cancel_batch(name),
        lambda: client.explain(name),
        lambda: client.job(name),
    ]
    before = client.redis.dbsize()
    with hostile.watched(server.port):
        for call in calls:
            try:
                call()
            except HeadraceError as error:
                assert str(error)
                assert isinstance(error, JobNotFound) or client.redis.ping()
    assert client.redis.dbsize() == before
