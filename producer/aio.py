"""The client for asyncio: `Client`'s methods, awaited.

    async with AsyncClient("redis://localhost:6379/0") as client:
        job = await client.submit("Translate to French: good morning", max_tokens=32)
        print((await job.result(timeout=60)).text)
        async for result in client.map(prompts, max_tokens=32): ...

The operations are the same generators (`operations`, `submission`); only the loop that drives them
awaits.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import redis.asyncio

from headrace.producer import connection, keys, operations, submission
from headrace.producer.blobs import BLOBS_VARIABLE, THRESHOLD, BlobStore, perform
from headrace.producer.client import DEFAULT_URL, URL_VARIABLE
from headrace.producer.errors import QueueFull, error_for
from headrace.producer.operations import (
    BatchStatus,
    CancelOutcome,
    Completed,
    JobState,
    RequestLike,
    Settings,
    WorkerInfo,
)
from headrace.producer.schemas import Result
from headrace.producer.scripts import BlobCall, Call

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AsyncJob:
    """A submitted job, as `client.Job`."""

    id: str
    client: "AsyncClient"

    async def status(self) -> JobState:
        return await self.client.status(self.id)

    async def result(self, timeout: float | None = None) -> Result:
        return await self.client.result(self.id, timeout)

    async def cancel(self) -> CancelOutcome:
        return await self.client.cancel(self.id)


class AsyncClient:
    """`Client` for asyncio: same arguments, same errors. One event loop."""

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str | None = None,
        client: redis.asyncio.Redis | None = None,
        blobs: str | None = None,
        **settings: Any,
    ) -> None:
        root = blobs or os.environ.get(BLOBS_VARIABLE)
        self.blobs = BlobStore(root) if root else None
        large = THRESHOLD if root else 0
        self.settings = Settings(**{"queue": queue, "large": large, **settings})
        if client is not None:
            self.redis = connection.reads_bytes(client)
        else:
            self.redis = connection.connect_async(
                url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
            )
        self._memory_checked = 0.0

    async def submit(
        self,
        prompt: str | list[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        job_id: str | None = None,
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> AsyncJob:
        """As `Client.submit`, the same keyword arguments."""
        options, rest = submission.split(fields)
        request = submission.request_of(prompt, messages, rest)
        if idempotency_key is not None:
            job_id = operations.idempotent_id(idempotency_key, job_id)
        await self._check_memory()
        ids = [job_id] if job_id is not None else None
        (accepted,) = await self.run(submission.submit([request], options, self.settings, ids))
        return AsyncJob(accepted, self)

    async def submit_many(
        self,
        requests: Iterable[RequestLike],
        *,
        job_ids: Iterable[str] | None = None,
        chunk: int = operations.MANY,
        block: float | None = None,
        **fields: Any,
    ) -> list[AsyncJob]:
        """As `Client.submit_many`, the same keyword arguments."""
        options, defaults = submission.split(fields)
        end = None if block is None else time.monotonic() + block
        jobs: list[AsyncJob] = []
        for some, ids in submission.chunked(requests, job_ids, defaults, chunk):
            try:
                await self._check_memory(end)
                steps = submission.submit(some, options, self.settings, ids, end)
                accepted = await self.run(steps)
            except QueueFull as error:
                earlier = tuple(job.id for job in jobs)
                raise QueueFull(str(error), earlier + error.accepted) from error
            jobs += [AsyncJob(job_id, self) for job_id in accepted]
        return jobs

    async def map(
        self,
        requests: Iterable[RequestLike],
        *,
        window: int = 1024,
        timeout: float | None = None,
        **fields: Any,
    ) -> AsyncIterator[Result]:
        """As `Client.map`."""
        source = submission.each(requests)
        window = submission.window(window)
        waiting: deque[AsyncJob] = deque()
        step = max(1, min(operations.MANY, window // 2))
        try:
            while True:
                while len(waiting) <= window - step and (some := submission.take(source, step)):
                    waiting += await self.submit_many(some, **fields)
                if not waiting:
                    return
                result = await self.run(operations.wait_result(waiting[0].id, timeout))
                await self.forget([waiting.popleft().id])
                yield result
        finally:
            if waiting:
                await self.cancel_many([job.id for job in waiting])

    def job(self, job_id: str) -> AsyncJob:
        return AsyncJob(keys.check_id("job_id", job_id), self)

    async def status(self, job_id: str) -> JobState:
        return await self.run(operations.status(job_id))

    async def result(self, job_id: str, timeout: float | None = None) -> Result:
        result = await self.run(operations.wait_result(job_id, timeout))
        error = error_for(result)
        if error is not None:
            raise error
        return result

    async def results(self, job_ids: Sequence[str]) -> dict[str, Result]:
        found: dict[str, Result] = {}
        for some in connection.chunks(list(submission.several(job_ids)), operations.MANY):
            found |= await self.run(operations.read_results(some))
        return found

    async def cancel(self, job_id: str) -> CancelOutcome:
        return (await self.cancel_many([job_id]))[0]

    async def cancel_many(self, job_ids: Sequence[str]) -> list[CancelOutcome]:
        outcomes: list[CancelOutcome] = []
        for some in connection.chunks(list(submission.several(job_ids)), operations.MANY):
            replies = await self.run(operations.cancel(some, self.settings))
            outcomes += [reply or CancelOutcome.NOT_FOUND for reply in replies]
        return outcomes

    async def forget(self, job_ids: Sequence[str]) -> int:
        return await self.run(operations.forget(list(submission.several(job_ids)), self.settings))

    async def workers(self) -> list[WorkerInfo]:
        return await self.run(operations.workers())

    async def create_batch(self, batch_id: str, manifest: Mapping[str, Any] | None = None) -> None:
        await self.run(operations.create_batch(batch_id, manifest or {}))

    async def batch(self, batch_id: str) -> BatchStatus:
        return await self.run(operations.batch_status(batch_id))

    async def completed(
        self, batch_id: str, cursor: int = 0, limit: int = operations.MANY, *, trim: bool = False
    ) -> Completed:
        return await self.run(operations.completed(batch_id, cursor, limit, trim, self.settings))

    async def cancel_batch(self, batch_id: str) -> BatchStatus:
        return await self.run(operations.cancel_batch(batch_id, self.settings))

    async def close(self) -> None:
        await self.redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def run(self, steps: Generator[Call, Any, T]) -> T:
        """Drive an operation of `operations`, `dead`, `explain` or `health`."""
        try:
            call = next(steps)
            while True:
                call = steps.send(await self._perform(call))
        except StopIteration as done:
            value: T = done.value
            return value

    async def _perform(self, call: Call) -> Any:
        if isinstance(call, BlobCall):
            return await asyncio.to_thread(perform, self.blobs, call)
        return await connection.send_async(self.redis, call, self.settings.retry_for)

    async def _check_memory(self, until: float | None = None) -> None:
        """At most once a second."""
        while time.monotonic() - self._memory_checked >= 1.0:
            try:
                await self.run(operations.check_memory(self.settings))
                self._memory_checked = time.monotonic()
            except QueueFull:
                if until is None or time.monotonic() + 1.0 > until:
                    raise
                await asyncio.sleep(1.0)
