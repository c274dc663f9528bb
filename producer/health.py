"""Key sanity for `headrace doctor`: what in Redis contradicts what, and how to put it right.

`examine` reads beside working workers, so a finding may be a move under way: it looks twice, and
`repair` lets a script look again before it touches anything. Reads every job's status once with
SCAN: minutes for millions of jobs, never a block. Pure, like `operations`.
"""

import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.producer import keys, operations, scripts
from headrace.producer.operations import Steps
from headrace.producer.scripts import Commands, Eval, Pause

STEP: Final = 1000

EXPLANATIONS: Final = {
    "stray_lease": "a lease whose job is gone or is another worker's",
    "stray_run": "a running entry without a lease: nobody would ever take the job back",
    "nowhere": "a job whose status names a place in which it is not: it would wait for ever",
    "intermediate": "a job that one of RQ's own workers popped and never started",
    "ghosts": "the count of cancelled ids in a list is wrong: the depth shown is too",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One contradiction. `name`: the queue or list; `item`: the id or member it is about."""

    kind: str
    name: str
    item: str

    @property
    def text(self) -> str:
        return f"{self.name}: {self.item}: {EXPLANATIONS[self.kind]}"


@dataclass(frozen=True, slots=True)
class Census:
    """Where all jobs of a queue are. `balance` is 0 when none is lost or counted twice; stock
    enqueues count as accepted when first claimed, so those that still wait make it positive."""

    accepted: int
    waiting: int
    running: int
    scheduled: int
    deferred: int
    ready: int
    rate_limited: int
    finished: int
    failed: int
    cancelled: int
    removed: int

    @property
    def balance(self) -> int:
        return (
            self.waiting
            + self.running
            + self.scheduled
            + self.deferred
            + self.ready
            + self.rate_limited
            + self.finished
            + self.failed
            + self.cancelled
            + self.removed
            - self.accepted
        )


def census(queue: str, settings: operations.Settings) -> Steps[Census]:
    """The conservation law at one instant: one script reads everything."""
    reply = yield Eval(
        scripts.producer("census"), (keys.queues(),), (settings.clock, keys.check_queue(queue))
    )
    return Census(*(int(value) for value in reply))


def examine(queues: Sequence[str] | None = None) -> Steps[list[Finding]]:
    """Contradictions that two looks half a second apart both show."""
    first = set((yield from _look(queues)))
    if not first:
        return []
    yield Pause(0.5)
    second = yield from _look(queues)
    return [finding for finding in second if finding in first]


def repair(findings: Sequence[Finding], settings: operations.Settings) -> Steps[list[Finding]]:
    """Put findings right; those that were still wrong."""
    repaired = []
    for finding in findings:
        done = yield Eval(
            scripts.producer("repair"),
            (keys.queues(),),
            (settings.clock, finding.kind, finding.name, finding.item),
        )
        if done:
            repaired.append(finding)
    return repaired


def clock_difference() -> Steps[float]:
    """Seconds by which this machine's clock is ahead of Redis'. Leases use Redis' alone; deadlines
    come from producers, so a difference of seconds moves them."""
    before = time.time()
    (reply,) = yield Commands((("TIME",),))
    after = time.time()
    return (before + after) / 2 - (float(reply[0]) + float(reply[1]) / 1e6)


def _look(queues: Sequence[str] | None) -> Steps[list[Finding]]:
    found: list[Finding] = []
    (known,) = yield Commands((("SMEMBERS", keys.queues()),))
    prefix = keys.queue_list("")
    lists = sorted(_text(key).removeprefix(prefix) for key in known)
    lists = [name for name in lists if queues is None or keys.queue_of(name) in queues]
    bases = sorted({keys.queue_of(name) for name in lists})

    leases: set[str] = set()
    for base in bases:
        members = yield from _range("ZRANGE", keys.lease(base))
        leases.update(members)
        states = yield from _fields([member.rpartition(":")[0] for member in members])
        for member, (status, execution_id, _) in zip(members, states, strict=True):
            ours = execution_id == member.rpartition(":")[2]
            if not ours or status not in ("started", "queued"):
                found.append(Finding("stray_lease", base, member))

    running: set[str] = set()
    waiting: set[str] = set()
    for name in lists:
        (entries,) = yield Commands((("ZRANGE", keys.registry("wip", name), 0, -1, "WITHSCORES"),))
        for raw, score in _pairs(entries):
            member = _text(raw)
            running.add(member.rpartition(":")[0])
            if float(score) == float("inf") and member not in leases:
                found.append(Finding("stray_run", name, member))
        ids = yield from _range("LRANGE", keys.queue_list(name))
        waiting.update(ids)
        states = yield from _fields(ids)
        counted: Counter[str] = Counter(ids)
        ghosts = sum(1 for status, _, _ in states if status != "queued")
        ghosts += sum(
            n - 1 for job_id, n in counted.items() if n > 1 and job_id in _queued(ids, states)
        )
        (recorded,) = yield Commands((("HGET", keys.ghosts(), name),))
        if ghosts != int(recorded or 0):
            found.append(Finding("ghosts", name, str(ghosts)))
        stuck = yield from _range("LRANGE", keys.queue_list(name) + ":intermediate")
        found += [Finding("intermediate", name, job_id) for job_id in stuck]
        waiting.update(stuck)

    scheduled: set[str] = set()
    for name in lists:
        scheduled.update((yield from _range("ZRANGE", keys.registry("scheduled", name))))
    leased = {member.rpartition(":")[0] for member in leases}
    yield from _misplaced(set(bases), waiting, running | leased, scheduled, found)
    return found


def _misplaced(
    bases: set[str], waiting: set[str], running: set[str], scheduled: set[str], found: list[Finding]
) -> Steps[None]:
    """Jobs whose status names a place in which they are not."""
    places = {"queued": waiting, "started": running, "scheduled": scheduled}
    prefix = keys.job("")
    cursor = 0
    while True:
        (reply,) = yield Commands((("SCAN", cursor, "MATCH", prefix + "*", "COUNT", STEP),))
        cursor = int(reply[0])
        ids = [_text(key).removeprefix(prefix) for key in reply[1]]
        ids = [job_id for job_id in ids if ":" not in job_id]
        states = yield from _fields(ids)
        for job_id, (status, _, origin) in zip(ids, states, strict=True):
            queue = keys.queue_of(origin)
            if queue in bases and status in places and job_id not in places[status]:
                found.append(Finding("nowhere", queue, job_id))
        if cursor == 0:
            return


def _queued(ids: list[str], states: list[tuple[str, str, str]]) -> set[str]:
    return {
        job_id for job_id, (status, _, _) in zip(ids, states, strict=True) if status == "queued"
    }


def _range(command: str, key: str) -> Steps[list[str]]:
    """A whole list or sorted set, in stretches."""
    values: list[str] = []
    while True:
        (part,) = yield Commands(((command, key, len(values), len(values) + STEP - 1),))
        values += [_text(value) for value in part]
        if len(part) < STEP:
            return values


def _fields(ids: Sequence[str]) -> Steps[list[tuple[str, str, str]]]:
    """Status, execution and list of each job; empty where there is none, or no hash."""
    states: list[tuple[str, str, str]] = []
    for start in range(0, len(ids), STEP):
        some = ids[start : start + STEP]
        replies = yield Commands(
            tuple(("HMGET", keys.job(job_id), "status", "eid", "origin") for job_id in some)
        )
        for reply in replies:
            status, execution_id, origin = (_text(value) if value else "" for value in reply)
            states.append((status, execution_id, origin))
    return states


def _pairs(entries: Any) -> Generator[tuple[Any, Any], None, None]:
    """WITHSCORES' reply, flat or in pairs."""
    if entries and isinstance(entries[0], list | tuple):
        yield from (tuple(entry) for entry in entries)
    else:
        yield from zip(entries[::2], entries[1::2], strict=True)


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
