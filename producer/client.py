"""The blocking client: jobs in, results out.

    client = Client("redis://localhost:6379/0")
    job = client.submit("Translate to French: good morning", max_tokens=32)
    print(job.result(timeout=60).text)
    for result in client.map(prompts, max_tokens=32): ...

What each call does stands in `operations`; `AsyncClient` does the same. Nothing here knows Lua.
"""

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import redis

from headrace.producer import connection, explain, keys, operations, submission
from headrace.producer.blobs import BLOBS_VARIABLE, THRESHOLD, BlobStore, perform
from headrace.producer.errors import HeadraceError, InvalidRequest, QueueFull, error_for
from headrace.producer.explain import Explanation
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
from headrace.producer.scripts import BlobCall, Call, Commands

T = TypeVar("T")
URL_VARIABLE = "HEADRACE_REDIS_URL"
DEFAULT_URL = "redis://localhost:6379/0"


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job. Cheap to make: `client.job(id)` sends nothing."""

    id: str
    client: "Client"
    queue: str | None = None

    def status(self) -> JobState:
        """Where the job is now; JobNotFound when there is none."""
        return self.client.status(self.id)

    def result(self, timeout: float | None = None) -> Result:
        """The answer, waiting for it. JobFailed, JobExpired or JobCancelled when there is none,
        ResultTimeout after `timeout` seconds, JobNotFound when the job is unknown."""
        return self.client.result(self.id, timeout)

    def cancel(self) -> CancelOutcome:
        """End the job in whatever state it is; says what that was."""
        return self.client.cancel(self.id)


class Client:
    """Submits jobs and reads results. Thread-safe; one connection pool.

    `url` None: `HEADRACE_REDIS_URL`, else localhost. `queue` None: each job goes to the queue of
    its model, or to the one that the live workers serve. `blobs` (or `HEADRACE_BLOBS`): a folder or
    fsspec URL for payloads and results above 64 KiB, the same as the workers'. Other settings:
    `operations.Settings`.
    Every call is sent again after a lost connection, for `retry_for` seconds, and none is applied
    twice. Raises RedisUnavailable when Redis cannot be reached in that time.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str | None = None,
        client: redis.Redis | None = None,
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
            self.redis = connection.connect(url or os.environ.get(URL_VARIABLE) or DEFAULT_URL)
        self._memory_checked = 0.0

    def submit(
        self,
        prompt: str | list[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        job_id: str | None = None,
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> Job:
        """Send one request: a prompt (text or token ids) or messages.

        `fields`: what `schemas.Request` has (`model`, `custom_id`, `metadata`, the sampling
        parameters in their usual names) and what `submission.Options` has (`queue`, `priority`,
        `tenant`, `batch`, `deadline`, ...). The same `job_id` or `idempotency_key` with the same
        body is the same job, with another body an IdempotencyConflict. Raises InvalidRequest for a
        request that can't be sent, QueueFull when admission is refused.
        """
        options, rest = submission.split(fields)
        request = submission.request_of(prompt, messages, rest)
        if idempotency_key is not None:
            job_id = operations.idempotent_id(idempotency_key, job_id)
        self._check_memory()
        steps = submission.submit_one(request, options, self.settings, job_id)
        return Job(self.run(steps), self)

    def submit_many(
        self,
        requests: Iterable[RequestLike],
        *,
        job_ids: Iterable[str] | None = None,
        chunk: int = operations.MANY,
        block: float | None = None,
        **fields: Any,
    ) -> list[Job]:
        """Send many requests (prompts, mappings or Requests), one round trip a chunk.

        `fields` as for `submit`: options of them all, and defaults for what a request leaves
        unset. `block`: seconds to wait for space where admission is limited; None raises QueueFull
        at once. The `accepted` of whatever is raised holds the ids that got in before; the `index`
        of an InvalidRequest says which request it was.
        """
        options, defaults = submission.split(fields)
        end = None if block is None else time.monotonic() + block
        jobs: list[Job] = []
        chunks = submission.chunked(requests, job_ids, defaults, chunk)
        while True:
            with submission.after(jobs):
                some, ids = next(chunks, ([], None))
                if not some:
                    return jobs
                self._check_memory(end)
                steps = submission.submit(some, options, self.settings, ids, end)
                accepted = self.run(steps)
            jobs += [Job(job_id, self) for job_id in accepted]

    def map(
        self,
        requests: Iterable[RequestLike],
        *,
        window: int = 1024,
        timeout: float | None = None,
        job_ids: Iterable[str] | None = None,
        **options: Any,
    ) -> Iterator[Result]:
        """Results in the order of the requests, at most `window` jobs ahead of the reader.

        A job that failed yields its Result with a `failure` and does not stop the others; so does a
        request that can't be sent, with code invalid_request (or payload_too_large) and no job id.
        What would be wrong with all of them, and a queue or Redis that takes none, raises, and ends
        what was sent and not read. `timeout`: seconds to wait for each. `options` as for
        `submit_many`. Records are deleted once read.
        """
        source = submission.each(requests)
        window = submission.window(window)
        options.pop("chunk", None)
        submission.check_call({name: options[name] for name in options if name != "block"})
        chosen = iter(submission.several(job_ids)) if job_ids is not None else None
        waiting: deque[Job | Result] = deque()
        step = max(1, min(operations.MANY, window // 2))
        try:
            while True:
                while len(waiting) <= window - step and (some := submission.take(source, step)):
                    ids = submission.take_ids(chosen, len(some)) if chosen is not None else None
                    try:
                        waiting += self._submit_sendable(some, ids, options)
                    except HeadraceError as error:
                        waiting += [Job(job_id, self) for job_id in error.accepted]
                        error.accepted = ()
                        raise
                if not waiting:
                    return
                first = waiting[0]
                if isinstance(first, Job):
                    result = self.run(operations.wait_result(first.id, timeout))
                    waiting.popleft()
                    self.forget([first.id])
                else:
                    result = first
                    waiting.popleft()
                yield result
        finally:
            if sent := [job.id for job in waiting if isinstance(job, Job)]:
                self.cancel_many(sent)

    def _submit_sendable(
        self, some: list[RequestLike], ids: list[str] | None, options: Mapping[str, Any]
    ) -> Sequence[Job | Result]:
        """The jobs of at most one chunk, with a failure for each that can't be sent."""
        try:
            return self.submit_many(some, job_ids=ids, **options)
        except InvalidRequest:
            # Nothing of a chunk is sent before all of it is encoded.
            fields = {name: value for name, value in options.items() if name != "block"}
            sifted = submission.sift(some, fields, self.settings)
            if not any(isinstance(item, Result) for item in sifted):
                raise
        good = [index for index, item in enumerate(sifted) if not isinstance(item, Result)]
        jobs = self.submit_many(
            [some[index] for index in good],
            job_ids=[ids[index] for index in good] if ids is not None else None,
            **options,
        )
        sent = dict(zip(good, jobs, strict=True))
        return [
            item if isinstance(item, Result) else sent[index] for index, item in enumerate(sifted)
        ]

    def job(self, job_id: str) -> Job:
        """A handle on a job submitted before, here or elsewhere."""
        return Job(keys.check_id("job_id", job_id), self)

    def status(self, job_id: str) -> JobState:
        return self.run(operations.status(job_id))

    def result(self, job_id: str, timeout: float | None = None) -> Result:
        """As `Job.result`."""
        result = self.run(operations.wait_result(job_id, timeout))
        error = error_for(result)
        if error is not None:
            raise error
        return result

    def results(self, job_ids: Sequence[str]) -> dict[str, Result]:
        """Results of those that have ended, failures included; one round trip, no waiting."""
        found: dict[str, Result] = {}
        for some in connection.chunks(list(submission.several(job_ids)), operations.MANY):
            found |= self.run(operations.read_results(some))
        return found

    def cancel(self, job_id: str) -> CancelOutcome:
        """End a job in whatever state it is; says what that was."""
        return self.cancel_many([job_id])[0]

    def cancel_many(self, job_ids: Sequence[str]) -> list[CancelOutcome]:
        outcomes: list[CancelOutcome] = []
        for some in connection.chunks(list(submission.several(job_ids)), operations.MANY):
            replies = self.run(operations.cancel(some, self.settings))
            outcomes += [reply or CancelOutcome.NOT_FOUND for reply in replies]
        return outcomes

    def forget(self, job_ids: Sequence[str]) -> int:
        """Delete the records of ended jobs; how many. Jobs still under way are left alone."""
        return self.run(operations.forget(list(submission.several(job_ids)), self.settings))

    def workers(self) -> list[WorkerInfo]:
        """Live workers, with what they serve and their state."""
        return self.run(operations.workers())

    def create_batch(self, batch_id: str, manifest: Mapping[str, Any] | None = None) -> None:
        """Give a batch a manifest (any JSON); `submit(..., batch=batch_id)` puts jobs into it."""
        self.run(operations.create_batch(batch_id, manifest or {}))

    def batch(self, batch_id: str) -> BatchStatus:
        """Counts and manifest of a batch, whatever its size; JobNotFound when there is none."""
        return self.run(operations.batch_status(batch_id))

    def completed(
        self, batch_id: str, cursor: int = 0, limit: int = operations.MANY, *, trim: bool = False
    ) -> Completed:
        """Results of a batch in order of completion, from `cursor` on. Nothing is consumed: any
        number of readers keep cursors of their own. `trim`, for a batch's one owner, lets Redis
        drop the ids before `cursor`."""
        return self.run(operations.completed(batch_id, cursor, limit, trim, self.settings))

    def cancel_batch(self, batch_id: str) -> BatchStatus:
        """End all jobs of a batch that have not ended; what is met later ends too."""
        return self.run(operations.cancel_batch(batch_id, self.settings))

    def explain(self, job_id: str) -> Explanation:
        """Why a job is not running yet, or where it is; JobNotFound when there is none."""
        return self.run(explain.explain(job_id))

    def with_settings(self, **changes: Any) -> "Client":
        """The same connection under other settings."""
        other = type(self)(client=self.redis, **{**_fields(self.settings), **changes})
        other.blobs = self.blobs
        return other

    def ping(self) -> None:
        """RedisUnavailable unless Redis answers."""
        connection.send(self.redis, Commands((("PING",),)), self.settings.retry_for)

    def close(self) -> None:
        self.redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, steps: Generator[Call, Any, T]) -> T:
        """Drive an operation of `operations`, `dead`, `explain` or `health`."""
        try:
            call = next(steps)
            while True:
                call = steps.send(self._perform(call))
        except StopIteration as done:
            value: T = done.value
            return value

    def _perform(self, call: Call) -> Any:
        if isinstance(call, BlobCall):
            return perform(self.blobs, call)
        return connection.send(self.redis, call, self.settings.retry_for)

    def _check_memory(self, until: float | None = None) -> None:
        """At most once a second."""
        while time.monotonic() - self._memory_checked >= 1.0:
            try:
                self.run(operations.check_memory(self.settings))
                self._memory_checked = time.monotonic()
            except QueueFull:
                if until is None or time.monotonic() + 1.0 > until:
                    raise
                time.sleep(1.0)


def _fields(settings: Settings) -> dict[str, Any]:
    copy = replace(settings)
    return {name: getattr(copy, name) for name in Settings.__dataclass_fields__}
