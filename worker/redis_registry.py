"""Where a worker says that it lives and what it serves: RQ's books, and its facts beside them.

Knows no lease and no job.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import redis

from headrace.producer import connection, keys, operations, scripts
from headrace.worker.lease_calls import LeaseCalls
from headrace.worker.rq_worker import Registration
from headrace.worker.source import SourceUnavailable, WorkerFacts


class RedisRegistry:
    """`source.WorkerRegistry` on Redis. `enter` comes first; `stop_requested` is called from RQ's
    listening thread with a job's id and, if it is known, its execution's."""

    def __init__(
        self,
        connect: Callable[[], redis.Redis],
        calls: LeaseCalls,
        name: str,
        queues: Sequence[str],
        stop_requested: Callable[[str, str | None], None],
    ) -> None:
        self._connect = connect
        self._calls = calls
        self._name = name
        self._queues = tuple(queues)
        self._stop_requested = stop_requested
        self._registration: Registration | None = None

    def enter(self) -> None:
        """Enter RQ's books. SourceUnavailable when Redis can't be reached."""
        try:
            registration = Registration(
                self._connect, self._name, self._queues, self._stop_requested
            )
            registration.register()
        except redis.exceptions.RedisError as error:
            raise SourceUnavailable(str(connection.unavailable(error))) from error
        self._registration = registration

    def enter_again(self) -> None:
        """Redis has lost the books, or somebody took us out of them."""
        if self._registration is not None:
            self._calls.guard(self._registration.register_again)

    def announce(self, facts: WorkerFacts) -> None:
        """Publish what this worker serves and how it is; lapses when not repeated. What it measured
        stays with its queues, for the time when no worker is left to tell."""
        fields: dict[str, Any] = asdict(facts)
        fields["state"] = facts.state.value
        fields["queues"] = ",".join(facts.queues)
        pairs = [part for name, value in fields.items() for part in (name, str(value))]
        key = keys.facts(self._name)
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
        self._calls.send(scripts.Commands(tuple(commands)))

    def served_elsewhere(self, model: str | None, queue: str, wire_version: int) -> bool:
        """Whether another live worker that reads this queue could take such a job."""
        base = keys.queue_of(queue)
        return any(
            base in worker.queues
            and worker.state != "draining"
            and (model is None or worker.model == model)
            and int(worker.facts.get("wire_version", 1)) >= wire_version
            for worker in self._calls.run(operations.workers())
            if worker.name != self._name
        )

    def unregister(self) -> None:
        """Leave the books: this worker ends. Tries again for some seconds."""
        end = time.monotonic() + 3.0
        while True:
            try:
                self._calls.send(scripts.Commands((("DEL", keys.facts(self._name)),)))
                if self._registration is not None:
                    self._calls.guard(self._registration.unregister)
                    self._registration = None
                return
            except SourceUnavailable:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
