"""`headrace exporter`: the depth of the queues for Prometheus and, as JSON, for KEDA.

A small process without torch that is always there, because at zero workers there is nobody else to
tell. Each scrape is one constant-time read. While Redis is away it says so
(`headrace_queue_source_available 0`) and shows no depth at all: an unknown depth is not an empty
queue. It holds no state, so several may run (take `max by (queue)` over them).
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click
import orjson
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.producer.connection import redacted
from headrace.producer.errors import RedisUnavailable
from headrace.worker import http, logs, options
from headrace.worker.depth import Assumed, DepthReader, QueueDepth, Reading
from headrace.worker.metrics import (
    DEADLINE_HORIZONS,
    QUEUE_METRICS,
    STATES,
    TOKEN_KINDS,
    QueueMetric,
    build_info,
)
from headrace.worker.options import option
from headrace.worker.signals import SignalBox

log = logging.getLogger(__name__)


class QueueCollector(Collector):
    """Reads Redis at each scrape. `known` queues keep their series at 0 when empty."""

    def __init__(self, reader: DepthReader) -> None:
        self._reader = reader
        self._away = False

    def describe(self) -> Iterable[Metric]:
        return ()

    def read(self) -> Reading:
        """One reading; RedisUnavailable is logged once when it begins."""
        try:
            reading = self._reader.read()
        except RedisUnavailable as error:
            if not self._away:
                log.warning("%s; showing source_available 0 until it is back", error)
            self._away = True
            raise
        if self._away:
            log.info("Redis is back")
        self._away = False
        return reading

    def collect(self) -> Iterator[Metric]:
        available = _family(QUEUE_METRICS["source_available"])
        try:
            reading = self.read()
        except RedisUnavailable:
            available.add_metric([], 0)
            yield available
            return
        available.add_metric([], 1)
        yield available
        yield from _families(reading)


def _family(metric: QueueMetric) -> Any:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)


def _families(reading: Reading) -> Iterator[Metric]:
    families = {
        key: _family(metric) for key, metric in QUEUE_METRICS.items() if key != "source_available"
    }
    for depth in reading.queues.values():
        for key, labels, value in _samples(depth):
            families[key].add_metric([depth.queue, *labels], value)
    families["redis_memory"].add_metric([], reading.memory_bytes)
    families["redis_memory_limit"].add_metric([], reading.memory_limit_bytes)
    families["scrape_seconds"].add_metric([], reading.seconds)
    yield from families.values()


def _samples(depth: QueueDepth) -> Iterator[tuple[str, list[str], float]]:
    yield "jobs", ["queued"], depth.pending
    yield "jobs", ["scheduled"], depth.scheduled
    yield "jobs", ["running"], depth.running
    yield "outstanding_jobs", [], depth.outstanding
    yield "outstanding_tokens", ["prompt"], depth.prompt_tokens
    yield "outstanding_tokens", ["output"], depth.output_tokens
    yield "oldest_age", [], depth.oldest_age
    for horizon, count in zip(DEADLINE_HORIZONS, depth.deadlines, strict=False):
        yield "deadline_jobs", [horizon], count
    required = depth.required()
    yield "replicas_required", [], required.replicas
    yield "deadline_missed_jobs", [], required.missed_jobs
    for kind, rate in zip(TOKEN_KINDS, depth.rates, strict=True):
        yield "service_rate", [kind], rate
    yield "cold_start", [], depth.cold_start
    yield "rates_age", [], depth.last.age
    yield "dead_jobs", [], depth.dead
    yield "enqueued", [], depth.accepted
    for state in STATES:
        yield "workers", [state], sum(worker.state == state for worker in depth.workers)
    for status, count in (
        ("queued", depth.pending),
        ("started", depth.running),
        ("scheduled", depth.scheduled),
        ("deferred", depth.deferred),
        ("finished", depth.finished),
        ("failed", depth.failed),
        ("canceled", depth.cancelled),
    ):
        yield "rq_jobs", [status], count


def describe_queue(depth: QueueDepth) -> dict[str, Any]:
    """One queue for KEDA's metrics-api scaler: flat numbers first, details below."""
    required = depth.required()
    prefill, decode = depth.rates
    return {
        "queue": depth.queue,
        "outstanding_jobs": depth.outstanding,
        "outstanding_tokens": depth.prompt_tokens + depth.output_tokens,
        "replicas_required": required.replicas,
        "deadline_missed_jobs": required.missed_jobs,
        "oldest_job_age_seconds": depth.oldest_age,
        "dead_jobs": depth.dead,
        "jobs": {
            "queued": depth.pending,
            "scheduled": depth.scheduled,
            "running": depth.running,
            "finished": depth.finished,
            "failed": depth.failed,
            "cancelled": depth.cancelled,
        },
        "tokens": {"prompt": depth.prompt_tokens, "output": depth.output_tokens},
        "workers": {
            state: sum(worker.state == state for worker in depth.workers) for state in STATES
        },
        "rates": {
            "prefill_tokens_per_second": prefill,
            "decode_tokens_per_second": decode,
            "age_seconds": depth.last.age,
        },
        "cold_start_seconds": depth.cold_start,
    }


