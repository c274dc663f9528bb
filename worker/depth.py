"""How deep the queues are: one constant-time read of Redis, and what autoscaling makes of it.

`DepthReader` asks (one script and INFO, one round trip); `QueueDepth` is what one queue answered.
It satisfies `autoscale.policy.QueueView`, so the exporter and the simulator measure with the same
objects. Knows neither Prometheus nor HTTP.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import redis

from headrace.producer import connection, keys, scripts
from headrace.producer.errors import RedisUnavailable
from headrace.worker.autoscale.required import Capacity, Due, Required, replicas_required
from headrace.worker.metrics import DEADLINE_HORIZONS


@dataclass(frozen=True, slots=True)
class Assumed:
    """What holds while no worker has told better: tokens a second, seconds, slots.

    Rates of 0 mean unknown: then any outstanding work asks for one worker, which will measure.
    `acceptable_wait`: within what a job without a deadline should be done.
    """

    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    cold_start: float = 60.0
    acceptable_wait: float = 600.0
    max_replicas: int = 100


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One live worker as its facts tell."""

    name: str
    model: str
    state: str
    queues: tuple[str, ...]
    slots: int
    prefill_rate: float
    decode_rate: float
    cold_start: float
    age: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What some worker of the queue last measured, and how many seconds ago it said so."""

    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    cold_start: float = 0.0
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """One queue at one moment. Counts are jobs; ghosts (cancelled ids) are already taken off."""

    queue: str
    pending: int = 0
    scheduled: int = 0
    scheduled_due: int = 0
    running: int = 0
    deferred: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    dead: int = 0
    accepted: int = 0
    oldest_age: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    deadlines: tuple[int, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    last: Measured = Measured()
    assumed: Assumed = field(default_factory=Assumed)

    @property
    def outstanding(self) -> int:
        return self.pending + self.running + self.scheduled_due

    @property
    def rates(self) -> tuple[float, float]:
        """Prefill and decode tokens a second of one worker: the mean of those that measured; with
        none there, what the last one left; else what is assumed."""
        last, assumed = self.last, self.assumed
        prefill = [w.prefill_rate for w in self.workers if w.prefill_rate > 0]
        decode = [w.decode_rate for w in self.workers if w.decode_rate > 0]
        return (
            sum(prefill) / len(prefill) if prefill else last.prefill_rate or assumed.prefill_rate,
            sum(decode) / len(decode) if decode else last.decode_rate or assumed.decode_rate,
        )

    @property
    def cold_start(self) -> float:
        known = [w.cold_start for w in self.workers if w.cold_start > 0]
        return max(known, default=self.last.cold_start or self.assumed.cold_start)

    @property
    def work_seconds(self) -> float:
        """Seconds that one worker needs for all that is outstanding; NaN while no rate is known."""
        prefill, decode = self.rates
        if not prefill or not decode:
            return math.nan
        return self.prompt_tokens / prefill + self.output_tokens / decode

    def due(self) -> list[Due]:
        """Outstanding work by deadline; jobs without one fall due at the acceptable wait."""
        jobs = self.outstanding
        if not jobs or math.isnan(self.work_seconds):
            return []
        each = self.work_seconds / jobs
        found: list[Due] = []
        counted = 0
        for horizon, reached in zip(DEADLINE_HORIZONS, self.deadlines, strict=False):
            new = min(reached, jobs) - counted
            if new > 0:
                within = float(horizon) if horizon != "+Inf" else self._last_horizon()
                found.append(Due(within, each * new, new))
                counted += new
        if jobs > counted:
            found.append(Due(self._wait(), each * (jobs - counted), jobs - counted))
        return found

    def capacity(self) -> Capacity:
        """Rate 1: the work is in worker seconds. Draining workers are no capacity."""
        loading = tuple(
            max(0.0, self.cold_start - w.age) for w in self.workers if w.state == "loading"
        )
        ready = sum(w.state == "ready" for w in self.workers)
        return Capacity(ready, loading, self.cold_start, 1.0)

    def required(self) -> Required:
        """The workers that the deadlines and the acceptable wait ask for."""
        if not self.outstanding:
            return Required(0)
        if math.isnan(self.work_seconds):
            return Required(max(1, sum(w.state != "draining" for w in self.workers)))
        required = replicas_required(
            self.due(),
            self.capacity(),
            max_replicas=self.assumed.max_replicas,
            catch_up_s=self._wait(),
        )
        # Rounding to nothing must not strand the last job.
        replicas = max(1, required.replicas)
        return Required(replicas, required.missed_jobs, required.missed_work, required.horizon_s)

    def _wait(self) -> float:
        """Never shorter than a cold start: no worker could keep it."""
        return max(self.assumed.acceptable_wait, 1.5 * self.cold_start)

    def _last_horizon(self) -> float:
        return 2 * float(DEADLINE_HORIZONS[-2])


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything one read of Redis tells."""

    queues: Mapping[str, QueueDepth]
    workers: tuple[WorkerView, ...]
    memory_bytes: int
    memory_limit_bytes: int
    seconds: float


