"""The queue as a run sees it: one batch of a `Client`."""

from collections.abc import Sequence
from typing import Any

from headrace.producer import codec, connection, keys
from headrace.producer.bulk.ledger import Work
from headrace.producer.client import Client
from headrace.producer.errors import InvalidRequest, PayloadTooLarge
from headrace.producer.schemas import Result
from headrace.producer.scripts import Commands

_READ = 256
_READ_AT_ONCE = 4 * _READ


class BatchQueue:
    """`pump.JobQueue` over Redis. The caller fixes the job ids, so every call can be repeated."""

    def __init__(self, client: Client, batch_id: str, queue: str) -> None:
        self._client = client
        self._batch = batch_id
        self._queue = queue
        self._cursor = 0

    def submit(self, work: Sequence[Work]) -> list[Result]:
        try:
            self._submit(work)
            return []
        except InvalidRequest:
            # One of them cannot be sent; find out which, so that it fails alone.
            return [refused for one in work if (refused := self._submit_one(one)) is not None]

    def collect(self, safe: bool) -> list[Result]:
        found: list[Result] = []
        while len(found) < _READ_AT_ONCE:
            part = self._client.completed(self._batch, self._cursor, _READ, trim=safe)
            self._cursor = part.cursor
            # A result that is gone belongs to a job that was forgotten, so its line is on disk.
            found += [result for _, result in part.items if result is not None]
            if len(part.items) < _READ:
                break
            safe = safe and not found
        return found

    def forget(self, job_ids: Sequence[str]) -> None:
        self._client.forget(job_ids)

    def look_up(self, job_ids: Sequence[str]) -> tuple[list[Result], list[str]]:
        ended: list[Result] = []
        missing: list[str] = []
        for some in connection.chunks(list(job_ids), _READ):
            commands = Commands(tuple(("HGET", keys.job(job_id), "status") for job_id in some))
            found = self._send(commands)
            missing += [job_id for job_id, status in zip(some, found, strict=True) if not status]
            terminal = [
                job_id
                for job_id, status in zip(some, found, strict=True)
                if status in (b"finished", b"failed", b"canceled", b"stopped")
            ]
            ended += self._client.results(terminal).values()
        return ended, missing

    def lapse(self, worker_name: str) -> None:
        """End the leases of a worker that is known to be dead, instead of waiting them out: the
        next reaper puts its jobs back. Like any crash, it is charged to what was in flight."""
        mine = keys.worker_executions(worker_name)
        (members,) = self._send(Commands((("SMEMBERS", mine),)))
        for some in connection.chunks(list(members), _READ):
            scores = [part for member in some for part in (0, member)]
            self._send(Commands((("ZADD", keys.lease(self._queue), "XX", *scores),)))

    def withdraw(self, job_ids: Sequence[str]) -> None:
        """End and forget jobs that have not ended: nobody waits for them any more."""
        self._client.cancel_many(job_ids)
        self._client.forget(job_ids)

    def _send(self, commands: Commands) -> Any:
        return connection.send(self._client.redis, commands, self._client.settings.retry_for)

    def _submit(self, work: Sequence[Work]) -> None:
        self._client.submit_many(
            [one.task.request for one in work],
            job_ids=[one.job_id for one in work],
            queue=self._queue,
            batch=self._batch,
        )

    def _submit_one(self, work: Work) -> Result | None:
        try:
            self._submit([work])
            return None
        except PayloadTooLarge as error:
            return codec.failed(work.job_id, "payload_too_large", str(error))
        except InvalidRequest as error:
            return codec.failed(work.job_id, "invalid_request", str(error), error.param)
