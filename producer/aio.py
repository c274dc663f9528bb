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
from headrace.producer.errors import HeadraceError, InvalidRequest, QueueFull, error_for
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
        steps = submission.submit_one(request, options, self.settings, job_id)
        return AsyncJob(await self.run(steps), self)

    async def submit_many(
        self,
        requests: Iterable[RequestLike],
        *,
        job_ids: Iterable[str] | None = None,
        chunk: int = operations.MANY,
        block: float | None = None,
        **fields: Any,
    ) -> list[AsyncJob]:
        """As `Client.submit_many`, the same keyword arguments. Cancelled half-way, what was sent
        goes on: whoever gave `job_ids` knows it."""
        options, defaults = submission.split(fields)
        end = None if block is None else time.monotonic() + block
        jobs: list[AsyncJob] = []
        chunks = submission.chunked(requests, job_ids, defaults, chunk)
        while True:
            with submission.after(jobs):
                some, ids = next(chunks, ([], None))
                if not some:
                    return jobs
                await self._check_memory(end)
                steps = submission.submit(some, options, self.settings, ids, end)
                accepted = await self.run(steps)
            jobs += [AsyncJob(job_id, self) for job_id in accepted]

    async def map(
        self,
        requests: Iterable[RequestLike],
        *,
        window: int = 1024,
        timeout: float | None = None,
        job_ids: Iterable[str] | None = None,
        **options: Any,
    ) -> AsyncIterator[Result]:
        """As `Client.map`."""
        source = submission.each(requests)
        window = submission.window(window)
        options.pop("chunk", None)
        submission.check_call({name: options[name] for name in options if name != "block"})
        chosen = iter(submission.several(job_ids)) if job_ids is not None else None
        waiting: deque[AsyncJob | Result] = deque()
        step = max(1, min(operations.MANY, window // 2))
        try:
            while True:
                while len(waiting) <= window - step and (some := submission.take(source, step)):
                    ids = submission.take_ids(chosen, len(some)) if chosen is not None else None
                    try:
                        waiting += await self._submit_sendable(some, ids, options)
                    except HeadraceError as error:
                        waiting += [AsyncJob(job_id, self) for job_id in error.accepted]
                        error.accepted = ()
                        raise
                if not waiting:
                    return
                first = waiting[0]
                if isinstance(first, AsyncJob):
                    result = await self.run(operations.wait_result(first.id, timeout))
                    waiting.popleft()
                    await self.forget([first.id])
                else:
                    result = first
                    waiting.popleft()
                yield result
        finally:
            if sent := [job.id for job in waiting if isinstance(job, AsyncJob)]:
                await self.cancel_many(sent)

    async def _submit_sendable(
        self, some: list[RequestLike], ids: list[str] | None, options: Mapping[str, Any]
    ) -> Sequence[AsyncJob | Result]:
        """The jobs of at most one chunk, with a failure for each that can't be sent."""
        try:
            return await self.submit_many(some, job_ids=ids, **options)
        except InvalidRequest:
            # Nothing of a chunk is sent before all of it is encoded.
            fields = {name: value for name, value in options.items() if name != "block"}
            sifted = submission.sift(some, fields, self.settings)
            if not any(isinstance(item, Result) for item in sifted):
                raise
        good = [index for index, item in enumerate(sifted) if not isinstance(item, Result)]
        jobs = await self.submit_many(
            [some[index] for index in good],
            job_ids=[ids[index] for index in good] if ids is not None else None,
            **options,
        )
        sent = dict(zip(good, jobs, strict=True))
        return [
            item if isinstance(item, Result) else sent[index] for index, item in enumerate(sifted)
        ]

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
