"""Redis as a job source: claim under a lease, renew, finish, release, reap.

Every move is one Lua script and may be sent again after a lost reply: a claim carries a nonce and
gives the same jobs again, a result is written only while the lease is ours. RQ's classes are in
`rq_worker`, the layouts of replies and calls in `claim_reply` and `finish_call`; nothing here knows
the engine.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import redis

from headrace.producer import connection, errors, keys, operations, scripts
from headrace.producer.blobs import BLOBS_VARIABLE, BlobStore
from headrace.producer.errors import QueueFull
from headrace.worker.claim_reply import ClaimReader
from headrace.worker.finish_call import CODES, FinishWriter
from headrace.worker.lease_calls import LeaseCalls
from headrace.worker.lease_settings import LeaseSettings
from headrace.worker.outbox import Outbox
from headrace.worker.redis_registry import RedisRegistry
from headrace.worker.rq_worker import WORKER_TTL
from headrace.worker.source import (
    ClaimedJob,
    FinishCode,
    Outcome,
    Released,
    SourceUnavailable,
    WorkerFacts,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

GROUP: Final = 128
"""Jobs a script call, at most: 256 would block Redis for 8 ms."""

GROUP_BYTES: Final = 8 * 1024 * 1024

BLOB_SWEEP: Final = 600.0
"""Seconds between sweeps of the blob store."""


def worker_name() -> str:
    """Unique: a name must never be used by two at once, or by the next after a crash."""
    host = "".join(c if c.isalnum() or c in "_-" else "-" for c in socket.gethostname())[:40]
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"


class RedisSource:
    """`source.JobSource` and `source.WorkerRegistry` on Redis. Thread-safe.

    `connect` makes a client; `start` enters the worker into RQ's books and must come first.
    `on_lost` may be set: it is called, from a thread of this class, with jobs that were cancelled
    or stopped, as soon as Redis says so; without it `heartbeat` returns them with the rest.
    """

    def __init__(
        self,
        connect: Callable[[], redis.Redis],
        queues: Sequence[str],
        *,
        name: str | None = None,
        settings: LeaseSettings | None = None,
        blobs: BlobStore | None = None,
    ) -> None:
        if not queues:
            raise ValueError("a worker needs at least one queue")
        self.queues = tuple(keys.check_queue(queue) for queue in queues)
        self.name = name or worker_name()
        self.settings = settings or LeaseSettings()
        self.on_lost: Callable[[list[ClaimedJob]], None] | None = None
        self._blobs = blobs
        self._swept = time.monotonic()
        self._redis = connect()
        self._waiter = connect()
        self._calls = LeaseCalls(self._redis, lambda: self.settings.clock, blobs)
        self._scripts = self._calls.scripts
        self._reader = ClaimReader(blobs, self.settings.max_payload_bytes)
        self._writer = FinishWriter(blobs, self.settings)
        self._registry = RedisRegistry(
            connect, self._calls, self.name, self.queues, self._stop_requested
        )
        self._outbox = Outbox(self._redis, self.settings.allowed_callbacks)
        self._lock = threading.Lock()
        self._claiming = threading.Lock()
        self._held: dict[str, ClaimedJob] = {}
        self._told: list[ClaimedJob] = []
        self._token = secrets.token_hex(4)
        self._sequence = 0
        self._further = len(self.queues) > 1
        self._closing = {
            outcome: operations.closing_values(outcome)
            for outcome in (errors.EXPIRED, errors.CANCELLED, errors.STOPPED, errors.WORKER_LOST)
        }

    @classmethod
    def from_url(cls, url: str, queues: Sequence[str], **options: Any) -> "RedisSource":
        """A source for a URL; its blob store, unless given, is what `HEADRACE_BLOBS` names."""
        root = os.environ.get(BLOBS_VARIABLE)
        if root and "blobs" not in options:
            options["blobs"] = BlobStore(root)
        return cls(lambda: connection.connect(url), queues, **options)

    def start(self) -> None:
        """Enter RQ's books. SourceUnavailable when Redis can't be reached."""
        self._registry.enter()

    @property
    def held(self) -> list[ClaimedJob]:
        """Jobs under our lease, as far as we know."""
        with self._lock:
            return list(self._held.values())

    # JobSource

    def claim(self, max_jobs: int, wait_seconds: float) -> list[ClaimedJob]:
        """At most `max_jobs` jobs (and at most 128), waiting up to `wait_seconds` for the first.

        Gives none while the worker runs a suspect: a job in flight when a worker died keeps small
        company until it ends.
        """
        end = time.monotonic() + wait_seconds
        delay, peeked = 0.005, False
        with self._claiming:
            while True:
                if not any(job.crashes for job in self.held):
                    jobs = self._claim_once(min(max_jobs, GROUP))
                    if jobs:
                        return jobs
                left = end - time.monotonic()
                if left <= 0:
                    return []
                if peeked or self._further:
                    time.sleep(min(left, delay))
                    delay, peeked = min(delay * 2, 0.05), False
                else:
                    peeked = self._peek(min(left, 0.5))

    def _claim_once(self, max_jobs: int) -> list[ClaimedJob]:
        settings = self.settings
        nonce = f"{self._token}-{self._sequence:x}"
        reply = self._calls.script(
            "claim",
            keys.queue_list(self.queues[0]),
            self.name,
            nonce,
            max_jobs,
            settings.lease,
            settings.deadline_horizon,
            settings.ageing,
            settings.failure_ttl,
            *self._closing[errors.EXPIRED],
            *self._closing[errors.CANCELLED],
            *self.queues,
        )
        # Only now: after a lost reply the same nonce must be asked again.
        self._sequence += 1
        self._further = len(self.queues) > 1 or bool(reply[1])
        jobs, refused = self._reader.read(*reply[2:])
        with self._lock:
            self._held.update({job.execution_id: job for job in jobs})
            self._held.update({outcome.job.execution_id: outcome.job for outcome in refused})
        if refused:
            self.finish(refused)
        return jobs

    def _peek(self, seconds: float) -> bool:
        """Wait until the one list has something: a move of its head to its head removes nothing."""
        name = keys.queue_list(self.queues[0])
        try:
            reply = self._waiter.blmove(name, name, seconds, "LEFT", "LEFT")  # type: ignore[arg-type]
        except redis.exceptions.RedisError as error:
            if connection.is_full(error):
                return True
            raise SourceUnavailable(str(connection.unavailable(error))) from error
        return reply is not None

    def heartbeat(self) -> list[ClaimedJob]:
        """Extend every lease held; the jobs that are no longer ours (cancelled, taken away)."""
        lost: list[ClaimedJob] = []
        held = self.held
        for group in list(_groups(held)) or [[]]:
            lost += self._renew(group)
        with self._lock:
            told, self._told = self._told, []
        return [*told, *lost]

    def _renew(self, jobs: list[ClaimedJob]) -> list[ClaimedJob]:
        args: list[scripts.Argument] = [self.name, self.settings.lease, WORKER_TTL]
        for job in jobs:
            args += (job.queue, job.job_id, job.execution_id)
        _, known, *lost = self._calls.script("heartbeat", keys.worker(self.name), *args)
        if not known:
            self._registry.enter_again()
        gone = [jobs[number - 1] for number in lost]
        with self._lock:
            return [job for job in gone if self._held.pop(job.execution_id, None) is not None]

    def finish(self, outcomes: Sequence[Outcome]) -> list[FinishCode]:
        """Write results and acknowledge, each atomically; codes in the order given."""
        codes: list[FinishCode] = []
        for group in _groups(outcomes, lambda outcome: len(outcome.result)):
            replies = self._calls.script(
                "finish",
                keys.worker(self.name),
                self.name,
                self.settings.result_ttl,
                self.settings.failure_ttl,
                self.settings.max_attempts,
                *self._writer.arguments(group),
            )
            codes += [CODES[reply] for reply in replies]
            self._drop(outcome.job for outcome in group)
        return codes

    def checkpoint(self, jobs: Sequence[tuple[ClaimedJob, bytes]]) -> None:
        """Store progress for those still leased to us; skipped when Redis' memory is full."""
        for group in _groups(jobs, lambda item: len(item[1])):
            args: list[scripts.Argument] = []
            for job, blob in group:
                args += (job.queue, job.job_id, job.execution_id, blob)
            try:
                self._calls.script("checkpoint", keys.worker(self.name), *args)
            except QueueFull:
                log.warning("Redis' memory is full: checkpoints are not written")

    def release(self, released: Sequence[Released]) -> None:
        """Put jobs back without charging an attempt; the first given will be the first in line."""
        front = [item for item in released if item.to_front]
        tail = [item for item in released if not item.to_front]
        ordered = [*reversed(front), *tail]
        for group in _groups(ordered, lambda item: len(item.checkpoint or b"")):
            args: list[scripts.Argument] = [self.name]
            for item in group:
                job = item.job
                at = "1" if item.to_front else "0"
                args += (job.queue, job.job_id, job.execution_id, at, item.checkpoint or b"")
            self._calls.script("release", keys.worker(self.name), *args)
            self._drop(item.job for item in group)

    def reap(self) -> int:
        """Take jobs back from workers whose leases lapsed; how many. Does what else any worker
        does for all: expires, promotes and ages out, and moves dependents on."""
        total: int = 0
        while True:
            taken, died, expired = self._calls.script(
                "reap",
                keys.queues(),
                self.settings.max_crashes,
                self.settings.result_ttl,
                self.settings.failure_ttl,
                *self._closing[errors.EXPIRED],
                *self._closing[errors.WORKER_LOST],
                GROUP,
                *self.queues,
            )
            if died:
                log.warning("%d jobs are dead: every worker that ran them was lost", died)
            if expired:
                log.info("%d jobs expired while they waited", expired)
            total += int(taken)
            if int(taken) < GROUP:
                break
        self._calls.guard(self._outbox.deliver)
        if self._blobs is not None and time.monotonic() - self._swept > BLOB_SWEEP:
            self._swept = time.monotonic()
            self._sweep(self._blobs)
        return total

    def _sweep(self, store: BlobStore) -> None:
        """Delete contents of jobs whose record is gone. An hour's grace: contents come first."""
        for some in connection.chunks(list(store.older_than(3600)), GROUP):
            alive = self._calls.send(
                scripts.Commands(tuple(("EXISTS", keys.job(job_id)) for job_id in some))
            )
            for job_id, exists in zip(some, alive, strict=True):
                if not exists:
                    store.delete(job_id)

    # WorkerRegistry

    def announce(self, facts: WorkerFacts) -> None:
        self._registry.announce(facts)

    def served_elsewhere(self, model: str | None, queue: str, wire_version: int) -> bool:
        return self._registry.served_elsewhere(model, queue, wire_version)

    def unregister(self) -> None:
        self._registry.unregister()

    def close(self) -> None:
        self._redis.close()
        self._waiter.close()

    # RQ's stop commands and our own cancel, from the listening thread

    def _stop_requested(self, job_id: str, execution_id: str | None) -> None:
        jobs = [
            job
            for job in self.held
            if job.job_id == job_id and execution_id in (None, job.execution_id)
        ]
        if not jobs:
            return
        # Ours to stop, unless a cancel has already taken the lease away.
        lost = self._renew(jobs)
        if len(lost) < len(jobs):
            value, text = self._closing[errors.STOPPED]
            self._calls.evaluate(
                scripts.producer("cancel"),
                keys.queues(),
                errors.STOPPED,
                self.settings.failure_ttl,
                value,
                text,
                "",
                job_id,
            )
            self._drop(jobs)
            lost = jobs
        if self.on_lost is not None:
            self.on_lost(lost)
        else:
            with self._lock:
                self._told += lost

    def _drop(self, jobs: Any) -> None:
        with self._lock:
            for job in jobs:
                self._held.pop(job.execution_id, None)


def _groups(items: Iterable[T], size: Callable[[T], int] = lambda item: 0) -> Iterator[list[T]]:
    """Parts of at most GROUP items and, but for a single one, GROUP_BYTES."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and (len(group) >= GROUP or total + size(item) > GROUP_BYTES):
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group
