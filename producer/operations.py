"""What a client does, as plain generators: each yields calls for Redis and is sent their replies.

`Client` and `AsyncClient` drive the same generators, one by blocking, one by awaiting. Nothing here
does input or output.
"""

import base64
import enum
import hashlib
import os
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import orjson

from headrace.producer import blobs, codec, errors, keys, scripts
from headrace.producer.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobNotFound,
    QueueFull,
    ResultTimeout,
)
from headrace.producer.schemas import Failure, Request, Result
from headrace.producer.scripts import (
    Block,
    Call,
    Commands,
    DeleteBlobs,
    Eval,
    Pause,
    ReadBlob,
    WriteBlobs,
)

T = TypeVar("T")
Steps = Generator[Call, Any, T]
RequestLike = str | Mapping[str, Any] | Request

DEFAULT_OUTPUT_TOKENS: Final = 256
BYTES_PER_TOKEN: Final = 4
WAIT_SLICE: Final = 5.0
MANY: Final = 256


class JobState(enum.Enum):
    """Where a job is. `EXPIRED` and `DEAD` are failures with a reason of their own."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


_STATES: Final = {
    "created": JobState.WAITING,
    "queued": JobState.QUEUED,
    "scheduled": JobState.SCHEDULED,
    "deferred": JobState.WAITING,
    "rate_limited": JobState.WAITING,
    "ready_to_enqueue": JobState.WAITING,
    "started": JobState.RUNNING,
    "finished": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "canceled": JobState.CANCELLED,
    "stopped": JobState.CANCELLED,
}


def state_of(status: str) -> JobState:
    """Our word for RQ's status."""
    return _STATES.get(status, JobState.WAITING)


class CancelOutcome(enum.Enum):
    """What a cancel met. Only the first three changed anything."""

    WAS_QUEUED = "was_queued"
    WAS_SCHEDULED = "was_scheduled"
    WAS_RUNNING = "was_running"
    ALREADY_SUCCEEDED = "already_succeeded"
    ALREADY_FAILED = "already_failed"
    ALREADY_CANCELLED = "already_cancelled"
    NOT_FOUND = "not_found"

    @property
    def cancelled(self) -> bool:
        return self.value.startswith("was_")