def queue_route(collector: QueueCollector, assumed: Assumed) -> http.Route:
    """`/queues/NAME`, or all of them at `/queues/`. 503 while Redis is away: KEDA then falls back
    instead of reading an empty queue. A queue that nobody has used yet is empty, not missing."""

    def answer(name: str) -> http.Answer:
        try:
            reading = collector.read()
        except RedisUnavailable as error:
            return 503, http.JSON, orjson.dumps({"error": str(error), "source_available": 0})
        if not name:
            body: Any = {q: describe_queue(depth) for q, depth in reading.queues.items()}
        else:
            body = describe_queue(reading.queues.get(name) or QueueDepth(name, assumed=assumed))
        return 200, http.JSON, orjson.dumps(body)

    return answer


def make_server(
    redis_url: str, host: str, port: int, queues: tuple[str, ...], assumed: Assumed
) -> http.HttpServer:
    """The exporter, not yet started."""
    registry = CollectorRegistry()
    build_info(registry)
    ProcessCollector(registry=registry)
    collector = QueueCollector(DepthReader(redis_url, queues, assumed))
    registry.register(collector)
    return http.HttpServer(
        host,
        port,
        {
            "/metrics": http.metrics_route(registry),
            "/healthz": http.check_route(lambda: None),
            "/readyz": http.check_route(lambda: None),
            "/queues/": queue_route(collector, assumed),
        },
    )


@click.command("exporter")
@options.redis_url
@option("--host", env="EXPORTER_HOST", default="127.0.0.1", help="Address to listen on.")
@option("--port", env="EXPORTER_PORT", type=options.PortType(), default=9150)
@option(
    "--queue",
    "queues",
    env="EXPORTER_QUEUES",
    multiple=True,
    help="Show this queue even while it is empty (may be repeated).",
)
@option(
    "--acceptable-wait",
    env="EXPORTER_ACCEPTABLE_WAIT",
    type=options.FiniteType(0),
    default=600.0,
    help="Seconds within which a job without a deadline should be done.",
)
@option(
    "--cold-start",
    env="EXPORTER_COLD_START",
    type=options.FiniteType(0),
    default=60.0,
    help="Seconds that a worker needs to start, until one has told its own (kept in Redis).",
)
@option(
    "--prefill-rate",
    env="EXPORTER_PREFILL_RATE",
    type=options.FiniteType(0),
    default=0.0,
    help="Prompt tokens a second of one worker, until one has told its own.",
)
@option(
    "--decode-rate",
    env="EXPORTER_DECODE_RATE",
    type=options.FiniteType(0),
    default=0.0,
    help="Output tokens a second of one worker, until one has told its own.",
)
@option(
    "--max-replicas",
    env="EXPORTER_MAX_REPLICAS",
    type=click.IntRange(0),
    default=100,
    help="What replicas_required never exceeds.",
)
@options.logging
def exporter(
    redis_url: str,
    host: str,
    port: int,
    queues: tuple[str, ...],
    acceptable_wait: float,
    cold_start: float,
    prefill_rate: float,
    decode_rate: float,
    max_replicas: int,
    log_format: str,
    log_level: str,
) -> None:
    """Export the depth of all queues: /metrics for Prometheus, /queues/NAME for KEDA."""
    logs.set_up(log_level, log_format)
    assumed = Assumed(prefill_rate, decode_rate, cold_start, acceptable_wait, max_replicas)
    try:
        server = make_server(redis_url, host, port, queues, assumed)
    except (OSError, RedisUnavailable) as error:
        log.error("the exporter cannot start: %s", error)
        sys.exit(1)
    signals = SignalBox()
    server.start()
    log.info("exporting %s on http://%s:%d", redacted(redis_url), *server.address)
    while not signals.wait(60.0):
        pass
    server.stop()


if __name__ == "__main__":
    exporter()
