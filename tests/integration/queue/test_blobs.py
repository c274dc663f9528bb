"""Large payloads and results lie beside Redis, by content hash, and go with their job."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from queue_support import QUEUE, balance, crash, new_source, success

from headrace.producer import AsyncClient, Client, IdempotencyConflict, codec
from headrace.producer.blobs import BlobStore
from headrace.producer.errors import PayloadError
from headrace.worker.lease import RedisSource

LARGE = "long prompt " * 10_000


@pytest.fixture(params=["folder", "url"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "blobs") if request.param == "folder" else f"file://{tmp_path}/blobs"


def files(root: str) -> list[str]:
    folder = Path(root.removeprefix("file://"))
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def worker(url: str, root: str | None) -> RedisSource:
    blobs = BlobStore(root) if root else None
    return RedisSource.from_url(url, [QUEUE], blobs=blobs)


def test_a_large_request_and_its_large_result_leave_only_hashes_in_redis(
    redis_url: str, root: str
) -> None:
    client, source = Client(redis_url, queue=QUEUE, blobs=root), worker(redis_url, root)
    small, large = client.submit("small"), client.submit(LARGE, batch="n")
    assert client.redis.hstrlen(f"rq:job:{large.id}", "data") < 300
    claimed = source.claim(2, 1.0)
    assert [json.loads(j.payload)["prompt"] for j in claimed] == ["small", LARGE]
    source.finish([success(claimed[0]), success(claimed[1], "x" * 100_000)])
    assert client.redis.memory_usage(f"rq:results:{large.id}") < 3000
    assert client.result(large.id, 1).text == "x" * 100_000
    assert client.results([large.id])[large.id].text == "x" * 100_000
    assert client.completed("n").items[0][1].text == "x" * 100_000
    assert len(files(root)) == 2
    assert client.forget([small.id, large.id]) == 2
    assert files(root) == []


def test_an_async_client_reads_and_writes_them_too(redis_url: str, root: str) -> None:
    source = worker(redis_url, root)

    async def go() -> None:
        async with AsyncClient(redis_url, queue=QUEUE, blobs=root) as client:
            job = await client.submit(LARGE)
            (claimed,) = await asyncio.to_thread(source.claim, 1, 1.0)
            assert json.loads(claimed.payload)["prompt"] == LARGE
            await asyncio.to_thread(source.finish, [success(claimed, "y" * 100_000)])
            assert (await job.result(5)).text == "y" * 100_000

    asyncio.run(go())


def test_the_same_large_body_is_the_same_job(redis_url: str, root: str) -> None:
    client = Client(redis_url, queue=QUEUE, blobs=root)
    assert client.submit(LARGE, job_id="a").id == client.submit(LARGE, job_id="a").id
    with pytest.raises(IdempotencyConflict):
        client.submit(LARGE + "!", job_id="a")


def test_a_blob_that_is_gone_or_damaged_fails_its_job_alone(redis_url: str, root: str) -> None:
    client, source = Client(redis_url, queue=QUEUE, blobs=root), worker(redis_url, root)
    gone, damaged, good = (client.submit(f"{i} {LARGE}", job_id=f"j{i}") for i in range(3))
    folder = Path(root.removeprefix("file://"))
    for path in list(folder.rglob("*")):
        if path.name.startswith("j0."):
            path.unlink()
        if path.name.startswith("j1."):
            path.write_bytes(b"something else")
    assert [j.job_id for j in source.claim(3, 1.0)] == [good.id]
    for job in (gone, damaged):
        assert client.results([job.id])[job.id].failure.code == "blob_missing"
    assert balance(client) == 0


def test_one_variable_sets_the_store_of_clients_and_workers(
    redis_url: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_BLOBS", root)
    client, source = Client(redis_url, queue=QUEUE), RedisSource.from_url(redis_url, [QUEUE])
    client.submit(LARGE)
    (claimed,) = source.claim(1, 1.0)
    assert json.loads(claimed.payload)["prompt"] == LARGE
    assert len(files(root)) == 1


def test_a_worker_without_a_store_says_so(redis_url: str, root: str) -> None:
    client, source = Client(redis_url, queue=QUEUE, blobs=root), worker(redis_url, None)
    job = client.submit(LARGE)
    assert source.claim(1, 0.1) == []
    assert "this worker has none" in client.results([job.id])[job.id].failure.message


def test_a_job_cannot_name_a_file_of_its_own_choice(redis_url: str, root: str, tmp_path) -> None:
    """Only a hash is looked up, only below the operator's root, only for the job's own id."""
    (tmp_path / "secret").write_text("secret")
    store = BlobStore(root)
    for digest in ("../../secret", "/etc/passwd", "a" * 63, "A" * 64, ""):
        with pytest.raises(PayloadError):
            store.get("job", digest)
    for payload in (
        b'{"v":1,"blob":"../secret","bytes":1}',
        b'{"v":1,"blob":"file:///etc/passwd","bytes":1}',
    ):
        from headrace.producer.blobs import digest_in

        assert digest_in(payload) is None
    other = store.put("other", b"content of another job")
    with pytest.raises(PayloadError):
        store.get("mine", other)


def test_two_deliveries_never_overwrite_each_other(redis_url: str, root: str) -> None:
    client = Client(redis_url, queue=QUEUE, blobs=root)
    zombie, second = worker(redis_url, root), worker(redis_url, root)
    job = client.submit("x")
    (stale,) = zombie.claim(1, 1.0)
    crash(zombie)
    second.reap()
    (current,) = second.claim(1, 1.0)
    second.finish([success(current, "right " * 20_000)])
    zombie.finish([success(stale, "wrong " * 20_000)])
    assert client.result(job.id, 1).text == "right " * 20_000


def test_contents_of_jobs_whose_record_is_gone_are_swept(redis_url: str, root: str) -> None:
    client, source = Client(redis_url, queue=QUEUE, blobs=root), worker(redis_url, root)
    kept, gone = client.submit(LARGE, job_id="kept"), client.submit(LARGE, job_id="gone")
    client.redis.delete(f"rq:job:{gone.id}")
    source._sweep(source._blobs)
    assert len(files(root)) == 2
    for path in Path(root.removeprefix("file://")).rglob("*.*"):
        os.utime(path, (time.time() - 7200,) * 2)
    source._sweep(source._blobs)
    assert [name.partition(".")[0] for name in files(root)] == [kept.id]


def test_without_a_store_large_payloads_stay_in_redis(redis_url: str) -> None:
    client, source = Client(redis_url, queue=QUEUE), new_source(redis_url, start=False)
    client.submit(LARGE)
    (claimed,) = source.claim(1, 1.0)
    assert codec.parse_request(json.loads(claimed.payload)).prompt == LARGE
