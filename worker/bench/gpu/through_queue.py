"""The same engine alone and behind the worker's serving loop: jobs in Redis where a Redis server is
at hand, else in memory. Submitting is done before the clock starts; leases, claims, checkpoints,
results and acknowledgements are all in it."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from headrace.engine.engine import Engine
from headrace.worker.bench.gpu.device import Device
from headrace.worker.bench.gpu.engines import about, complete, make_engine, small_work
from headrace.worker.bench.gpu.record import Record
from headrace.worker.bench.gpu.shapes import Work
from headrace.worker.bench.memory import MemorySource
from headrace.worker.drain import Drain
from headrace.worker.feeder import Serving
from headrace.worker.loop import ServingLoop
from headrace.worker.metrics import WorkerMetrics

QUEUE = "bench"
_NAME = "random"


def run(where: Device, record: Record) -> None:
    values, work = small_work(where, 256)
    engine = make_engine(where, values, work, slots=256)
    record.note(**about(engine))
    alone = work.output_tokens / complete(engine, work, "alone")
    record.add("engine alone", alone, "output tokens/s")
    try:
        seconds, queue = _through_redis(engine, work), "Redis"
    except _NoRedis as missing:
        record.note(redis=str(missing))
        seconds, queue = _through_memory(engine, work), "a queue in memory"
    served = work.output_tokens / seconds
    record.add(f"through {queue}", served, "output tokens/s", seconds=seconds)
    record.add(f"through {queue} against the engine alone", served / alone, "", at_least=0.95)


class _NoRedis(Exception):
    """Why there is none."""


def _fields(work: Work) -> list[dict[str, Any]]:
    return [
        {"prompt": list(prompt), "max_tokens": most, "temperature": 0, "ignore_eos": True}
        for prompt, most in zip(work.prompts, work.max_tokens, strict=True)
    ]


def _through_memory(engine: Engine, work: Work) -> float:
    source = MemorySource(json.dumps(fields).encode() for fields in _fields(work))
    count = len(work.prompts)
    with _serving(engine, source) as check:
        started = time.perf_counter()
        while not source.wait(count, 1.0):
            check()
        seconds = time.perf_counter() - started
    for outcome in source.results.values():
        if outcome.kind.value != "succeeded":
            raise RuntimeError(f"a job ended as {outcome.kind.value}: {outcome.result[:200]!r}")
    return seconds


def _through_redis(engine: Engine, work: Work) -> float:
    try:
        import redis

        from headrace.producer import Client
        from headrace.producer.errors import HeadraceError
        from headrace.producer.redis_server import PrivateRedis
        from headrace.worker.lease import RedisSource
        from headrace.worker.lease_settings import LeaseSettings
    except ImportError as error:
        raise _NoRedis(f"not installed: {error}") from error
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(PrivateRedis())
        except (HeadraceError, OSError) as error:
            raise _NoRedis(str(error)) from error
        client = stack.enter_context(Client(server.url))
        client.submit_many(_fields(work), queue=QUEUE, batch="measured")
        source = RedisSource(
            lambda: redis.Redis.from_url(server.url), [QUEUE], settings=LeaseSettings(lease=600.0)
        )
        source.start()
        done = 0
        cursor: Any = 0
        with _serving(engine, source) as check:
            started = time.perf_counter()
            while done < len(work.prompts):
                found = client.completed("measured", cursor)
                cursor = found.cursor
                done += len(found.items)
                if not found.items:
                    check()
                    time.sleep(0.02)
            return time.perf_counter() - started


@contextlib.contextmanager
def _serving(engine: Engine, source: Any) -> Iterator[Callable[[], None]]:
    """The worker's loop in a thread; the function raises what ended it."""
    drain = Drain(30.0)
    errors: list[BaseException] = []
    loop = ServingLoop(
        engine,
        source,
        source,
        Serving(_NAME, frozenset({_NAME}), engine.fingerprint),
        WorkerMetrics(_NAME),
        drain,
    )

    def serve() -> None:
        try:
            loop.run()
        except BaseException as error:
            errors.append(error)

    def check() -> None:
        if errors:
            raise errors[0]

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield check
    finally:
        drain.request("measured")
        thread.join(60)
        loop.courier.stop(10)
    check()
