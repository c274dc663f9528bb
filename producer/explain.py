"""Why a job is not running yet: `headrace explain JOB`.

Reads the job, its list and the workers that serve it; looks at no more than 1,000 of the jobs
ahead and takes their mean for the rest. Pure, like `operations`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from headrace.producer import keys, operations
from headrace.producer.errors import JobNotFound
from headrace.producer.operations import JobState, Steps, WorkerInfo
from headrace.producer.scripts import Commands

SAMPLE: Final = 1000


@dataclass(frozen=True, slots=True)
class Explanation:
    """`position` 1 is next; None when the job waits in no list. Tokens are estimates, calibrated by
    what workers counted. `starts_in`: seconds, None when nobody can say. Times are Unix seconds."""

    job_id: str
    state: JobState
    queue: str
    reason: str
    list_name: str = ""
    position: int | None = None
    jobs_ahead: int = 0
    tokens_ahead: int = 0
    attempts: int = 0
    crashes: int = 0
    deliveries: int = 0
    worker: str | None = None
    enqueued_at: float = 0.0
    deadline: float | None = None
    not_before: float | None = None
    starts_in: float | None = None
    resumes_from_checkpoint: bool = False


_FIELDS: Final = (
    "status",
    "origin",
    "att",
    "crashes",
    "fence",
    "worker_name",
    "enqueued_at",
    "dl",
    "batch",
    "rate_limit_key",
)


def explain(job_id: str) -> Steps[Explanation]:
    """Everything known about where a job stands; JobNotFound when there is no such job."""
    keys.check_id("job_id", job_id)
    values, has_checkpoint = yield Commands(
        (("HMGET", keys.job(job_id), *_FIELDS), ("HEXISTS", keys.job(job_id), "ckpt"))
    )
    if values[0] is None:
        raise JobNotFound(job_id)
    facts = {
        name: value.decode()
        for name, value in zip(_FIELDS, values, strict=True)
        if value is not None
    }
    state = operations.state_of(facts["status"])
    name = facts.get("origin", "")
    queue = keys.queue_of(name)
    common: dict[str, Any] = {
        "job_id": job_id,
        "state": state,
        "queue": queue,
        "list_name": name,
        "attempts": int(facts.get("att", 0)),
        "crashes": int(facts.get("crashes", 0)),
        "deliveries": int(facts.get("fence", 0)),
        "enqueued_at": _seconds(facts.get("enqueued_at", "")),
        "deadline": float(facts["dl"]) if "dl" in facts else None,
        "resumes_from_checkpoint": bool(has_checkpoint),
    }
    if state is JobState.RUNNING:
        worker = facts.get("worker_name") or None
        return Explanation(reason=f"running on {worker}", worker=worker, **common)
    if state.terminal:
        return Explanation(
            reason=f"ended: {state.value}", worker=facts.get("worker_name"), **common
        )
    workers = [w for w in (yield from operations.workers()) if queue in w.queues]
    if state is JobState.SCHEDULED:
        (score,) = yield Commands((("ZSCORE", keys.registry("scheduled", name), job_id),))
        start = float(score) if score is not None else None
        why = "waits to be tried again" if common["attempts"] else "waits for its time to start"
        return Explanation(reason=why, not_before=start, **common)
    if state is JobState.WAITING:
        why = {
            "deferred": "waits for jobs it depends on",
            "ready_to_enqueue": "its dependencies are met; it is about to be queued",
            "rate_limited": f"waits for a slot of rate limit {facts.get('rate_limit_key')}",
        }.get(facts["status"], f"is {facts['status']}")
        return Explanation(reason=why, **common)
    return (yield from _queued(common, workers))


def _queued(common: dict[str, Any], workers: Sequence[WorkerInfo]) -> Steps[Explanation]:
    name, queue, job_id = common["list_name"], common["queue"], common["job_id"]
    (index,) = yield Commands((("LPOS", keys.queue_list(name), job_id),))
    if index is None:
        reason = "is queued but in no list; `headrace doctor --repair` puts it back"
        return Explanation(reason=reason, **common)
    before = yield from _lists_before(queue, name)
    ahead_elsewhere = 0
    if before:
        lengths = yield Commands(tuple(("LLEN", keys.queue_list(other)) for other in before))
        ahead_elsewhere = sum(int(n) for n in lengths)
    (ghosts,) = yield Commands((("HGET", keys.ghosts(), name),))
    estimates: list[bytes | None] = []
    if index:
        last = min(index, SAMPLE) - 1
        (ids,) = yield Commands((("LRANGE", keys.queue_list(name), 0, last),))
        estimates = yield Commands(tuple(("HGET", keys.job(i.decode()), "est") for i in ids))
    counters = yield from _counters(queue)
    sampled = [_tokens(value, counters) for value in estimates if value]
    mean = sum(sampled) / len(sampled) if sampled else 0.0
    jobs_ahead = max(0, index - int(ghosts or 0)) + ahead_elsewhere
    running = yield from _running(queue)
    tokens_ahead = int(mean * jobs_ahead)
    rate, slots = _rate(workers)
    outstanding = tokens_ahead + int(mean or _tokens(None, counters)) * running // 2
    starts_in = None
    if rate > 0:
        starts_in = outstanding / rate if running >= slots or jobs_ahead else 0.0
    return Explanation(
        reason=_reason(common, workers, jobs_ahead, running, slots),
        position=jobs_ahead + 1,
        jobs_ahead=jobs_ahead,
        tokens_ahead=tokens_ahead,
        starts_in=starts_in,
        **common,
    )


def _reason(
    common: dict[str, Any], workers: Sequence[WorkerInfo], ahead: int, running: int, slots: int
) -> str:
    queue = common["queue"]
    if not workers:
        return f"no live worker serves queue {queue}; start one: headrace worker --queue {queue}"
    if all(w.state == "loading" for w in workers):
        return "the workers are still loading their model"
    if all(w.state == "draining" for w in workers):
        return "all workers are draining; none takes new jobs"
    if common["crashes"]:
        times = common["crashes"]
        return (
            f"was running when a worker died ({times} time{'s' if times > 1 else ''}): it waits to "
            + ("run alone" if times > 1 else "run in small company")
        )
    if ahead:
        return f"{ahead:,} jobs are ahead of it"
    if slots and running >= slots:
        return f"next in line; all {slots} slots are busy"
    return "next in line"


def _lists_before(queue: str, name: str) -> Steps[list[str]]:
    """Lists that are served first: suspects, higher classes of any tenant."""
    rank = {"high": 0, "normal": 1, "low": 2}
    mine = -1 if name.endswith(keys.SUSPECT_SUFFIX) else rank[keys.priority_of(name)]
    found = []
    for other in (yield from operations.lists_of(queue)):
        theirs = -1 if other.endswith(keys.SUSPECT_SUFFIX) else rank[keys.priority_of(other)]
        if theirs < mine:
            found.append(other)
    return found


def _running(queue: str) -> Steps[int]:
    (n,) = yield Commands((("ZCARD", keys.lease(queue)),))
    return int(n)


def _counters(queue: str) -> Steps[dict[str, float]]:
    names = ("done_est_prompt", "done_est_output", "done_prompt", "done_output")
    (values,) = yield Commands((("HMGET", keys.counters(queue), *names),))
    return {name: float(value or 0) for name, value in zip(names, values, strict=True)}


def _tokens(estimate: bytes | None, counters: dict[str, float]) -> float:
    """Prompt and output tokens of an estimate, corrected by what finished jobs really had."""
    prompt, output = 64.0, float(operations.DEFAULT_OUTPUT_TOKENS)
    if estimate:
        parts = estimate.decode().split(",")
        prompt, output = float(parts[0]), float(parts[1])
    if counters["done_est_prompt"]:
        prompt *= counters["done_prompt"] / counters["done_est_prompt"]
    if counters["done_est_output"]:
        output *= counters["done_output"] / counters["done_est_output"]
    return prompt + output


def _rate(workers: Sequence[WorkerInfo]) -> tuple[float, int]:
    """Tokens a second and slots of the workers that take jobs."""
    rate, slots = 0.0, 0
    for worker in workers:
        if worker.state == "ready":
            decode = float(worker.facts.get("decode_tokens_per_second", 0))
            prefill = float(worker.facts.get("prefill_tokens_per_second", 0))
            rate += max(decode, prefill / 2) if decode == 0 else decode
            slots += int(worker.facts.get("slots", 0))
    return rate, slots


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def lines(explanation: Explanation) -> list[str]:
    """The explanation for people."""
    e = explanation
    found = [f"{e.job_id}: {e.state.value} in {e.list_name or e.queue}", f"why: {e.reason}"]
    if e.position is not None:
        found.append(f"position {e.position:,}, about {e.tokens_ahead:,} tokens ahead")
    if e.not_before is not None:
        found.append(f"not before {_ago(e.not_before)}")
    if e.starts_in is not None:
        found.append(f"should start in about {e.starts_in:,.0f} s")
    found.append(f"attempts {e.attempts}, crashes {e.crashes}, deliveries {e.deliveries}")
    if e.resumes_from_checkpoint:
        found.append("goes on from a checkpoint")
    if e.deadline is not None:
        found.append(f"deadline {_ago(e.deadline)}")
    return found


def _ago(at: float) -> str:
    seconds = at - time.time()
    stamp = datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds")
    away = f"in {seconds:,.0f} s" if seconds >= 0 else f"{-seconds:,.0f} s ago"
    return f"{stamp} ({away})"
