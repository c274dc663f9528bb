"""The queue alone: how fast jobs go through Redis when the engine takes no time, and what they
weigh there.

A worker claims 64, answers at once, finishes 64. The same jobs then go through RQ's own
SimpleWorker in the same run, so that the ratio holds on any machine. Run as
`python -m headrace.worker.bench.queue`; figures go to build/bench/queue.json.
"""

import argparse
import json
import logging
import platform
import random
import statistics
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import rq

from headrace.producer import Client, codec
from headrace.producer.redis_server import PrivateRedis
from headrace.producer.schemas import Choice, Result, Usage
from headrace.worker.lease import RedisSource
from headrace.worker.source import ClaimedJob, Outcome, OutcomeKind

QUEUE = "bench"
GROUP = 64
ANSWER = "Good morning to all of you"
SHARED = (
    "You are a careful assistant of a shop for garden tools. Answer in one sentence, name the "
    "article number when you know it, never promise a delivery date, and send every question about "
    "invoices to the office. The customer writes: "
)


class CountingRedis(redis.Redis):
    """A client that counts its round trips."""

    trips = 0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        self.trips += 1
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


def prompts(count: int) -> list[str]:
    """Prompts of 326 bytes: 226 of English in common, 100 of random letters and spaces."""
    source = random.Random(7)
    letters = string.ascii_lowercase + "     "
    head = SHARED[:226].ljust(226)
    return [head + "".join(source.choices(letters, k=100)) for _ in range(count)]


def encoded_answer() -> bytes:
    """A result as the worker writes it."""
    result = Result(
        job_id="any",
        model=QUEUE,
        choices=[Choice(index=0, text=ANSWER, finish_reason="stop")],
        usage=Usage(prompt_tokens=80, completion_tokens=7),
    )
    return codec.encode_result(result)


RESULT = encoded_answer()


def answer(job: ClaimedJob) -> Outcome:
    """What an engine that takes no time would deliver."""
    return Outcome(job, OutcomeKind.SUCCEEDED, RESULT, 80, 7)


def noop(request: dict[str, Any]) -> dict[str, Any]:
    """The same for RQ's SimpleWorker."""
    return {"text": ANSWER}


def run_ours(url: str, count: int) -> dict[str, float]:
    """Jobs a second through claim and finish, and how many round trips a group took."""
    client = Client(url, queue=QUEUE)
    client.redis.flushall()
    started = time.perf_counter()
    client.submit_many(prompts(count), max_tokens=16)
    enqueued = time.perf_counter() - started
    client.submit_many(prompts(GROUP), max_tokens=16)
    connections: list[CountingRedis] = []

    def connect() -> redis.Redis:
        client = CountingRedis(connection_pool=redis.ConnectionPool.from_url(url))
        connections.append(client)
        return client

    source = RedisSource(connect, [QUEUE])
    source.start()
    # The first group also loads the scripts into this server.
    source.finish([answer(job) for job in source.claim(GROUP, 1.0)])
    before = sum(c.trips for c in connections)
    done = groups = 0
    started = time.perf_counter()
    while done < count:
        jobs = source.claim(GROUP, 1.0)
        source.finish([answer(job) for job in jobs])
        done += len(jobs)
        groups += 1
    seconds = time.perf_counter() - started
    trips = sum(c.trips for c in connections) - before
    source.unregister()
    source.close()
    client.close()
    return {
        "jobs_per_second": count / seconds,
        "enqueued_per_second": count / enqueued,
        "round_trips_per_group": trips / groups,
    }


def run_simple_worker(url: str, count: int) -> float:
    """Jobs a second of RQ's SimpleWorker, the fastest of its workers, on the same payloads."""
    connection = redis.Redis.from_url(url)
    connection.flushall()
    queue = rq.Queue(QUEUE, connection=connection, serializer="json")
    queue.enqueue_many(
        [
            rq.Queue.prepare_data(
                "headrace.worker.bench.queue.noop",
                args=({"prompt": prompt, "max_tokens": 16},),
                description="generate",
            )
            for prompt in prompts(count)
        ]
    )
    worker = rq.SimpleWorker([queue], connection=connection, serializer="json")
    worker.log_job_description = False
    started = time.perf_counter()
    worker.work(burst=True, logging_level="ERROR")
    seconds = time.perf_counter() - started
    connection.close()
    return count / seconds


def weigh(url: str, count: int = 4000) -> dict[str, float]:
    """Bytes of Redis' memory a job takes, queued and finished with a short answer."""
    client = Client(url, queue=QUEUE)
    client.redis.flushall()

    def used() -> int:
        return int(client.redis.info("memory")["used_memory"])

    source = RedisSource.from_url(url, [QUEUE])
    source.start()
    # The scripts and a first job's keys are not a job's own weight.
    client.submit_many(prompts(GROUP), max_tokens=16)
    source.finish([answer(job) for job in source.claim(GROUP, 1.0)])
    empty = used()
    client.submit_many(prompts(count), max_tokens=16)
    queued = used()
    done = 0
    while done < count:
        jobs = source.claim(GROUP, 1.0)
        source.finish([answer(job) for job in jobs])
        done += len(jobs)
    finished = used()
    source.unregister()
    source.close()
    client.close()
    return {
        "bytes_per_queued_job": (queued - empty) / count,
        "bytes_per_finished_job": (finished - empty) / count,
    }


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """The given Redis, else a private one on loopback with our settings."""
    if url is not None:
        yield url
        return
    with PrivateRedis(tcp=True) as private:
        yield private.url


def measure(url: str, jobs: int, stock_jobs: int, rounds: int) -> dict[str, Any]:
    """Medians over `rounds`, ours and RQ's in turns."""
    ours, stock = [], []
    for _ in range(rounds):
        ours.append(run_ours(url, jobs))
        stock.append(run_simple_worker(url, stock_jobs))
    figures: dict[str, Any] = {
        name: statistics.median(run[name] for run in ours) for name in ours[0]
    }
    figures["jobs_per_second_of_each_round"] = [run["jobs_per_second"] for run in ours]
    figures["simple_worker_jobs_per_second"] = statistics.median(stock)
    figures["ratio_to_simple_worker"] = figures["jobs_per_second"] / statistics.median(stock)
    figures |= weigh(url)
    connection = redis.Redis.from_url(url)
    figures["redis"] = connection.info("server")["redis_version"]
    figures["rq"] = rq.VERSION
    figures["jobs"], figures["rounds"] = jobs, rounds
    figures["machine"] = {"cpu": platform.processor(), "python": platform.python_version()}
    connection.close()
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="headrace.worker.bench.queue", description=__doc__)
    parser.add_argument("--redis-url", help="a Redis that may be emptied; default: a private one")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--stock-jobs", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/bench/queue.json"))
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    with server(options.redis_url) as url:
        figures = measure(url, options.jobs, options.stock_jobs, options.rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(
        f"queue alone: {figures['jobs_per_second']:,.0f} jobs/s in groups of {GROUP}, "
        f"{figures['round_trips_per_group']:.2f} round trips a group, "
        f"{figures['ratio_to_simple_worker']:.0f} times RQ's SimpleWorker "
        f"({figures['simple_worker_jobs_per_second']:,.0f} jobs/s); "
        f"{figures['enqueued_per_second']:,.0f} jobs/s enqueued; "
        f"{figures['bytes_per_queued_job']:,.0f} B a queued job, "
        f"{figures['bytes_per_finished_job']:,.0f} B a finished one"
    )


if __name__ == "__main__":
    main()
