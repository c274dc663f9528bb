"""Every metric, declared once: name, meaning, labels. Dashboards and rules are checked against it.

Two processes export them. A worker tells what it does itself (`WorkerMetrics`) and never the depth
of a queue: with no worker there would be no signal, and a sum over N workers would count it N
times. The exporter tells the depth (`QUEUE_METRICS`, filled in by `worker.exporter`). Labels are
bounded: queues and the served model come from the operator, all others from the sets below, and
every label set exists at 0 before anything happens, so that a rate has a beginning.
Knows no Redis, no torch.
"""

import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

STATES = ("loading", "ready", "draining")
OUTCOMES = ("succeeded", "failed", "cancelled", "expired", "dead")
ATTEMPT_REASONS = ("first", "retry", "crash", "released")
PHASES = (
    *("import", "connect", "download", "compile", "load", "quantize"),
    *("warm_up", "first_token", "total"),
)
"""`import` and `total` are counted from the start of the process, `first_token` (of the first job,
so with the wait for work) from readiness. `connect` and `download` run beside `import` and
`compile` (kernels from the cache, or compiled); `quantize` is what brings the weights that `load`
read into the form that is multiplied."""

_WAIT = (0.01, 0.05, 0.25, 1, 5, 15, 60, 300, 900, 3600, 14400, 43200, 86400)
_MARGIN = (-86400, -3600, -600, -60, 0, 60, 600, 3600, 14400, 43200, 86400)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_STEP_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


def version() -> str:
    """The installed version of headrace."""
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "unknown"


