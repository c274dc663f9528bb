"""The dead letter: jobs given up after too many crashes or attempts, with what happened to them.

Pure, like `operations`; run through `Client.run`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.producer import codec, keys, operations, scripts
from headrace.producer.errors import JobNotFound
from headrace.producer.operations import Settings, Steps
from headrace.producer.schemas import Failure
from headrace.producer.scripts import Commands, Eval


@dataclass(frozen=True, slots=True)
class DeadJob:
    """One dead job. `died_at` in Unix seconds; `history`, oldest first: `at`, `event` (worker lost,
    attempt failed), `worker`, and for an attempt `code` and `message`."""

    job_id: str
    queue: str
    died_at: float
    crashes: int
    attempts: int
    failure: Failure | None
    history: tuple[dict[str, Any], ...]


def list_dead(queue: str, limit: int = 100) -> Steps[list[DeadJob]]:
    """The newest first."""
    key = keys.dead(keys.check_queue(queue))
    (ids,) = yield Commands((("ZREVRANGE", key, 0, limit - 1),))
    names = [job_id.decode() for job_id in ids]
    return (yield from _read(names))


def queues_with_dead() -> Steps[list[tuple[str, int]]]:
    """Queues that have dead jobs, and how many."""
    (known,) = yield Commands((("SMEMBERS", keys.queues()),))
    prefix = keys.queue_list("")
    names = sorted({keys.queue_of(key.decode().removeprefix(prefix)) for key in known})
    if not names:
        return []
    counts = yield Commands(tuple(("ZCARD", keys.dead(name)) for name in names))
    return [(name, int(n)) for name, n in zip(names, counts, strict=True) if n]


def show(job_id: str) -> Steps[DeadJob]:
    """One job's history, dead or not; JobNotFound when there is no such job."""
    found = yield from _read([keys.check_id("job_id", job_id)])
    if not found:
        raise JobNotFound(job_id)
    return found[0]


def requeue(job_ids: Sequence[str], settings: Settings) -> Steps[list[str]]:
    """Give failed jobs another start with attempts and crashes forgotten; those that were."""
    done: list[str] = []
    for start in range(0, len(job_ids), operations.MANY):
        some = [
            keys.check_id("job_id", job_id) for job_id in job_ids[start : start + operations.MANY]
        ]
        replies = yield Eval(scripts.producer("requeue"), (keys.queues(),), (settings.clock, *some))
        done += [job_id for job_id, code in zip(some, replies, strict=True) if code]
    return done


def drop(job_ids: Sequence[str], settings: Settings) -> Steps[int]:
    """Delete failed jobs with their history; how many."""
    return (yield from operations.forget(job_ids, settings))


def _read(job_ids: Sequence[str]) -> Steps[list[DeadJob]]:
    if not job_ids:
        return []
    commands: list[tuple[scripts.Argument, ...]] = []
    for job_id in job_ids:
        commands += [
            ("HMGET", keys.job(job_id), "origin", "crashes", "att", "status"),
            ("LRANGE", keys.history(job_id), 0, -1),
            ("XREVRANGE", keys.results(job_id), "+", "-", "COUNT", 1),
        ]
    replies = yield Commands(tuple(commands))
    facts = {job_id: replies[3 * i : 3 * i + 3] for i, job_id in enumerate(job_ids)}
    known = [job_id for job_id in job_ids if facts[job_id][0][0]]
    queues = {job_id: keys.queue_of(facts[job_id][0][0].decode()) for job_id in known}
    scores: list[Any] = []
    if known:
        scores = yield Commands(
            tuple(("ZSCORE", keys.dead(queues[job_id]), job_id) for job_id in known)
        )
    dead = []
    for job_id, score in zip(known, scores, strict=True):
        (_, crashes, attempts, _), history, entries = facts[job_id]
        failure = codec.read_stream(job_id, entries[0][1]).failure if entries else None
        dead.append(
            DeadJob(
                job_id=job_id,
                queue=queues[job_id],
                died_at=float(score or 0),
                crashes=int(crashes or 0),
                attempts=int(attempts or 0),
                failure=failure,
                history=tuple(orjson.loads(line) for line in history),
            )
        )
    return dead
