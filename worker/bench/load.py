"""Offers requests to a service as users would, and notes when each was due, sent and answered.

Open loop: Poisson arrivals at a rate, whatever the service does; closed loop: so many at a time. A
request's clock starts when it was due, not when it was sent, so a driver or a Redis that stalls is
not hidden (coordinated omission). Knows the client and no engine; `load_report` makes the figures.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.producer import Client
from headrace.producer.errors import QueueFull
from headrace.producer.operations import MANY
from headrace.producer.schemas import Result

POLL_SECONDS = 0.005
UNFINISHED = "unfinished"
NO_RECORD = "result_expired"
REFUSED = "queue_full"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`rate`: arrivals a second, None for a closed loop of `concurrency`. Arrivals end after
    `requests` or `duration` seconds, whichever is first (at least one is given); `drain`: seconds
    that the last answers are waited for."""

    rate: float | None = None
    concurrency: int = 8
    requests: int | None = None
    duration: float | None = None
    drain: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests is None and self.duration is None:
            raise ValueError("a load needs a number of requests or a duration")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"the arrival rate is {self.rate}; it must be above 0")

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start at which an open loop's requests are due: exponential gaps."""
        draw = random.Random(self.seed)
        at = 0.0
        for _ in range(self.requests) if self.requests is not None else itertools.count():
            at += draw.expovariate(self.rate or 1.0)
            if self.duration is not None and at > self.duration:
                return
            yield at


@dataclass(slots=True)
class Sample:
    """One request. Seconds from the run's start: `due`, `sent`, `ended` (None: no answer came).

    From the worker's own clock: `queued` from enqueue to claim; `first_token` and `worked` from the
    engine's taking it in to its first and last token.
    """

    due: float
    sent: float = 0.0
    ended: float | None = None
    queued: float = 0.0
    first_token: float = 0.0
    worked: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str = ""

    @property
    def queue_wait(self) -> float:
        return self.sent - self.due + self.queued

    @property
    def time_to_first_token(self) -> float:
        return self.queue_wait + self.first_token

    @property
    def inter_token(self) -> float | None:
        """The mean gap between this answer's tokens; None for an answer of one."""
        if self.output_tokens < 2:
            return None
        return (self.worked - self.first_token) / (self.output_tokens - 1)

    @property
    def total(self) -> float:
        """Due to answer read; infinite when there is none, so that it counts in a percentile."""
        return float("inf") if self.failure or self.ended is None else self.ended - self.due

    def answer(self, result: Result | None, now: float) -> None:
        self.ended = now
        if result is None:
            self.failure = NO_RECORD
            return
        if result.failure is not None:
            self.failure = result.failure.code
        if result.timing is not None:
            self.queued = result.timing.queued
            self.first_token = result.timing.first_token
            self.worked = result.timing.total
        self.prompt_tokens = result.usage.prompt_tokens
        self.output_tokens = result.usage.completion_tokens


@dataclass(frozen=True, slots=True)
class LoadRun:
    """`seconds` from the first arrival due to the last answer; `backlog`: requests under way when
    the last one had arrived; `arriving`: seconds until then."""

    plan: LoadPlan
    samples: Sequence[Sample]
    seconds: float
    arriving: float
    backlog: int


class LoadDriver:
    """Runs one plan. `requests` are the fields of `schemas.Request`, taken in turn again and again;
    `tick` is called about every `POLL_SECONDS`."""

    def __init__(
        self,
        client: Client,
        requests: Sequence[Mapping[str, Any]],
        plan: LoadPlan,
        *,
        queue: str | None,
        batch: str,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._client = client
        self._requests = itertools.cycle(requests)
        self._plan = plan
        self._queue = queue
        self._batch = batch
        self._tick = tick
        self._samples: list[Sample] = []
        self._open: dict[str, Sample] = {}
        self._cursor = 0
        self._started = 0.0

    def run(self) -> LoadRun:
        """Jobs that are not answered in time are cancelled; no record is left behind."""
        plan = self._plan
        self._started = time.perf_counter()
        arrivals = plan.arrivals() if plan.rate is not None else None
        due = next(arrivals, None) if arrivals is not None else None
        arriving: float | None = None
        backlog = 0
        try:
            while True:
                now = self._now()
                batch: list[float] = []
                if arrivals is not None:
                    while due is not None and due <= now:
                        batch.append(due)
                        due = next(arrivals, None)
                    done_arriving = due is None
                else:
                    batch = [now] * self._free(now)
                    done_arriving = self._left(now) == len(batch)
                self._send(batch)
                if done_arriving and arriving is None:
                    arriving, backlog = self._now(), len(self._open)
                self._read()
                self._tick()
                if arriving is not None and (not self._open or self._now() > arriving + plan.drain):
                    break
                pause = POLL_SECONDS
                if due is not None:
                    pause = min(pause, max(0.0, due - self._now()))
                time.sleep(pause)
        finally:
            self._clear()
        ends = [sample.ended for sample in self._samples if sample.ended is not None]
        first = min((sample.due for sample in self._samples), default=0.0)
        seconds = max(ends, default=self._now()) - first
        return LoadRun(plan, self._samples, seconds, (arriving or 0.0) - first, backlog)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _left(self, now: float) -> int:
        """Requests that a closed loop may still send."""
        plan = self._plan
        if plan.duration is not None and now >= plan.duration:
            return 0
        if plan.requests is None:
            return 1 << 30
        return plan.requests - len(self._samples)

    def _free(self, now: float) -> int:
        return max(0, min(self._plan.concurrency - len(self._open), self._left(now)))

    def _send(self, due: Sequence[float]) -> None:
        if not due:
            return
        first = len(self._samples)
        samples = [Sample(at) for at in due]
        ids = [f"{self._batch}-{first + index}" for index in range(len(due))]
        fields = list(itertools.islice(self._requests, len(due)))
        for sample in samples:
            sample.sent = self._now()
        accepted: set[str] = set(ids)
        try:
            self._client.submit_many(fields, job_ids=ids, queue=self._queue, batch=self._batch)
        except QueueFull as error:
            accepted = set(error.accepted)
        self._samples += samples
        for job_id, sample in zip(ids, samples, strict=True):
            if job_id in accepted:
                self._open[job_id] = sample
            else:
                sample.failure = REFUSED

    def _read(self) -> None:
        while self._open:
            done = self._client.completed(self._batch, self._cursor)
            now = self._now()
            self._cursor = done.cursor
            for job_id, result in done.items:
                sample = self._open.pop(job_id, None)
                if sample is not None:
                    sample.answer(result, now)
            if len(done.items) < MANY:
                return

    def _clear(self) -> None:
        unfinished = list(self._open)
        if unfinished:
            self._client.cancel_many(unfinished)
        for sample in self._open.values():
            sample.failure = UNFINISHED
        ids = [f"{self._batch}-{index}" for index in range(len(self._samples))]
        for start in range(0, len(ids), MANY):
            self._client.forget(ids[start : start + MANY])