class WorkerMetrics:
    """A worker's own figures. `model` is the served name; it labels the vllm aliases too."""

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.model = model
        r = self.registry
        ProcessCollector(registry=r)
        build_info(r)
        self.model_info = Gauge(
            "headrace_model_info",
            "The served model; always 1.",
            ["model", "dtype", "quantization", "fingerprint"],
            registry=r,
        )
        self.state = Gauge(
            "headrace_worker_state",
            "1 for the state the worker is in, 0 for the others.",
            ["state"],
            registry=r,
        )
        self.slots = Gauge("headrace_worker_slots", "Sequences that can run at once.", registry=r)
        self.claimed_jobs = Gauge(
            "headrace_worker_claimed_jobs", "Jobs under this worker's lease.", registry=r
        )
        self.source_available = Gauge(
            "headrace_worker_source_available",
            "1 while the queue answers, 0 while it is away.",
            registry=r,
        )
        self.stalled = Gauge(
            "headrace_worker_stalled",
            "1 while a step runs past hang_timeout: leases are no longer renewed.",
            registry=r,
        )
        self.cold_start = Gauge(
            "headrace_worker_cold_start_seconds",
            "Seconds that the start took, by phase; connect and download run beside the others.",
            ["phase"],
            registry=r,
        )
        self.model_load = Gauge(
            "headrace_model_load_seconds", "Seconds to load the weights.", registry=r
        )
        self.jobs_completed = Counter(
            "headrace_jobs_completed_total",
            "Jobs that this worker ended, by outcome.",
            ["outcome"],
            registry=r,
        )
        self.attempts = Counter(
            "headrace_job_attempts_total",
            "Deliveries of jobs to this worker, by why it was delivered.",
            ["reason"],
            registry=r,
        )
        self.leases_expired = Counter(
            "headrace_leases_expired_total",
            "Leases of other workers that this one found lapsed and took back.",
            registry=r,
        )
        self.results_fenced = Counter(
            "headrace_results_fenced_total",
            "Late results that were refused because the job was no longer ours.",
            registry=r,
        )
        self.jobs_lost = Counter(
            "headrace_jobs_lost_total",
            "Running jobs given up because they were cancelled or taken away.",
            registry=r,
        )
        self.jobs_resumed = Counter(
            "headrace_jobs_resumed_total", "Jobs continued from a checkpoint.", registry=r
        )
        self.resumed_tokens = Counter(
            "headrace_resumed_tokens_total",
            "Output tokens taken over from checkpoints instead of being generated again.",
            registry=r,
        )
        self.checkpoints_refused = Counter(
            "headrace_checkpoints_refused_total",
            "Checkpoints that did not fit this worker, so that the job started over.",
            registry=r,
        )
        self.jobs_released = Counter(
            "headrace_jobs_released_total", "Jobs put back uncharged.", registry=r
        )
        self.queue_wait = Histogram(
            "headrace_job_queue_wait_seconds",
            "From enqueue to claim.",
            buckets=_WAIT,
            registry=r,
        )
        self.end_to_end = Histogram(
            "headrace_job_end_to_end_seconds",
            "From enqueue to the recorded result.",
            buckets=_WAIT,
            registry=r,
        )
        self.deadline_margin = Histogram(
            "headrace_job_deadline_margin_seconds",
            "Seconds left to the deadline when the job ended; negative: missed.",
            buckets=_MARGIN,
            registry=r,
        )
        self.running = Gauge(
            "headrace_engine_running_sequences", "Sequences in the batch.", registry=r
        )
        self.waiting = Gauge(
            "headrace_engine_waiting_sequences",
            "Sequences claimed and not yet in the batch.",
            registry=r,
        )
        self.kv_usage = Gauge(
            "headrace_engine_kv_usage_ratio", "Share of KV blocks in use, 0 to 1.", registry=r
        )
        self.prefix_queries = Counter(
            "headrace_engine_prefix_cache_queries_total",
            "Prompt tokens looked up in the prefix cache.",
            registry=r,
        )
        self.prefix_hits = Counter(
            "headrace_engine_prefix_cache_hits_total",
            "Prompt tokens found in the prefix cache.",
            registry=r,
        )
        self.preemptions = Counter(
            "headrace_engine_preemptions_total",
            "Sequences put back for want of KV blocks.",
            registry=r,
        )
        self.prompt_tokens = Counter(
            "headrace_engine_prompt_tokens_total", "Prompt tokens computed.", registry=r
        )
        self.generation_tokens = Counter(
            "headrace_engine_generation_tokens_total", "Tokens generated.", registry=r
        )
        self.engine_errors = Counter(
            "headrace_engine_errors_total", "Steps that raised an exception.", registry=r
        )
        self.first_token = Histogram(
            "headrace_engine_time_to_first_token_seconds",
            "From arrival in the engine to the first token.",
            buckets=_FIRST_TOKEN,
            registry=r,
        )
        self.inter_token = Histogram(
            "headrace_engine_inter_token_latency_seconds",
            "Mean time between a sequence's tokens, one observation a sequence.",
            buckets=_BETWEEN,
            registry=r,
        )
        self.step_tokens = Histogram(
            "headrace_engine_step_tokens",
            "Tokens computed in one step.",
            buckets=_STEP_TOKENS,
            registry=r,
        )
        self.step_seconds = Histogram(
            "headrace_engine_step_seconds",
            "Wall time of one step.",
            buckets=_STEP_SECONDS,
            registry=r,
        )
        for state in STATES:
            self.state.labels(state)
        for outcome in OUTCOMES:
            self.jobs_completed.labels(outcome)
        for reason in ATTEMPT_REASONS:
            self.attempts.labels(reason)
        for phase in PHASES:
            self.cold_start.labels(phase)
        r.register(VllmAliases(self))

    def set_state(self, state: str) -> None:
        for name in STATES:
            self.state.labels(name).set(1 if name == state else 0)


def build_info(registry: CollectorRegistry) -> None:
    """`headrace_build_info`, which every process of ours exports."""
    gauge = Gauge(
        "headrace_build_info", "What runs here; always 1.", ["version", "python"], registry=registry
    )
    gauge.labels(version(), platform.python_version()).set(1)


class VllmAliases(Collector):
    """The names that users of vLLM have on their dashboards, made from ours at scrape time."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        m = metrics
        self._model = metrics.model
        self._sources: tuple[tuple[str, Collector], ...] = (
            ("vllm:num_requests_running", m.running),
            ("vllm:num_requests_waiting", m.waiting),
            ("vllm:kv_cache_usage_perc", m.kv_usage),
            ("vllm:prefix_cache_queries", m.prefix_queries),
            ("vllm:prefix_cache_hits", m.prefix_hits),
            ("vllm:prompt_tokens", m.prompt_tokens),
            ("vllm:generation_tokens", m.generation_tokens),
            ("vllm:num_preemptions", m.preemptions),
            ("vllm:time_to_first_token_seconds", m.first_token),
            ("vllm:inter_token_latency_seconds", m.inter_token),
            ("vllm:e2e_request_latency_seconds", m.end_to_end),
        )

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for name, source in self._sources:
            for ours in source.collect():
                alias = Metric(name, f"Alias of {ours.name}.", ours.type)
                for sample in ours.samples:
                    if sample.name.endswith("_created"):
                        continue
                    suffix = sample.name.removeprefix(ours.name)
                    labels = {**sample.labels, "model_name": self._model}
                    alias.add_sample(name + suffix, labels, sample.value)
                yield alias


@dataclass(frozen=True, slots=True)
class QueueMetric:
    """One metric of the exporter: a gauge, or a counter that Redis keeps."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"


