"""Hostile records in Redis, a real worker's loop on them: each ends with one typed result, the good
job between them is answered, and nothing that a record names is run or called."""

import http.server
import json
import re
import threading
from typing import Any

import hostile
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis_support import RedisServer
from serving import InThread, wait_until

from headrace.engine.engine import Engine
from headrace.producer import Client, codec
from headrace.worker.lease import RedisSource
from headrace.worker.lease_settings import LeaseSettings

QUEUE = "tiny"


@pytest.fixture(scope="module")
def hook() -> Any:
    """A server that nobody may call."""
    called: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            called.append(self.path)

        do_POST = do_GET

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    assert called == []


@pytest.fixture(scope="module")
def worker(engine: Engine) -> Any:
    server = RedisServer()
    source = RedisSource.from_url(
        server.url, [QUEUE], settings=LeaseSettings(max_attempts=1, failure_ttl=60)
    )
    source.start()
    serving = InThread(engine, source)  # type: ignore[arg-type]
    with Client(server.url, queue=QUEUE) as client:
        client.submit("warm", max_tokens=1).result(30)
        yield server, client, source, serving
    serving.stop()
    assert serving.error is None
    source.unregister()
    server.stop()


_CALLS = ["hostile_canary.touch", "os.system", "headrace.worker.jobs.generate", "", "\xff", "a.b"]
_EXTRA = st.dictionaries(
    st.sampled_from(
        [
            "success_callback_name",
            "failure_callback_name",
            "stopped_callback_name",
            "meta",
            "description",
            "timeout",
            "group_id",
            "dependency_id",
            "repeats_left",
            "ckpt",
        ]
    ),
    st.one_of(st.sampled_from(_CALLS), st.binary(max_size=10)),
    max_size=3,
)
_RECORDS = st.lists(st.tuples(hostile.data_fields(), _EXTRA, st.booleans()), min_size=1, max_size=6)
_turn = 0


@hostile.cases(0.01)
@given(records=_RECORDS)
@example(records=[(codec.pack(b"null"), {}, False)])
@example(records=[(codec.pack(b'{"prompt":"a"}'), {"ckpt": b"\x80"}, True)])
def test_hostile_records_end_typed_and_nothing_of_them_runs(
    worker: Any, hook: int, records: list[Any]
) -> None:
    global _turn
    _turn += 1
    server, client, source, serving = worker
    r = client.redis
    ids = [f"t{_turn}-{i}" for i in range(len(records))]
    with hostile.watched(server.port):
        for job_id, (data, extra, hooked) in zip(ids, records, strict=True):
            fields = {"status": "queued", "origin": QUEUE, "data": data, **extra}
            if hooked:
                url = f"http://127.0.0.1:{hook}/{job_id}"
                fields["webhooks"] = json.dumps([{"url": url, "event": "success"}])
            r.hset(f"rq:job:{job_id}", mapping=fields)
            r.rpush(f"rq:queue:{QUEUE}", job_id)
        good = client.submit("good", max_tokens=3, ignore_eos=True)
        assert good.result(15).usage.completion_tokens == 3
        wait_until(lambda: len(ended(client, ids)) == len(ids), f"{ids} end", 15.0)
        source.reap()
    for job_id, result in client.results(ids).items():
        if result.failure is not None:
            assert re.fullmatch(r"[a-z_]+", result.failure.code), (job_id, result)
            assert result.failure.code != "internal_error", (job_id, result)
            assert len(result.failure.message) < 2000
    assert serving.error is None
    assert all(r.xlen(f"rq:results:{job_id}") == 1 for job_id in ids)
    client.forget([*ids, good.id])


def ended(client: Client, ids: list[str]) -> list[str]:
    with client.redis.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hget(f"rq:job:{job_id}", "status")
        states = pipe.execute()
    return [i for i, state in zip(ids, states, strict=True) if state in (b"finished", b"failed")]
