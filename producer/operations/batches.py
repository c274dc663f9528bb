"""Jobs that are counted together: a batch's manifest, counts, results in order, and cancelling."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.producer import keys, scripts
from headrace.producer.errors import InvalidRequest, JobNotFound
from headrace.producer.operations.endings import cancel
from headrace.producer.operations.live_workers import lists_of
from headrace.producer.operations.results import complete_many, read_entry
from headrace.producer.operations.settings import Settings
from headrace.producer.operations.states import CancelOutcome
from headrace.producer.operations.steps import MANY, Steps, mapping_of, text_of
from headrace.producer.schemas import Result
from headrace.producer.scripts import Commands, Eval


@dataclass(frozen=True, slots=True)
class Completed:
    """A stretch of a batch's results in order of completion; `result` None: its time has passed.
    Ask again with `cursor`; an empty stretch means nothing new."""

    items: list[tuple[str, Result | None]]
    cursor: int


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """Counts of a batch. `state`: running, cancelling, cancelled or completed. A manifest that
    says how many `requests` there will be keeps it running until as many were sent and ended."""

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


def create_batch(batch_id: str, manifest: Mapping[str, Any]) -> Steps[None]:
    """Gives a batch its manifest; the batch need not have jobs yet."""
    keys.check_id("batch", batch_id)
    try:
        content = orjson.dumps(dict(manifest))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the manifest is no JSON object: {error}", "manifest") from None
    now = f"{time.time():.6f}"
    yield Commands(
        (
            ("HSETNX", keys.batch(batch_id), "created", now),
            ("HSET", keys.batch(batch_id), "manifest", content),
            ("EXPIRE", keys.batch(batch_id), keys.FAILURE_TTL),
            ("ZADD", keys.batches(), "NX", now, batch_id),
        )
    )


def batch_status(batch_id: str) -> Steps[BatchStatus]:
    keys.check_id("batch", batch_id)
    (reply,) = yield Commands((("HGETALL", keys.batch(batch_id)),))
    facts = mapping_of(reply)
    if not facts:
        raise JobNotFound(batch_id)
    names = ("total", "succeeded", "failed", "expired", "cancelled", "dead")
    counts = {name: int(facts.get(name, 0)) for name in names}
    done = sum(counts[name] for name in ("succeeded", "failed", "expired", "cancelled"))
    cancelled = "cancel" in facts
    manifest = orjson.loads(facts["manifest"]) if "manifest" in facts else {}
    announced = manifest.get("requests")
    # While a file is still being sent, all that was sent so far may be done.
    to_come = not cancelled and isinstance(announced, int) and announced > counts["total"]
    if done >= counts["total"] and not to_come:
        state = "cancelled" if cancelled else "completed"
    else:
        state = "cancelling" if cancelled else "running"
    return BatchStatus(
        batch_id=batch_id,
        state=state,
        created=float(facts.get("created", 0)),
        queue=facts.get("queue", ""),
        manifest=manifest,
        **counts,
    )


def completed(
    batch_id: str, cursor: int, limit: int, trim: bool, settings: Settings
) -> Steps[Completed]:
    keys.check_id("batch", batch_id)
    for name, number in (("cursor", cursor), ("limit", limit)):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**53:
            raise InvalidRequest(f"{name} must be a whole number from 0 on", name)
    reply = yield Eval(
        scripts.producer("collect"),
        (keys.batch(batch_id), keys.batch_done(batch_id)),
        (settings.clock, cursor, limit, "1" if trim else "0"),
    )
    items: list[tuple[str, Result | None]] = []
    found: dict[str, Result] = {}
    for raw_id, entry in reply[1:]:
        job_id = text_of(raw_id)
        if entry:
            fields = dict(zip(entry[::2], entry[1::2], strict=True))
            found[job_id] = yield from read_entry(job_id, fields)
    found = yield from complete_many(found)
    items = [(text_of(raw_id), found.get(text_of(raw_id))) for raw_id, _ in reply[1:]]
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
                waiting = [text_of(job_id) for job_id in ids]
                outcomes = yield from cancel(waiting, settings, batch_id)
                gone = sum(1 for o in outcomes if o is CancelOutcome.WAS_SCHEDULED)
                start += len(ids) - (gone if kind == "zset" else 0)
    (members,) = yield Commands((("ZRANGE", keys.lease(status.queue), 0, -1),))
    running = [text_of(member).rpartition(":")[0] for member in members]
    for start in range(0, len(running), MANY):
        yield from cancel(running[start : start + MANY], settings, batch_id)
    return (yield from batch_status(batch_id))
