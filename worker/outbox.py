"""What must follow a job's end outside the script that ended it: dependents and callbacks.

FINISH leaves the id in an outbox, in the same move as the result; any worker takes it from there
and removes it when done, so that a crash between the two repeats it: at least once. Callbacks are
importable names that whoever writes to Redis may choose, so none is run unless the operator has
allowed that very name. RQ's webhooks are never called.
"""

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

import redis

from headrace.producer import keys
from headrace.worker import rq_worker

log = logging.getLogger(__name__)

BATCH = 64
LONGEST = 5.0


class Outbox:
    def __init__(self, connection: redis.Redis, allowed: frozenset[str]) -> None:
        self._redis = connection
        self._callbacks: dict[str, Callable[..., Any]] = {name: _load(name) for name in allowed}

    def deliver(self) -> int:
        """Deal with what waits, within some seconds; how many."""
        done = 0
        end = time.monotonic() + LONGEST
        while time.monotonic() < end and (some := self._deliver_some()):
            done += some
        return done

    def _deliver_some(self) -> int:
        ids = self._redis.lrange(keys.outbox(), 0, BATCH - 1)
        for raw in ids:
            job_id = raw.decode() if isinstance(raw, bytes) else raw
            try:
                self._deliver_one(job_id)
            except (redis.exceptions.RedisError, OSError):
                raise
            except Exception:
                log.exception("what follows a job failed", extra={"job_id": job_id})
            self._redis.lrem(keys.outbox(), 1, job_id)
        return len(ids)

    def _deliver_one(self, job_id: str) -> None:
        success, failure = rq_worker.enqueue_dependents(self._redis, job_id)
        status = self._redis.hget(keys.job(job_id), "status")
        name = success if status == b"finished" else failure if status == b"failed" else ""
        if not name:
            return
        callback = self._callbacks.get(name)
        if callback is None:
            log.warning("callback %s is not allowed here; not run", name, extra={"job_id": job_id})
            return
        callback(job_id)


def _load(name: str) -> Callable[..., Any]:
    """A function the operator named; ImportError or AttributeError when there is none."""
    module, _, attribute = name.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function