_CANCELS: Final = {
    "queued": CancelOutcome.WAS_QUEUED,
    "created": CancelOutcome.WAS_QUEUED,
    "scheduled": CancelOutcome.WAS_SCHEDULED,
    "deferred": CancelOutcome.WAS_SCHEDULED,
    "rate_limited": CancelOutcome.WAS_SCHEDULED,
    "ready_to_enqueue": CancelOutcome.WAS_SCHEDULED,
    "started": CancelOutcome.WAS_RUNNING,
    "finished": CancelOutcome.ALREADY_SUCCEEDED,
    "failed": CancelOutcome.ALREADY_FAILED,
    "canceled": CancelOutcome.ALREADY_CANCELLED,
    "stopped": CancelOutcome.ALREADY_CANCELLED,
    "missing": CancelOutcome.NOT_FOUND,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client does with every job. Times in seconds; 0 means no limit.

    `max_queue_depth` and `max_queue_bytes` (of payloads not yet done) refuse admission;
    `memory_watermark` does at that share of Redis' maxmemory. `large`: payloads of more bytes go to
    the blob store.
    """

    queue: str | None = None
    result_ttl: int = keys.RESULT_TTL
    failure_ttl: int = keys.FAILURE_TTL
    max_queue_depth: int = 0
    max_queue_bytes: int = 0
    memory_watermark: float = 0.95
    max_payload_bytes: int = codec.MAX_PAYLOAD_BYTES
    retry_for: float = 30.0
    large: int = 0
    clock: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One encoded job, ready for ENQUEUE. `estimate` is 'prompt,output,bytes'."""

    job_id: str
    data: bytes
    estimate: str
    options: bytes
    blob: bytes | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where jobs go and under which terms. `deadline` and `start_at` are Unix seconds."""

    name: str
    batch: str = ""
    deadline: float | None = None
    start_at: float | None = None
    max_attempts: int | None = None
    result_ttl: int | None = None
    failure_ttl: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A live worker as it describes itself."""

    name: str
    state: str
    model: str
    queues: tuple[str, ...]
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completed:
    """A stretch of a batch's results in order of completion; `result` None: its time has passed.
    Ask again with `cursor`; an empty stretch means nothing new."""

    items: list[tuple[str, Result | None]]
    cursor: int


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """Counts of a batch. `state`: running, cancelling, cancelled or completed."""

    batch_id: str
    state: str
    total: int = 0
    succeeded: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    dead: int = 0
    created: float = 0.0
    queue: str = ""
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> int:
        return self.succeeded + self.failed + self.expired + self.cancelled


def new_job_id() -> str:
    """80 random bits in 16 characters: short, because Redis keeps an id in half a dozen places."""
    return base64.b32encode(os.urandom(10)).decode().lower()


def idempotent_id(key: str) -> str:
    """The job id of an idempotency key, which may be any text."""
    if not isinstance(key, str):
        raise InvalidRequest("an idempotency key must be text", "idempotency_key")
    text = key.encode("utf-8", "surrogatepass")
    return "k-" + hashlib.blake2b(text, digest_size=16).hexdigest()


def to_request(item: RequestLike, defaults: Mapping[str, Any]) -> Request:
    """A request from a prompt, a mapping or a Request, with defaults for unset fields."""
    if isinstance(item, Request):
        if not defaults:
            return item
        item = item.model_dump(exclude_unset=True)
    fields: dict[str, Any] = {"prompt": item} if isinstance(item, str) else dict(item)
    given = {name: value for name, value in defaults.items() if value is not None}
    return codec.parse_request({**given, **fields})


def encode(request: Request, placement: Placement, job_id: str, settings: Settings) -> Outgoing:
    payload = codec.encode_request(request, settings.max_payload_bytes)
    if isinstance(request.prompt, list):
        prompt_tokens = len(request.prompt)
    else:
        prompt_tokens = -(-len(payload) // BYTES_PER_TOKEN)
    blob = None
    size = len(payload)
    if settings.large and size > settings.large:
        blob, payload = payload, blobs.reference(hashlib.sha256(payload).hexdigest(), size)
    output = DEFAULT_OUTPUT_TOKENS if request.max_tokens is None else max(0, request.max_tokens)
    return Outgoing(
        job_id=keys.check_id("job_id", job_id),
        data=codec.pack(payload),
        estimate=f"{prompt_tokens},{output * (request.n or 1)},{len(payload)}",
        options=_options(placement, settings),
        blob=blob,
    )


def _options(placement: Placement, settings: Settings) -> bytes:
    options: dict[str, Any] = {}
    if placement.deadline is not None:
        options["dl"] = placement.deadline
    if placement.start_at is not None:
        options["at"] = placement.start_at
    own: dict[str, str] = {}
    if placement.max_attempts is not None:
        own["max_att"] = str(placement.max_attempts)
    result_ttl = settings.result_ttl if placement.result_ttl is None else placement.result_ttl
    failure_ttl = settings.failure_ttl if placement.failure_ttl is None else placement.failure_ttl
    if result_ttl != keys.RESULT_TTL:
        own["result_ttl"] = str(result_ttl)
    if failure_ttl != keys.FAILURE_TTL:
        own["failure_ttl"] = str(failure_ttl)
    if own:
        options["set"] = own
    return orjson.dumps(options) if options else b""


def resolve_queue(settings: Settings, model: str | None) -> Steps[str]:
    """The queue to use when none is named: the client's, the model's, or the one that the live
    workers serve."""
    if settings.queue is not None:
        return keys.check_queue(settings.queue)
    if model is not None and model != "default":
        return keys.check_queue(model)
    found = sorted({queue for worker in (yield from workers()) for queue in worker.queues})
    if len(found) == 1:
        return found[0]
    if not found:
        raise InvalidRequest("no live worker says what it serves; give queue= or model=", "queue")
    raise InvalidRequest(f"workers serve {', '.join(found)}; give queue= or model=", "queue")


def check_memory(settings: Settings) -> Steps[None]:
    """QueueFull when Redis' memory is above the watermark."""
    (info,) = yield Commands((("INFO", "memory"),))
    if not isinstance(info, dict):
        return
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if limit and used > limit * settings.memory_watermark:
        raise QueueFull(
            f"Redis uses {used:,} of {limit:,} bytes, above the watermark of "
            f"{settings.memory_watermark:.0%}: wait for workers, forget old results, or give Redis "
            "more memory"
        )


def enqueue(jobs: Sequence[Outgoing], placement: Placement, settings: Settings) -> Steps[list[int]]:
    """Codes of ENQUEUE for one chunk, in one round trip."""
    contents = tuple((job.job_id, job.blob) for job in jobs if job.blob is not None)
    if contents:
        # Before the job: a job whose content is not there yet could be claimed.
        yield WriteBlobs(contents)
    args: list[scripts.Argument] = [
        settings.clock,
        placement.name,
        placement.batch,
        settings.max_queue_depth,
        settings.max_queue_bytes,
    ]
    for job in jobs:
        args += (job.job_id, job.data, job.estimate, job.options)
    script = scripts.producer("enqueue")
    reply = yield Eval(script, (keys.queue_list(placement.name),), tuple(args))
    return [int(code) for code in reply]


NEW, SAME, CONFLICT, CLOSED, FULL = 1, 2, 3, 4, 0


def submit_chunk(
    jobs: Sequence[Outgoing],
    placement: Placement,
    settings: Settings,
    block_until: float | None,
    accepted: list[str],
) -> Steps[None]:
    """Send one chunk, and what did not fit again until `block_until` (monotonic; None: once).
    Ids that got in are appended to `accepted`, also when this raises."""
    delay = 0.05
    waiting = list(jobs)
    while True:
        *codes, depth, size = yield from enqueue(waiting, placement, settings)
        refused = []
        conflicts: list[Outgoing] = []
        closed: str | None = None
        for job, code in zip(waiting, codes, strict=True):
            if code in (NEW, SAME):
                accepted.append(job.job_id)
            elif code == CONFLICT:
                conflicts.append(job)
            elif code == CLOSED:
                closed = closed or job.job_id
            else:
                refused.append(job)
        for job in conflicts:
            yield from _confirm_conflict(job)
            accepted.append(job.job_id)
        if closed is not None:
            failure = Failure(
                code=errors.CANCELLED, message=f"batch {placement.batch} is cancelled"
            )
            raise JobCancelled(closed, failure)
        if not refused:
            return
        if block_until is None or time.monotonic() + delay > block_until:
            raise QueueFull(
                f"queue {keys.queue_of(placement.name)} has {depth:,} waiting jobs and {size:,} "
                f"payload bytes; the limits are {settings.max_queue_depth or 'none'} and "
                f"{settings.max_queue_bytes or 'none'}: send later, block for space or add workers",
                tuple(accepted),
            )
        yield Pause(delay)
        delay = min(delay * 2, 1.0)
        waiting = refused


def _confirm_conflict(job: Outgoing) -> Steps[None]:
    """IdempotencyConflict, unless the two differ only in how they were packed."""
    (data,) = yield Commands((("HGET", keys.job(job.job_id), "data"),))
    try:
        same = codec.unpack(data or b"") == codec.unpack(job.data)
    except errors.PayloadError:
        same = False
    if not same:
        raise IdempotencyConflict(job.job_id)


def status(job_id: str) -> Steps[JobState]:
    keys.check_id("job_id", job_id)
    (value,) = yield Commands((("HGET", keys.job(job_id), "status"),))
    if value is None:
        raise JobNotFound(job_id)
    return state_of(_text(value))


def wait_result(job_id: str, timeout: float | None) -> Steps[Result]:
    """The job's result, waiting for it; JobNotFound, or ResultTimeout after `timeout` seconds."""
    keys.check_id("job_id", job_id)
    end = None if timeout is None else time.monotonic() + timeout
    last = b"0-0"
    while True:
        state, entries = yield Commands(
            (
                ("HGET", keys.job(job_id), "status"),
                ("XREVRANGE", keys.results(job_id), "+", "-", "COUNT", 1),
            )
        )
        if state is None and not entries:
            raise JobNotFound(job_id)
        job_state = state_of(_text(state)) if state else JobState.SUCCEEDED
        if job_state.terminal:
            if entries:
                result = yield from _read_entry(job_id, entries[0][1])
                return (yield from _complete(job_id, result))
            if job_state is JobState.CANCELLED:
                return codec.failed(job_id, errors.CANCELLED, "the job was cancelled")
            return codec.failed(job_id, "result_gone", "the job ended but its result is gone")
        if entries:
            last = entries[0][0]
        left = WAIT_SLICE if end is None else min(WAIT_SLICE, end - time.monotonic())
        if left <= 0:
            raise ResultTimeout(
                f"job {job_id} is {job_state.value} after {timeout:g} s; it goes on"
            )
        yield Block(
            ("XREAD", "BLOCK", max(1, int(left * 1000)), "STREAMS", keys.results(job_id), last),
            left,
        )


def _read_entry(job_id: str, entry: dict[bytes, bytes]) -> Steps[Result]:
    try:
        text = codec.stream_text(job_id, entry)
        digest = blobs.digest_in(text) if text is not None else None
        if digest is None:
            return codec.read_stream(job_id, entry)
        content = yield ReadBlob(job_id, digest)
        return codec.decode_result(job_id, content)
    except errors.PayloadError as error:
        # A record that others wrote over must not stop the reader of a whole batch.
        return codec.failed(job_id, error.code, str(error))


def _complete(job_id: str, result: Result) -> Steps[Result]:
    """Results that the queue wrote itself lack the caller's data; take it from the request."""
    if result.failure is None or result.custom_id is not None or result.metadata is not None:
        return result
    (data,) = yield Commands((("HGET", keys.job(job_id), "data"),))
    return _with_caller_data(result, data)


def _with_caller_data(result: Result, data: bytes | None) -> Result:
    if not data:
        return result
    try:
        request = orjson.loads(codec.unpack(data))
    except (errors.PayloadError, orjson.JSONDecodeError):
        return result
    if not isinstance(request, dict):
        return result
    custom_id, metadata = request.get("custom_id"), request.get("metadata")
    update: dict[str, Any] = {}
    if isinstance(custom_id, str):
        update["custom_id"] = custom_id
    if isinstance(metadata, dict):
        update["metadata"] = metadata
    return result.model_copy(update=update) if update else result


def read_results(job_ids: Sequence[str]) -> Steps[dict[str, Result]]:
    """Results of those that have one, in one round trip (two where some failed)."""
    for job_id in job_ids:
        keys.check_id("job_id", job_id)
    if not job_ids:
        return {}
    replies = yield Commands(
        tuple(("XREVRANGE", keys.results(job_id), "+", "-", "COUNT", 1) for job_id in job_ids)
    )
    found = {}
    for job_id, entries in zip(job_ids, replies, strict=True):
        if entries:
            found[job_id] = yield from _read_entry(job_id, entries[0][1])
    return (yield from _complete_many(found))


def _complete_many(found: dict[str, Result]) -> Steps[dict[str, Result]]:
    bare = [
        job_id
        for job_id, result in found.items()
        if result.failure is not None and result.custom_id is None and result.metadata is None
    ]
    if bare:
        data = yield Commands(tuple(("HGET", keys.job(job_id), "data") for job_id in bare))
        for job_id, packed in zip(bare, data, strict=True):
            found[job_id] = _with_caller_data(found[job_id], packed)
    return found


def closing_values(outcome: str) -> tuple[bytes, bytes]:
    """Result and error text, as RQ keeps them, of a job that ended without running to its end."""
    message = CLOSING_MESSAGES[outcome]
    failure = Failure(code=outcome, message=message, retryable=outcome != errors.EXPIRED)
    body = orjson.dumps({"v": 1, "failure": failure.model_dump(exclude_defaults=True)})
    return codec.stream_value(body), codec.stream_error(f"{outcome}: {message}")


CLOSING_MESSAGES: Final = {
    errors.EXPIRED: "the deadline passed before the job was done",
    errors.CANCELLED: "the job was cancelled",
    errors.STOPPED: "the job was stopped by an operator",
    errors.WORKER_LOST: "every worker that ran the job died with it; see `headrace dead show`",
}


def cancel(
    job_ids: Sequence[str], settings: Settings, batch: str = "", outcome: str = errors.CANCELLED
) -> Steps[list[CancelOutcome | None]]:
    """What each cancel met; None for a job that is not of `batch`."""
    for job_id in job_ids:
        keys.check_id("job_id", job_id)
    value, text = closing_values(outcome)
    replies = yield Eval(
        scripts.producer("cancel"),
        (keys.queues(),),
        (settings.clock, outcome, settings.failure_ttl, value, text, batch, *job_ids),
    )
    return [None if _text(r) == "other" else _CANCELS[_text(r)] for r in replies]


def forget(job_ids: Sequence[str], settings: Settings) -> Steps[int]:
    """Deletes the records of ended jobs; how many."""
    deleted = 0
    for start in range(0, len(job_ids), MANY):
        some = [keys.check_id("job_id", job_id) for job_id in job_ids[start : start + MANY]]
        call = Eval(scripts.producer("forget"), (keys.queues(),), (settings.clock, *some))
        gone = yield call
        deleted += len(gone)
        if settings.large and gone:
            yield DeleteBlobs(tuple(_text(job_id) for job_id in gone))
    return deleted


def workers() -> Steps[list[WorkerInfo]]:
    """Workers that are alive and have said what they serve."""
    (known,) = yield Commands((("SMEMBERS", keys.workers()),))
    prefix = keys.worker("")
    names = sorted(_text(key).removeprefix(prefix) for key in known)
    if not names:
        return []
    replies = yield Commands(tuple(("HGETALL", keys.facts(name)) for name in names))
    found = []
    for name, reply in zip(names, replies, strict=True):
        facts = _mapping(reply)
        if facts:
            queues = tuple(queue for queue in facts.get("queues", "").split(",") if queue)
            found.append(
                WorkerInfo(name, facts.get("state", "?"), facts.get("model", ""), queues, facts)
            )
    return found


def create_batch(batch_id: str, manifest: Mapping[str, Any]) -> Steps[None]:
    """Gives a batch its manifest; the batch need not have jobs yet."""
    keys.check_id("batch", batch_id)
    now = f"{time.time():.6f}"
    yield Commands(
        (
            ("HSETNX", keys.batch(batch_id), "created", now),
            ("HSET", keys.batch(batch_id), "manifest", orjson.dumps(dict(manifest))),
            ("EXPIRE", keys.batch(batch_id), keys.FAILURE_TTL),
            ("ZADD", keys.batches(), "NX", now, batch_id),
        )
    )


def batch_status(batch_id: str) -> Steps[BatchStatus]:
    keys.check_id("batch", batch_id)
    (reply,) = yield Commands((("HGETALL", keys.batch(batch_id)),))
    facts = _mapping(reply)
    if not facts:
        raise JobNotFound(batch_id)
    names = ("total", "succeeded", "failed", "expired", "cancelled", "dead")
    counts = {name: int(facts.get(name, 0)) for name in names}
    done = sum(counts[name] for name in ("succeeded", "failed", "expired", "cancelled"))
    cancelled = "cancel" in facts
    if done >= counts["total"]:
        state = "cancelled" if cancelled else "completed"
    else:
        state = "cancelling" if cancelled else "running"
    return BatchStatus(
        batch_id=batch_id,
        state=state,
        created=float(facts.get("created", 0)),
        queue=facts.get("queue", ""),
        manifest=orjson.loads(facts["manifest"]) if "manifest" in facts else {},
        **counts,
    )


def completed(
    batch_id: str, cursor: int, limit: int, trim: bool, settings: Settings
) -> Steps[Completed]:
    keys.check_id("batch", batch_id)
    reply = yield Eval(
        scripts.producer("collect"),
        (keys.batch(batch_id), keys.batch_done(batch_id)),
        (settings.clock, cursor, limit, "1" if trim else "0"),
    )
    items: list[tuple[str, Result | None]] = []
    found: dict[str, Result] = {}
    for raw_id, entry in reply[1:]:
        job_id = _text(raw_id)
        if entry:
            fields = dict(zip(entry[::2], entry[1::2], strict=True))
            found[job_id] = yield from _read_entry(job_id, fields)
    found = yield from _complete_many(found)
    items = [(_text(raw_id), found.get(_text(raw_id))) for raw_id, _ in reply[1:]]
    return Completed(items, int(reply[0]))


def cancel_batch(batch_id: str, settings: Settings) -> Steps[BatchStatus]:
    """Marks the batch, so that whatever of it is met later ends too, then ends what waits in its
    queue's lists (read in stretches, never the whole at once) and what runs."""
    status = yield from batch_status(batch_id)
    yield Commands((("HSET", keys.batch(batch_id), "cancel", f"{time.time():.6f}"),))
    if not status.queue:
        return status
    for name in (yield from lists_of(status.queue)):
        for kind, read in (
            ("list", keys.queue_list(name)),
            ("zset", keys.registry("scheduled", name)),
        ):
            start = 0
            while True:
                command = "LRANGE" if kind == "list" else "ZRANGE"
                (ids,) = yield Commands(((command, read, start, start + MANY - 1),))
                if not ids:
                    break
                waiting = [_text(job_id) for job_id in ids]
                outcomes = yield from cancel(waiting, settings, batch_id)
                gone = sum(1 for o in outcomes if o is CancelOutcome.WAS_SCHEDULED)
                start += len(ids) - (gone if kind == "zset" else 0)
    (members,) = yield Commands((("ZRANGE", keys.lease(status.queue), 0, -1),))
    running = [_text(member).rpartition(":")[0] for member in members]
    for start in range(0, len(running), MANY):
        yield from cancel(running[start : start + MANY], settings, batch_id)
    return (yield from batch_status(batch_id))


def lists_of(queue: str) -> Steps[list[str]]:
    """The lists of a queue that exist, by name."""
    (known,) = yield Commands((("SMEMBERS", keys.queues()),))
    prefix = keys.queue_list("")
    names = (_text(key).removeprefix(prefix) for key in known)
    return sorted(name for name in names if keys.queue_of(name) == queue)


def unique(ids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(ids))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _mapping(reply: Any) -> dict[str, str]:
    """HGETALL's reply, which a pipeline may give raw or as a mapping."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {_text(name): _text(value) for name, value in pairs}