class DepthReader:
    """Reads all queues at once. Raises RedisUnavailable, after one try: a scrape must not hang."""

    def __init__(
        self, url: str, queues: Sequence[str] = (), assumed: Assumed | None = None
    ) -> None:
        self._client: Any = connection.connect(url, socket_timeout=3.0)
        self._queues = tuple(queues)
        self._assumed = assumed or Assumed()
        self._script = scripts.load("headrace.worker", "depth")

    def read(self, *, clock: str = "") -> Reading:
        started = time.perf_counter()
        arguments: tuple[scripts.Argument, ...] = (
            clock,
            self._assumed.cold_start,
            len(DEADLINE_HORIZONS),
            *DEADLINE_HORIZONS,
            *self._queues,
        )
        try:
            reply, info = self._ask(arguments)
        except (redis.exceptions.RedisError, OSError) as error:
            raise RedisUnavailable(f"Redis does not answer: {error}") from error
        return self._parse(orjson.loads(reply), info, time.perf_counter() - started)

    def close(self) -> None:
        self._client.close()

    def _ask(self, arguments: tuple[scripts.Argument, ...]) -> tuple[bytes, dict[str, Any]]:
        for _ in range(2):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.execute_command("EVALSHA", self._script.sha, 1, keys.queues(), *arguments)
            pipeline.info("memory")
            reply, info = pipeline.execute(raise_on_error=False)
            if isinstance(reply, redis.exceptions.NoScriptError):
                self._client.execute_command("SCRIPT", "LOAD", self._script.text)
                continue
            break
        for answer in (reply, info):
            if isinstance(answer, Exception):
                raise answer
        return reply, info

    def _parse(self, document: dict[str, Any], info: dict[str, Any], seconds: float) -> Reading:
        now = float(document["now"])
        workers = tuple(_worker(facts, now) for facts in document["workers"] if facts["name"])
        found = document["queues"] or {}
        queues = {
            name: self._queue(name, raw, tuple(w for w in workers if name in w.queues), now)
            for name, raw in sorted(found.items())
        }
        return Reading(
            queues=queues,
            workers=workers,
            memory_bytes=int(info.get("used_memory", 0)),
            memory_limit_bytes=int(info.get("maxmemory", 0)),
            seconds=seconds,
        )

    def _queue(
        self, name: str, raw: dict[str, Any], workers: tuple[WorkerView, ...], now: float
    ) -> QueueDepth:
        counters = raw["counters"]
        return QueueDepth(
            queue=name,
            pending=max(0, raw["queued"]),
            scheduled=raw["scheduled"],
            scheduled_due=raw["due_soon"],
            running=raw["running"],
            deferred=raw["deferred"] + raw["ready"],
            finished=raw["finished"],
            failed=raw["failed"],
            cancelled=raw["canceled"],
            dead=raw["dead"],
            accepted=max(0, counters.get("accepted", 0)),
            oldest_age=raw["oldest"],
            prompt_tokens=_calibrated(counters, "prompt"),
            output_tokens=_calibrated(counters, "output"),
            deadlines=tuple(raw["deadlines"]),
            workers=workers,
            last=_measured(raw["rates"], now),
            assumed=self._assumed,
        )


def _calibrated(counters: Mapping[str, int], kind: str) -> int:
    """The outstanding estimate, scaled by what finished jobs really had to what was estimated."""
    estimate = max(0, counters.get(f"{kind}_tokens", 0))
    estimated = counters.get(f"done_est_{kind}", 0)
    counted = counters.get(f"done_{kind}", 0)
    return round(estimate * counted / estimated) if estimated > 0 and counted > 0 else estimate


def _measured(rates: Mapping[str, str], now: float) -> Measured:
    at = _number(rates, "at")
    return Measured(
        _number(rates, "prefill"),
        _number(rates, "decode"),
        _number(rates, "cold_start"),
        max(0.0, now - at) if at else 0.0,
    )


def _number(facts: Mapping[str, str], name: str) -> float:
    """A number that somebody wrote to Redis; 0 where it is none, or no finite one above 0."""
    try:
        value = float(facts.get(name, 0) or 0)
    except ValueError:
        return 0.0
    return value if 0 < value < math.inf else 0.0


def _worker(facts: Mapping[str, str], now: float) -> WorkerView:
    def number(name: str) -> float:
        return _number(facts, name)

    return WorkerView(
        name=facts["name"],
        model=facts.get("model", ""),
        state=facts.get("state", ""),
        queues=tuple(q for q in facts.get("queues", "").split(",") if q),
        slots=int(number("slots")),
        prefill_rate=number("prefill_tokens_per_second"),
        decode_rate=number("decode_tokens_per_second"),
        cold_start=number("cold_start_seconds"),
        age=max(0.0, now - number("started_at")),
    )
