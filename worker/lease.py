"""Redis as a job source: claim under a lease, renew, finish, release, reap.

Every move is one Lua script and may be sent again after a lost reply: a claim carries a nonce and
gives the same jobs again, a result is written only while the lease is ours. RQ's classes are in
`rq_worker`; nothing here knows the engine.
"""

import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, TypeVar

import orjson
import redis

from headrace.producer import codec, connection, errors, keys, operations, scripts
from headrace.producer.blobs import (
    BLOBS_VARIABLE,
    THRESHOLD,
    BlobStore,
    digest_in,
    perform,
    reference,
)
from headrace.producer.errors import PayloadError, QueueFull, RedisUnavailable
from headrace.worker.outbox import Outbox
from headrace.worker.rq_worker import WORKER_TTL, Registration
from headrace.worker.source import (
    ClaimedJob,
    FinishCode,
    Outcome,
    OutcomeKind,
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

_KINDS: Final = {
    OutcomeKind.SUCCEEDED: 1,
    OutcomeKind.FAILED: 2,
    OutcomeKind.EXPIRED: 3,
    OutcomeKind.RETRY: 4,
}
_CODES: Final = {
    0: FinishCode.FENCED,
    1: FinishCode.COMMITTED,
    2: FinishCode.OURS_EARLIER,
    3: FinishCode.GONE,
    4: FinishCode.RETRIED,
    5: FinishCode.DEAD,
}


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Times in seconds. `max_attempts` counts engine errors, `max_crashes` lost workers.

    A failed attempt waits `backoff_first` doubled each time, at most `backoff_most`, less up to
    half of it by chance. `deadline_horizon`: how near a deadline lets a job pass the others.
    `ageing`: the wait that lifts a job one priority class. `clock`: tests only.
    """

    lease: float = 60.0
    max_attempts: int = 3
    max_crashes: int = 3
    backoff_first: float = 1.0
    backoff_most: float = 300.0
    deadline_horizon: float = 30.0
    ageing: float = 300.0
    result_ttl: int = keys.RESULT_TTL
    failure_ttl: int = keys.FAILURE_TTL
    max_payload_bytes: int = codec.MAX_PAYLOAD_BYTES
    allowed_callbacks: frozenset[str] = frozenset()
    clock: str = ""


def backoff(settings: LeaseSettings, failed_attempts: int) -> float:
    """Seconds before the next attempt after `failed_attempts` (1 or more) of them."""
    most = min(settings.backoff_most, settings.backoff_first * 2.0 ** (failed_attempts - 1))
    return most * random.uniform(0.5, 1.0)


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
        self._connect = connect
        self._redis = connect()
        self._waiter = connect()
        self._registration: Registration | None = None
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
        self._scripts = {
            script: scripts.load("headrace.worker", script)
            for script in ("claim", "heartbeat", "finish", "release", "reap", "checkpoint")
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
        try:
            registration = Registration(self._connect, self.name, self.queues, self._stop_requested)
            registration.register()
        except redis.exceptions.RedisError as error:
            raise SourceUnavailable(str(connection.unavailable(error))) from error
        self._registration = registration

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
        reply = self._eval(
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
        jobs: list[ClaimedJob] = []
        refused: list[Outcome] = []
        for facts, data, checkpoint in _rows(*reply[2:]):
            job, problem = self._job(facts, data, checkpoint)
            if problem is None:
                jobs.append(job)
            else:
                refused.append(_refusal(job, problem))
        with self._lock:
            self._held.update({job.execution_id: job for job in jobs})
            self._held.update({outcome.job.execution_id: outcome.job for outcome in refused})
        if refused:
            self.finish(refused)
        return jobs

    def _job(
        self, facts: list[str], data: bytes, checkpoint: bytes
    ) -> tuple[ClaimedJob, PayloadError | None]:
        job_id, execution_id, name, fence, attempts, crashes, enqueued_at, deadline, refusal = facts
        problem: PayloadError | None = None
        payload = b""
        try:
            if refusal != "-":
                raise PayloadError("unsupported_job", f"RQ's {refusal} is not supported")
            payload = codec.unpack(data, self.settings.max_payload_bytes)
            if (digest := digest_in(payload)) is not None:
                payload = self._read_blob(job_id, digest)
        except PayloadError as error:
            problem = error
        job = ClaimedJob(
            job_id=job_id,
            execution_id=execution_id,
            queue=name,
            payload=payload,
            fence=int(fence),
            attempts=int(attempts),
            crashes=int(crashes),
            enqueued_at=_seconds(enqueued_at),
            deadline=float(deadline) if deadline != "-" else None,
            checkpoint=checkpoint or None,
        )
        return job, problem

    def _read_blob(self, job_id: str, digest: str) -> bytes:
        if self._blobs is None:
            raise PayloadError(
                "blob_missing", "the payload lies in a blob store, and this worker has none"
            )
        try:
            return self._blobs.get(job_id, digest)
        except OSError as error:
            raise PayloadError("blob_unavailable", f"the blob store fails: {error}") from error

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
        _, known, *lost = self._eval("heartbeat", keys.worker(self.name), *args)
        if not known and self._registration is not None:
            self._guard(self._registration.register_again)
        gone = [jobs[number - 1] for number in lost]
        with self._lock:
            return [job for job in gone if self._held.pop(job.execution_id, None) is not None]

    def finish(self, outcomes: Sequence[Outcome]) -> list[FinishCode]:
        """Write results and acknowledge, each atomically; codes in the order given."""
        codes: list[FinishCode] = []
        for group in _groups(outcomes, lambda outcome: len(outcome.result)):
            lines: list[str] = []
            blobs: list[bytes] = []
            for outcome in group:
                self._add_outcome(outcome, lines, blobs)
            replies = self._eval(
                "finish",
                keys.worker(self.name),
                self.name,
                self.settings.result_ttl,
                self.settings.failure_ttl,
                self.settings.max_attempts,
                "\n".join(lines),
                b"".join(blobs),
            )
            codes += [_CODES[reply] for reply in replies]
            self._drop(outcome.job for outcome in group)
        return codes

    def _add_outcome(self, outcome: Outcome, lines: list[str], blobs: list[bytes]) -> None:
        job = outcome.job
        result = codec.stream_value(self._light(job, outcome.result))
        delay, extra = 0.0, b""
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            failure = _failure(outcome.result)
            error = codec.stream_error(f"{failure['code']}: {failure['message']}")
            extra = orjson.dumps({"error": error.decode(), "event": failure})
            if outcome.kind is OutcomeKind.RETRY:
                delay = backoff(self.settings, job.attempts + 1)
        lines.append(
            f"{job.queue} {job.job_id} {job.execution_id} {_KINDS[outcome.kind]} "
            f"{outcome.prompt_tokens} {outcome.output_tokens} {delay:.3f} "
            f"{len(result)} {len(extra)}"
        )
        blobs += (result, extra)

    def _light(self, job: ClaimedJob, result: bytes) -> bytes:
        """The result, or a reference when it is large and there is a blob store."""
        if self._blobs is None or len(result) <= THRESHOLD:
            return result
        return reference(self._blobs.put(job.job_id, result), len(result))

    def checkpoint(self, jobs: Sequence[tuple[ClaimedJob, bytes]]) -> None:
        """Store progress for those still leased to us; skipped when Redis' memory is full."""
        for group in _groups(jobs, lambda item: len(item[1])):
            args: list[scripts.Argument] = []
            for job, blob in group:
                args += (job.queue, job.job_id, job.execution_id, blob)
            try:
                self._eval("checkpoint", keys.worker(self.name), *args)
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
            self._eval("release", keys.worker(self.name), *args)
            self._drop(item.job for item in group)

    def reap(self) -> int:
        """Take jobs back from workers whose leases lapsed; how many. Does what else any worker
        does for all: expires, promotes and ages out, and moves dependents on."""
        total: int = 0
        while True:
            taken, died, expired = self._eval(
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
        self._guard(self._outbox.deliver)
        if self._blobs is not None and time.monotonic() - self._swept > BLOB_SWEEP:
            self._swept = time.monotonic()
            self._sweep(self._blobs)
        return total

    def _sweep(self, store: BlobStore) -> None:
        """Delete contents of jobs whose record is gone. An hour's grace: contents come first."""
        for some in connection.chunks(list(store.older_than(3600)), GROUP):
            alive = self._send(
                scripts.Commands(tuple(("EXISTS", keys.job(job_id)) for job_id in some))
            )
            for job_id, exists in zip(some, alive, strict=True):
                if not exists:
                    store.delete(job_id)

    # WorkerRegistry

    def announce(self, facts: WorkerFacts) -> None:
        """Publish what this worker serves and how it is; lapses when not repeated. What it measured
        stays with its queues, for the time when no worker is left to tell."""
        fields: dict[str, Any] = asdict(facts)
        fields["state"] = facts.state.value
        fields["queues"] = ",".join(facts.queues)
        pairs = [part for name, value in fields.items() for part in (name, str(value))]
        key = keys.facts(self.name)
        commands: list[tuple[scripts.Argument, ...]] = [
            ("HSET", key, *pairs),
            ("EXPIRE", key, keys.FACTS_TTL),
        ]
        if facts.prefill_tokens_per_second > 0 and facts.decode_tokens_per_second > 0:
            measured = (
                *("prefill", facts.prefill_tokens_per_second),
                *("decode", facts.decode_tokens_per_second),
                *("cold_start", facts.cold_start_seconds),
                *("at", time.time()),
            )
            for queue in facts.queues:
                commands.append(("HSET", keys.rates(queue), *measured))
                commands.append(("EXPIRE", keys.rates(queue), keys.RATES_TTL))
        self._send(scripts.Commands(tuple(commands)))

    def served_elsewhere(self, model: str | None, queue: str, wire_version: int) -> bool:
        """Whether another live worker that reads this queue could take such a job."""
        base = keys.queue_of(queue)
        return any(
            base in worker.queues
            and worker.state != "draining"
            and (model is None or worker.model == model)
            and int(worker.facts.get("wire_version", 1)) >= wire_version
            for worker in self._run(operations.workers())
            if worker.name != self.name
        )

    def unregister(self) -> None:
        """Leave the books: this worker ends. Tries again for some seconds."""
        end = time.monotonic() + 3.0
        while True:
            try:
                self._send(scripts.Commands((("DEL", keys.facts(self.name)),)))
                if self._registration is not None:
                    self._guard(self._registration.unregister)
                    self._registration = None
                return
            except SourceUnavailable:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

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
            self._eval_script(
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

    # Sending

    def _eval(self, name: str, key: str, *args: scripts.Argument) -> Any:
        return self._eval_script(self._scripts[name], key, *args)

    def _eval_script(self, script: scripts.Script, key: str, *args: scripts.Argument) -> Any:
        return self._send(scripts.Eval(script, (key,), (self.settings.clock, *args)))

    def _send(self, call: scripts.RedisCall) -> Any:
        try:
            return connection.send(self._redis, call, retry_for=0.5)
        except RedisUnavailable as error:
            raise SourceUnavailable(str(error)) from error

    def _run(self, steps: operations.Steps[Any]) -> Any:
        try:
            call = next(steps)
            while True:
                if isinstance(call, scripts.BlobCall):
                    call = steps.send(perform(self._blobs, call))
                else:
                    call = steps.send(self._send(call))
        except StopIteration as done:
            return done.value

    def _guard(self, action: Callable[[], object]) -> None:
        """Something that others will do if we can't."""
        try:
            action()
        except (redis.exceptions.RedisError, OSError) as error:
            if connection.is_transient(error):
                raise SourceUnavailable(str(connection.unavailable(error))) from error
            log.warning("%s", error)

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


def _rows(lines: bytes = b"", blob: bytes = b"") -> Iterator[tuple[list[str], bytes, bytes]]:
    """Facts, data and checkpoint of each job in a claim's reply."""
    at = 0
    for line in lines.decode().splitlines():
        *facts, data_bytes, checkpoint_bytes = line.split(" ")
        middle = at + int(data_bytes)
        end = middle + int(checkpoint_bytes)
        yield facts, blob[at:middle], blob[middle:end]
        at = end


def _refusal(job: ClaimedJob, problem: PayloadError) -> Outcome:
    """A job that cannot be read fails, or waits for a blob store that does not answer now."""
    log.info("refused: %s", problem, extra={"job_id": job.job_id})
    retry = problem.code == "blob_unavailable"
    result = codec.failed(job.job_id, problem.code, str(problem), retryable=retry)
    kind = OutcomeKind.RETRY if retry else OutcomeKind.FAILED
    return Outcome(job, kind, codec.encode_result(result))


def _failure(result: bytes) -> dict[str, str]:
    """Code and message of an encoded result's failure."""
    failure = orjson.loads(result).get("failure") or {}
    return {"code": failure.get("code", "failed"), "message": failure.get("message", "")}


@lru_cache(maxsize=1024)
def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
