"""A service to measure: a private Redis with a worker process of its own, or one that runs."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from headrace.producer import Client
from headrace.producer.local import LocalWorker, WorkerOptions
from headrace.producer.redis_server import PrivateRedis
from headrace.worker.bench.side_by_side import FLOATS

QUEUE = "bench"


@dataclass(frozen=True, slots=True)
class Service:
    """`watch` is to be called now and then: a private worker that has died is started again."""

    client: Client
    queue: str | None
    watch: Callable[[], object]
    description: str


@contextmanager
def private_service(
    model: str, *, dtype: str, threads: int, arguments: tuple[str, ...] = ()
) -> Iterator[Service]:
    """Ready to answer when entered; gone when left. Raises WorkerFailed with the log's end."""
    how = ("--dtype", dtype) if dtype in FLOATS else ("--quantization", dtype)
    options = WorkerOptions(
        model, QUEUE, (*how, "--num-threads", str(threads), "--port", "0", *arguments)
    )
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        with PrivateRedis() as server, Client(server.url) as client:
            worker = LocalWorker(options, server.url, folder / "worker.log", folder=folder)
            try:
                worker.watch()
                while not any(info.state == "ready" for info in client.workers()):
                    worker.watch()
                    time.sleep(0.05)
                worker.progressed()
                yield Service(client, QUEUE, worker.watch, f"a private worker, {dtype}")
            finally:
                worker.stop(10.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_service(redis_url: str, queue: str | None) -> Iterator[Service]:
    """One that others operate. Raises ClickException when no live worker could answer."""
    with Client(redis_url) as client:
        workers = [info for info in client.workers() if queue is None or queue in info.queues]
        if not workers:
            serves = f" serves the queue {queue!r}" if queue else " is there"
            raise click.ClickException(
                f"no live worker{serves}: start `headrace worker`, or leave out --redis-url to"
                " measure a private one"
            )
        names = sorted({info.model for info in workers})
        yield Service(
            client, queue, lambda: None, f"{len(workers)} running workers of {', '.join(names)}"
        )
