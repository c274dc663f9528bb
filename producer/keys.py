"""Every Redis key: its name, type, life and writer. Nothing else spells a key.

RQ's own keys keep RQ's names, under RQ's configurable prefix P (`rq.defaults.RQ_KEY_PREFIX`). Ours
live beside them under `P:x:`. "Scripts" are the Lua files of `producer/lua` and `worker/lua`, which
build the same names from the same prefix (`lib.lua`).

RQ's                          type    content, life
P:queues                      set     queue keys; for ever
P:queue:L                     list    waiting job ids; one per list L (below)
P:job:ID                      hash    the job; while alive for ever, then the result's TTL
P:results:ID                  stream  the result; as the job
P:wip:L                       zset    `ID:EXEC` running, score +inf (only our reaper may touch them)
P:finished|failed|canceled:L  zset    terminal ids; score = the hash's expiry + REGISTRY_SLACK
P:scheduled:L                 zset    ids that wait for a time, score = Unix seconds
P:deferred:L, P:ready:L       zset    RQ's dependents
P:execution:ID:EXEC           hash    one delivery; written and deleted with the next
P:executions:ID               zset    EXEC of the job
P:worker:NAME[:executions]    hash,set  a worker and what it runs; TTL renewed by heartbeat
P:workers, P:workers:L        set     worker keys
P:pubsub:NAME                 channel commands to a worker (stop-job, stop-execution)

Ours                          type    content                                life          writer
P:x:lease:Q                   zset    `ID:EXEC` -> deadline of the lease     running       scripts
P:x:n:Q                       hash    counters (COUNTERS)                    for ever      scripts
P:x:ghost                     hash    L -> ids in the list that wait no more for ever      scripts
P:x:last:NAME                 string  last claim, for a lost reply           300 s         claim
P:x:deadline:Q                zset    id -> Unix deadline                    until it ends scripts
P:x:tenants:Q                 zset    active tenant -> tokens served         active        scripts
P:x:served:Q                  zset    idle tenant still in debt -> tokens    until level   scripts
P:x:broken:Q                  list    ids whose record can't be read         1,000 last    scripts
P:x:turn:Q                    string  worker emptying itself for a suspect   60 s          claim
P:x:dead:Q                    zset    dead-letter ids, score = when          failure TTL   scripts
P:x:history:ID                list    JSON lines: crashes, failed attempts   as the job    scripts
P:x:batch:B                   hash    manifest and counters                  14 d, renewed scripts
P:x:batch:B:done              list    finished ids in order of completion    as the batch  scripts
P:x:batches                   zset    batch id -> created                    for ever      enqueue
P:x:outbox                    list    ids whose dependents or callbacks wait until done    scripts
P:x:facts:NAME                hash    what a worker serves, its state        FACTS_TTL     worker
P:x:rates:Q                   hash    a worker's last measured rates, start  RATES_TTL     worker

Q is a queue as users name it. L is one of its lists: RQ queues that share Q's jobs by priority and
tenant: `Q.high`, `Q`, `Q.low`, each also with `@TENANT`; `Q.suspect` holds jobs that were in flight
when a worker died.
"""

import importlib.util
import re
from typing import Final, Literal

from headrace.producer.errors import InvalidName

Priority = Literal["high", "normal", "low"]


def _rq_key_prefix() -> str:
    """`rq.defaults.RQ_KEY_PREFIX` from that file alone: importing the package would also import
    RQ's workers and servers, 0.1 s that a web service need not pay."""
    package = importlib.util.find_spec("rq")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("headrace needs the package rq (>=3.0,<4)", name="rq")
    path = package.submodule_search_locations[0] + "/defaults.py"
    spec = importlib.util.spec_from_file_location("_headrace_rq_defaults", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"rq has no {path}", name="rq.defaults")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.RQ_KEY_PREFIX)


PREFIX: Final = _rq_key_prefix()
OURS: Final = PREFIX + ":x:"

RESULT_TTL: Final = 24 * 3600
FAILURE_TTL: Final = 14 * 24 * 3600
REGISTRY_SLACK: Final = 600
FACTS_TTL: Final = 90
RATES_TTL: Final = 30 * 24 * 3600

PRIORITIES: Final[tuple[Priority, ...]] = ("high", "normal", "low")
SUSPECT_SUFFIX: Final = ".suspect"

