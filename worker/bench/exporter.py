"""What a scrape costs when the queue is deep: the real exporter on a short and on a deep queue.

Two private Redis servers, two exporters, scraped in turns over HTTP, so that whatever else the
machine does falls on both. A tenth of the jobs have a deadline, a hundredth are scheduled. Run as
`python -m headrace.worker.bench.exporter`; figures go to build/bench/exporter.json.
"""

import argparse
import json
import logging
import platform
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from headrace.producer import Client
from headrace.producer.redis_server import PrivateRedis
from headrace.worker.bench.machine import describe_cpu
from headrace.worker.depth import Assumed
from headrace.worker.exporter import make_server
from headrace.worker.http import HttpServer

QUEUE = "bench"
CHUNK = 10_000


def fill(url: str, jobs: int) -> None:
    """That many jobs of the queue, 1 % scheduled, 10 % of the others with a deadline."""
    soon, late = time.time() + 30.0, time.time() + 3600.0
    with Client(url, queue=QUEUE) as client:
        for start in range(0, jobs, CHUNK):
            count = min(CHUNK, jobs - start)
            groups: tuple[tuple[int, dict[str, Any]], ...] = (
                (count // 100, {"start_at": soon}),
                (count // 10, {"deadline": late}),
                (count - count // 100 - count // 10, {}),
            )
            for number, settings in groups:
                if number:
                    client.submit_many(["a prompt"] * number, max_tokens=16, **settings)


class Scraped:
    """An exporter on a Redis of its own that holds `jobs` jobs."""

    def __init__(self, redis: PrivateRedis, jobs: int) -> None:
        fill(redis.url, jobs)
        self.jobs = jobs
        self.seconds: list[float] = []
        self._server: HttpServer = make_server(redis.url, "127.0.0.1", 0, (QUEUE,), Assumed())
        self._server.start()
        self._url = "http://{}:{}/metrics".format(*self._server.address)

    def scrape(self) -> str:
        started = time.perf_counter()
        with urllib.request.urlopen(self._url, timeout=30) as answer:
            text: str = answer.read().decode()
        self.seconds.append(time.perf_counter() - started)
        return text

    def told(self) -> int:
        """Jobs that the exporter counts, in all states."""
        lines = [x for x in self.scrape().splitlines() if x.startswith("headrace_queue_jobs{")]
        return round(sum(float(line.rpartition(" ")[2]) for line in lines))

    def stop(self) -> None:
        self._server.stop()


def measure(short: int, deep: int, scrapes: int) -> dict[str, Any]:
    """Medians of `scrapes` scrapes of each, and their ratio."""
    with PrivateRedis() as first, PrivateRedis() as second:
        queues = [Scraped(first, short), Scraped(second, deep)]
        for queue in queues:
            if queue.told() != queue.jobs:
                raise RuntimeError(f"the exporter tells {queue.told()} jobs of {queue.jobs}")
            queue.seconds.clear()
        for _ in range(scrapes):
            for queue in queues:
                queue.scrape()
        medians = [statistics.median(queue.seconds) for queue in queues]
        for queue in queues:
            queue.stop()
    return {
        "jobs": [short, deep],
        "scrapes": scrapes,
        "scrape_seconds": medians,
        "ratio": medians[1] / medians[0],
        "machine": {"cpu": describe_cpu(), "python": platform.python_version()},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="headrace.worker.bench.exporter", description=__doc__)
    parser.add_argument("--short", type=int, default=1_000)
    parser.add_argument("--deep", type=int, default=1_000_000)
    parser.add_argument("--scrapes", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/bench/exporter.json"))
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    figures = measure(options.short, options.deep, options.scrapes)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n")
    short, deep = (1000 * seconds for seconds in figures["scrape_seconds"])
    print(
        f"exporter: a scrape takes {short:.2f} ms with {options.short:,} jobs, {deep:.2f} ms with "
        f"{options.deep:,}: {figures['ratio']:.2f} times"
    )


if __name__ == "__main__":
    main()
