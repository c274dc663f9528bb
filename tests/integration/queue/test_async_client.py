"""AsyncClient does what Client does."""

import asyncio
import inspect

import pytest
from queue_support import QUEUE, failure, finish_all, new_source

from headrace.producer import (
    AsyncClient,
    CancelOutcome,
    Client,
    IdempotencyConflict,
    JobFailed,
    JobNotFound,
    JobState,
    QueueFull,
    RedisUnavailable,
    ResultTimeout,
)
from headrace.worker.lease import RedisSource

NOT_MIRRORED = {"explain", "with_settings", "ping"}


async def serve(source: RedisSource, count: int) -> None:
    done = 0
    while done < count:
        jobs = await asyncio.to_thread(source.claim, 8, 1.0)
        await asyncio.to_thread(finish_all, source, jobs)
        done += len(jobs)


def test_it_has_clients_methods() -> None:
    def names(cls: type) -> set[str]:
        return {n for n, f in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")}

    assert names(Client) - names(AsyncClient) == NOT_MIRRORED
    assert names(AsyncClient) - names(Client) == set()


def test_jobs_go_out_and_answers_come_back(redis_url: str) -> None:
    source = new_source(redis_url)

    async def go() -> None:
        async with AsyncClient(redis_url, queue=QUEUE) as client:
            server = asyncio.create_task(serve(source, 15))
            job = await client.submit("hi", max_tokens=3, metadata={"a": 1})
            assert (await job.result(timeout=30)).text == "an answer"
            assert await job.status() is JobState.SUCCEEDED
            jobs = await client.submit_many(["a", "b", "c", "d"], batch="n")
            assert len({j.id for j in jobs}) == 4
            texts = [r.text async for r in client.map([f"p{i}" for i in range(10)], window=4)]
            assert texts == ["an answer"] * 10
            await server
            assert (await client.batch("n")).succeeded == 4
            found = await client.completed("n")
            assert {job_id for job_id, _ in found.items} == {j.id for j in jobs}
            assert await client.forget([j.id for j in jobs]) == 4

    asyncio.run(go())
    source.unregister()


def test_its_errors_are_clients(redis_url: str) -> None:
    source = new_source(redis_url)

    async def go() -> None:
        async with AsyncClient(redis_url, queue=QUEUE, max_queue_depth=2) as client:
            job = await client.submit("hi", job_id="one")
            with pytest.raises(IdempotencyConflict):
                await client.submit("other", job_id="one")
            with pytest.raises(ResultTimeout):
                await job.result(timeout=0.1)
            with pytest.raises(JobNotFound):
                await client.status("nobody")
            with pytest.raises(QueueFull):
                await client.submit_many(["a", "b"])
            claimed = await asyncio.to_thread(source.claim, 1, 1.0)
            await asyncio.to_thread(source.finish, [failure(claimed[0])])
            with pytest.raises(JobFailed, match="boom"):
                await job.result(timeout=5)
            assert await job.cancel() is CancelOutcome.ALREADY_FAILED
        async with AsyncClient("redis://127.0.0.1:1/0", queue=QUEUE, retry_for=0.1) as away:
            with pytest.raises(RedisUnavailable):
                await away.submit("x")

    asyncio.run(go())
    source.unregister()


def test_many_waiters_wait_at_once(redis_url: str) -> None:
    source = new_source(redis_url)

    async def go() -> None:
        async with AsyncClient(redis_url, queue=QUEUE) as client:
            jobs = await client.submit_many([f"p{i}" for i in range(50)])
            server = asyncio.create_task(serve(source, 50))
            results = await asyncio.gather(*(job.result(timeout=30) for job in jobs))
            assert len(results) == 50
            await server

    asyncio.run(go())
    source.unregister()


def test_a_wait_that_is_cancelled_leaves_its_connection_and_the_job_as_they_were(
    redis_url: str,
) -> None:
    """A reply that nobody read any more would be the next call's answer."""
    source = new_source(redis_url)

    async def go() -> None:
        async with AsyncClient(redis_url, queue=QUEUE) as client:
            jobs = await client.submit_many([f"p{i}" for i in range(20)])
            for turn in range(20):
                waiting = [asyncio.create_task(job.result(timeout=60)) for job in jobs]
                await asyncio.sleep(0.002 * turn)
                for task in waiting:
                    task.cancel()
                ended = await asyncio.gather(*waiting, return_exceptions=True)
                assert all(isinstance(one, asyncio.CancelledError) for one in ended)
            states = await asyncio.gather(*(job.status() for job in jobs))
            assert states == [JobState.QUEUED] * 20
            before = (await client.redis.info("clients"))["connected_clients"]
            server = asyncio.create_task(serve(source, 20))
            answers = await asyncio.gather(*(job.result(timeout=30) for job in jobs))
            assert [answer.job_id for answer in answers] == [job.id for job in jobs]
            await server
            assert before <= 25

    asyncio.run(go())
    source.unregister()


def test_sending_that_is_cancelled_half_way_is_whole_when_sent_again_under_the_same_ids(
    redis_url: str,
) -> None:
    ids = [f"job-{i}" for i in range(1000)]

    async def go() -> None:
        async with AsyncClient(redis_url, queue=QUEUE) as client:
            sending = asyncio.create_task(
                client.submit_many([f"p{i}" for i in range(1000)], job_ids=ids, chunk=10)
            )
            while not await client.redis.llen(f"rq:queue:{QUEUE}"):
                await asyncio.sleep(0)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert await client.redis.llen(f"rq:queue:{QUEUE}") < 1000
            await client.submit_many([f"p{i}" for i in range(1000)], job_ids=ids)
            assert await client.redis.llen(f"rq:queue:{QUEUE}") == 1000

    asyncio.run(go())
