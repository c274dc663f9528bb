"""Hands for tests of the queue: a client, workers without an engine, answers, a clock, a census."""

from collections.abc import Iterable
from dataclasses import replace

from headrace.producer import Client, codec, health
from headrace.producer.schemas import Choice, Result
from headrace.worker.lease import RedisSource
from headrace.worker.lease_settings import LeaseSettings
from headrace.worker.source import ClaimedJob, FinishCode, Outcome, OutcomeKind

QUEUE = "tiny"


def new_client(url: str, **settings: object) -> Client:
    return Client(url, queue=QUEUE, **settings)


class Clock:
    """Redis' time, moved by hand: give its clients and sources `clock.text`, then `advance`."""

    def __init__(self, client: Client) -> None:
        seconds, micros = client.redis.time()
        self.now = seconds + micros / 1e6
        self.clients: list[Client] = []
        self.sources: list[RedisSource] = []

    def drive(self, *things: Client | RedisSource) -> None:
        for thing in things:
            (self.clients if isinstance(thing, Client) else self.sources).append(thing)
        self._set()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self._set()

    def _set(self) -> None:
        for thing in [*self.clients, *self.sources]:
            thing.settings = replace(thing.settings, clock=f"{self.now:.6f}")


def new_source(url: str, *queues: str, start: bool = True, **settings: object) -> RedisSource:
    source = RedisSource.from_url(url, list(queues) or [QUEUE], settings=LeaseSettings(**settings))
    if start:
        source.start()
    return source


def crash(source: RedisSource) -> None:
    """The worker is gone and its leases have run out, as far as Redis can tell."""
    for job in source.held:
        source._redis.zadd(
            f"rq:x:lease:{job.queue.partition('@')[0].removesuffix('.high').removesuffix('.low')}",
            {f"{job.job_id}:{job.execution_id}": 0},
            xx=True,
        )


def success(job: ClaimedJob, text: str = "an answer") -> Outcome:
    result = Result(job_id=job.job_id, choices=[Choice(index=0, text=text, finish_reason="stop")])
    return Outcome(job, OutcomeKind.SUCCEEDED, codec.encode_result(result), 5, 7)


def failure(job: ClaimedJob, kind: OutcomeKind = OutcomeKind.FAILED, code: str = "boom") -> Outcome:
    result = codec.failed(job.job_id, code, "it broke", retryable=kind is OutcomeKind.RETRY)
    return Outcome(job, kind, codec.encode_result(result))


def finish_all(source: RedisSource, jobs: Iterable[ClaimedJob]) -> list[FinishCode]:
    return source.finish([success(job) for job in jobs])


def balance(client: Client, queue: str = QUEUE) -> int:
    """0 when every accepted job is in exactly one place."""
    return client.run(health.census(queue, client.settings)).balance
