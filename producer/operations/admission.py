"""Getting jobs into a queue: which one, whether there is room, and what came back of each."""

import time
from collections.abc import Sequence

from headrace.producer import codec, errors, keys, scripts
from headrace.producer.errors import IdempotencyConflict, InvalidRequest, JobCancelled, QueueFull
from headrace.producer.operations.live_workers import workers
from headrace.producer.operations.outgoing import Outgoing, Placement
from headrace.producer.operations.settings import Settings
from headrace.producer.operations.steps import Steps
from headrace.producer.schemas import Failure
from headrace.producer.scripts import Commands, Eval, Pause, WriteBlobs


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