QUEUE_STATES = ("queued", "scheduled", "running")
TOKEN_KINDS = ("prompt", "output")
DEADLINE_HORIZONS = ("0", "60", "600", "3600", "21600", "86400", "+Inf")

QUEUE_METRICS = {
    "source_available": QueueMetric(
        "headrace_queue_source_available",
        "1 while Redis answers. At 0 the depth is unknown, and its series are absent, not 0.",
    ),
    "jobs": QueueMetric(
        "headrace_queue_jobs", "Jobs by state, without counted ghosts.", ("queue", "state")
    ),
    "outstanding_jobs": QueueMetric(
        "headrace_queue_outstanding_jobs",
        "Queued, running, and scheduled jobs that fall due within one cold start.",
        ("queue",),
    ),
    "outstanding_tokens": QueueMetric(
        "headrace_queue_outstanding_tokens",
        "Estimated tokens of the outstanding jobs, put right when a job is claimed.",
        ("queue", "kind"),
    ),
    "oldest_age": QueueMetric(
        "headrace_queue_oldest_job_age_seconds",
        "Age of the oldest job that waits; 0 when none waits.",
        ("queue",),
    ),
    "deadline_jobs": QueueMetric(
        "headrace_queue_deadline_jobs",
        "Unfinished jobs whose deadline is at most this many seconds away.",
        ("queue", "le_seconds"),
    ),
    "replicas_required": QueueMetric(
        "headrace_queue_replicas_required",
        "Workers that the deadlines and the acceptable wait ask for, those there included.",
        ("queue",),
    ),
    "deadline_missed_jobs": QueueMetric(
        "headrace_queue_deadline_missed_jobs",
        "Jobs whose deadline no number of workers can meet any more.",
        ("queue",),
    ),
    "service_rate": QueueMetric(
        "headrace_queue_service_tokens_per_second",
        "Tokens a second of one worker that replicas_required calculates with; 0: unknown.",
        ("queue", "kind"),
    ),
    "cold_start": QueueMetric(
        "headrace_queue_cold_start_seconds",
        "Seconds of a worker's start that replicas_required calculates with.",
        ("queue",),
    ),
    "rates_age": QueueMetric(
        "headrace_queue_rates_age_seconds",
        "Since a worker last told the queue's rates; 0 also where none ever has.",
        ("queue",),
    ),
    "dead_jobs": QueueMetric("headrace_dead_jobs", "Jobs in the dead letter.", ("queue",)),
    "enqueued": QueueMetric(
        "headrace_jobs_enqueued_total", "Jobs accepted.", ("queue",), "counter"
    ),
    "workers": QueueMetric(
        "headrace_queue_workers", "Live workers that read the queue.", ("queue", "state")
    ),
    "redis_memory": QueueMetric("headrace_redis_memory_bytes", "Memory that Redis uses."),
    "redis_memory_limit": QueueMetric(
        "headrace_redis_memory_limit_bytes", "Redis's maxmemory; 0: unlimited."
    ),
    "scrape_seconds": QueueMetric(
        "headrace_exporter_read_seconds", "Seconds that the read of Redis took."
    ),
    "rq_jobs": QueueMetric(
        "rq_jobs", "Jobs by RQ status, as rq-exporter names it.", ("queue", "status")
    ),
}
"""Filled in by the exporter, one read of Redis a scrape."""


def all_names() -> set[str]:
    """Every sample name that a worker or the exporter may show, for rules and dashboards."""
    names = {metric.name for metric in QUEUE_METRICS.values()}
    for family in WorkerMetrics("model").registry.collect():
        names.add(family.name)
        names.update(sample.name for sample in family.samples)
        if family.type == "histogram":
            names.update(family.name + suffix for suffix in ("_bucket", "_sum", "_count"))
        if family.type == "counter":
            names.add(family.name + "_total")
    return names