COUNTERS: Final = {
    "accepted": "jobs taken in by our ENQUEUE, less those moved to another queue",
    "succeeded": "jobs that ended with an answer",
    "failed": "jobs that ended with a failure of their own (dead ones too)",
    "expired": "jobs whose deadline passed",
    "cancelled": "jobs cancelled or stopped",
    "dead": "jobs given up after crashes or attempts",
    "retried": "failed attempts that are tried again",
    "lapsed": "leases that ran out",
    "fenced": "late results refused",
    "released": "jobs put back uncharged",
    "resumed": "deliveries that carried a checkpoint",
    "requeued": "failed jobs given another start",
    "removed": "terminal jobs whose record has gone (TTL, forget)",
    "deleted": "jobs deleted by RQ's own commands while they ran",
    "duplicates": "ids dropped because the job was running or done",
    "broken": "records that no script could read",
    "prompt_tokens": "estimate of outstanding prompt tokens, uncalibrated",
    "output_tokens": "estimate of outstanding output tokens, uncalibrated",
    "level": "tokens served to the least served tenant that had jobs waiting",
    "bytes": "payload bytes of outstanding jobs",
    "done_est_prompt": "estimate of finished jobs' prompt tokens, to calibrate by",
    "done_est_output": "estimate of finished jobs' output tokens, to calibrate by",
    "done_prompt": "prompt tokens that workers counted",
    "done_output": "output tokens that workers counted",
}

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_QUEUE = re.compile(r"[A-Za-z0-9_./-]{1,128}")
_TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RESERVED = (".high", ".low", SUSPECT_SUFFIX)


def check_id(kind: str, value: str) -> str:
    """`value`, or InvalidName: ids are `[A-Za-z0-9_-]`, 1 to 128 of them."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise InvalidName(f"{kind} {value!r:.80} must be 1 to 128 of A-Z a-z 0-9 _ -")
    return value


def check_queue(value: str) -> str:
    """`value`, or InvalidName: the suffixes of our lists are reserved."""
    if not isinstance(value, str) or not _QUEUE.fullmatch(value) or value.endswith(_RESERVED):
        raise InvalidName(
            f"queue {value!r:.80} must be 1 to 128 of A-Z a-z 0-9 _ . / - and must not end in "
            + ", ".join(_RESERVED)
        )
    return value


def list_name(queue: str, priority: Priority = "normal", tenant: str | None = None) -> str:
    """The list (RQ queue) of one priority class and tenant."""
    if priority not in PRIORITIES:
        raise InvalidName(f"priority {priority!r} must be one of {', '.join(PRIORITIES)}")
    name = queue if priority == "normal" else f"{queue}.{priority}"
    if tenant is None:
        return name
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise InvalidName(f"tenant {tenant!r:.80} must be 1 to 64 of A-Z a-z 0-9 _ -")
    return f"{name}@{tenant}"


def queue_of(name: str) -> str:
    """The queue that a list belongs to."""
    base = name.partition("@")[0]
    for suffix in _RESERVED:
        base = base.removesuffix(suffix)
    return base


def priority_of(name: str) -> Priority:
    base = name.partition("@")[0]
    return "high" if base.endswith(".high") else "low" if base.endswith(".low") else "normal"


def tenant_of(name: str) -> str | None:
    return name.partition("@")[2] or None


def queues() -> str:
    return f"{PREFIX}:queues"


def queue_list(name: str) -> str:
    return f"{PREFIX}:queue:{name}"


def job(job_id: str) -> str:
    return f"{PREFIX}:job:{job_id}"


def results(job_id: str) -> str:
    return f"{PREFIX}:results:{job_id}"


def registry(kind: str, name: str) -> str:
    """`kind`: wip, finished, failed, canceled, scheduled, deferred or ready."""
    return f"{PREFIX}:{kind}:{name}"


def execution(job_id: str, execution_id: str) -> str:
    return f"{PREFIX}:execution:{job_id}:{execution_id}"


def worker(name: str) -> str:
    return f"{PREFIX}:worker:{name}"


def worker_executions(name: str) -> str:
    return f"{PREFIX}:worker:{name}:executions"


def workers() -> str:
    return f"{PREFIX}:workers"


def lease(queue: str) -> str:
    return f"{OURS}lease:{queue}"


def counters(queue: str) -> str:
    return f"{OURS}n:{queue}"


def ghosts() -> str:
    return f"{OURS}ghost"


def deadlines(queue: str) -> str:
    return f"{OURS}deadline:{queue}"


def tenants(queue: str) -> str:
    return f"{OURS}tenants:{queue}"


def turn(queue: str) -> str:
    return f"{OURS}turn:{queue}"


def dead(queue: str) -> str:
    return f"{OURS}dead:{queue}"


def history(job_id: str) -> str:
    return f"{OURS}history:{job_id}"


def batch(batch_id: str) -> str:
    return f"{OURS}batch:{batch_id}"


def batch_done(batch_id: str) -> str:
    return f"{OURS}batch:{batch_id}:done"


def batches() -> str:
    return f"{OURS}batches"


def outbox() -> str:
    return f"{OURS}outbox"


def facts(name: str) -> str:
    return f"{OURS}facts:{name}"


def rates(queue: str) -> str:
    return f"{OURS}rates:{queue}"
