"""The whole way of the number that scales: Redis, two exporters, Prometheus, and the very queries
of the KEDA and adapter manifests, asked as those programs ask them.

What they answer is then put through their own rules (`autoscale.keda`, `autoscale.hpa`), because
that is where "no answer" must not become "scale to zero".
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from charts import DEPLOY, NAMESPACE, adapter_rules, component, keda_queries, kind, render
from prometheus_support import ExporterProcess, PrometheusServer
from queue_support import failure, finish_all, new_client, new_source
from redis_support import RedisServer
from scalers import keda_controller

from headrace.producer import Client
from headrace.worker.autoscale.adapter import Requirement, label_matchers
from headrace.worker.autoscale.controllers import HpaController
from headrace.worker.autoscale.hpa import HpaSpec
from headrace.worker.autoscale.keda import KedaError, prometheus_value
from headrace.worker.autoscale.proposal import Scale
from headrace.worker.source import OutcomeKind, WorkerFacts, WorkerState

QUEUE = "tiny"
METRICS = ("jobs", "tokens", "replicas")
TARGET = 10
WORKERS = {
    "workers": [{"name": "tiny", "model": "/models/tiny", "target": TARGET}],
    "workerDefaults": {
        "onDemand": {"share": 1, "maxReplicas": 8},
        "spot": {"enabled": False},
    },
}


@dataclass
class Cluster:
    """What a cluster has beside the workers: Redis, exporters, Prometheus."""

    redis: RedisServer
    exporters: list[ExporterProcess]
    prometheus: PrometheusServer

    def keda(self, metric: str) -> float:
        """What KEDA's prometheus trigger reads. Raises KedaError."""
        manifests = render({**WORKERS, "autoscaling": {"metric": metric}})
        (query,) = keda_queries(manifests).values()
        status, body = self.prometheus.ask(query)
        (scaled,) = kind(manifests, "ScaledObject")
        ignore = scaled["spec"]["triggers"][0]["metadata"]["ignoreNullValues"]
        return prometheus_value(status, body, ignore_null=ignore == "true")

    def adapter(self, metric: str) -> float | None:
        """What prometheus-adapter gives the HPA: the sum of all series, None when there is none
        (the HPA takes an empty list for an error)."""
        manifests = render({**WORKERS, "autoscaling": {"kind": "hpa", "metric": metric}}, **ZERO)
        (hpa,) = kind(manifests, "HorizontalPodAutoscaler")
        asked = hpa["spec"]["metrics"][0]["external"]["metric"]
        (rule,) = [r for r in adapter_rules() if r["name"]["as"] == asked["name"]]
        assert rule["resources"]["overrides"] == {"namespace": {"resource": "namespace"}}
        selector = asked["selector"]["matchLabels"]
        matchers = label_matchers(
            [Requirement(label, "=", (value,)) for label, value in selector.items()],
            namespace=NAMESPACE,
        )
        query = rule["metricsQuery"].replace("<<.Series>>", asked["name"])
        found = self.prometheus.samples(query.replace("<<.LabelMatchers>>", matchers))
        return sum(value for _, value in found) if found else None

    def recorded(self, rule: str) -> float | None:
        found = self.prometheus.samples(f'{rule}{{queue="{QUEUE}"}}')
        assert len(found) <= 1, found
        if found:
            assert found[0][0]["namespace"] == NAMESPACE
        return found[0][1] if found else None

    def one(self, query: str) -> float:
        ((_, value),) = self.prometheus.samples(query)
        return value

    def expect(self, jobs: float, tokens: float, replicas: float) -> None:
        """All three metrics, by KEDA's way, by the adapter's, and as recorded."""
        self._settled(lambda: self._check(jobs, tokens, replicas))

    def _settled(self, check: Callable[[], None]) -> None:
        """`check` after a scrape; again when a busy machine let one of them run out of time."""
        for attempt in range(5):
            self.prometheus.settle()
            try:
                check()
            except AssertionError:
                if attempt == 4:
                    raise
            else:
                return

    def _check(self, jobs: float, tokens: float, replicas: float) -> None:
        wanted = dict(zip(METRICS, (jobs, tokens, replicas), strict=True))
        assert {m: self.keda(m) for m in METRICS} == wanted
        assert {m: self.adapter(m) for m in METRICS} == wanted
        assert self.recorded("headrace:queue_outstanding_jobs") == jobs
        assert self.recorded("headrace:queue_outstanding_tokens") == tokens
        assert self.recorded("headrace:queue_replicas_required") == replicas
        assert self.one("max(headrace_queue_source_available)") == 1

    def expect_unknown(self) -> None:
        """No number by any way; and no scaler takes that for an empty queue."""
        self._settled(self._check_unknown)

    def _check_unknown(self) -> None:
        for metric in METRICS:
            try:
                raise AssertionError(f"KEDA reads {self.keda(metric)}")
            except KedaError:
                pass
            assert self.adapter(metric) is None
        assert self.recorded("headrace:queue_outstanding_jobs") is None
        assert hpa_keeps(3) == 3
        assert keda_keeps(3) == 3
        assert keda_keeps(0) == 0

    def tokens(self) -> float:
        """As the queue's own counters have them."""
        with self.redis.client() as client:
            counters = client.hgetall(f"rq:x:n:{QUEUE}")
        return sum(int(counters.get(name, 0)) for name in (b"prompt_tokens", b"output_tokens"))


ZERO = {"kubernetes": "1.37.0"}


def hpa_keeps(replicas: int) -> int:
    """What an HPA makes of a metric it cannot read, four syncs long."""
    hpa = HpaController(HpaSpec(max_replicas=8, min_replicas=0), TARGET)
    (loop,) = hpa.loops()
    for turn in range(4):
        replicas = loop.step(15.0 * turn, Scale(replicas, replicas, replicas), None)
    return replicas


def keda_keeps(replicas: int, turns: int = 4) -> int:
    """What KEDA and its HPA make of it, with the manifest's fallback, before it applies."""
    (scaled,) = kind(render(WORKERS), "ScaledObject")
    controller = keda_controller(scaled)
    for turn in range(turns // 2):
        for loop in controller.loops():
            scale = Scale(replicas, replicas, replicas)
            replicas = loop.step(15.0 * turn, scale, None)
    return replicas


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two exporters with the arguments of the chart's container, and Prometheus on both."""
    folder = tmp_path_factory.mktemp("cluster")
    manifests = render({**WORKERS, "exporter": {"replicas": 2}})
    (deployment,) = component(manifests, "exporter")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    arguments = [a for a in container["args"] if not a.startswith(("--host", "--port"))]
    redis = RedisServer(appendonly="yes", appendfsync="always")
    exporters: list[ExporterProcess] = []
    prometheus: PrometheusServer | None = None
    try:
        for index in range(deployment["spec"]["replicas"]):
            log = folder / f"exporter-{index}.log"
            exporters.append(ExporterProcess(redis.url, log, *arguments))
        prometheus = PrometheusServer(
            [e.target for e in exporters], DEPLOY / "prometheus/headrace.rules.yaml", NAMESPACE
        )
        yield Cluster(redis, exporters, prometheus)
    finally:
        if prometheus is not None:
            prometheus.stop()
        for exporter in exporters:
            exporter.stop()
        redis.stop()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.redis.client() as raw:
        raw.flushall()
    with new_client(cluster.redis.url) as client:
        yield client


def submit(client: Client, count: int) -> None:
    client.submit_many([{"prompt": f"prompt {i}", "max_tokens": 20} for i in range(count)])


def test_an_empty_queue_that_nobody_has_used_reads_zero(cluster: Cluster, client: Client) -> None:
    """Known to be empty; were the series missing, KEDA's fallback would start a worker."""
    cluster.expect(jobs=0, tokens=0, replicas=0)


def test_a_burst_reads_its_jobs_once_with_two_exporters_and_no_worker(
    cluster: Cluster, client: Client
) -> None:
    """70 jobs at 10 a replica: 7 replicas. Nobody has measured a rate: one worker is required."""
    submit(client, 70)
    tokens = cluster.tokens()
    assert tokens > 70 * 20
    cluster.expect(jobs=70, tokens=tokens, replicas=1)
    assert cluster.one("count(headrace_queue_outstanding_jobs)") == 2, "told by both exporters"
    assert cluster.one("sum(headrace_queue_outstanding_jobs)") == 140, "which a sum would double"
    assert math.ceil(cluster.keda("jobs") / TARGET) == 7
    assert cluster.recorded("headrace:queue_workers_ready") == 0


def test_all_in_flight_and_none_pending_is_still_work(cluster: Cluster, client: Client) -> None:
    submit(client, 12)
    source = new_source(cluster.redis.url)
    claimed = source.claim(12, 1.0)
    assert len(claimed) == 12
    cluster.expect(jobs=12, tokens=cluster.tokens(), replicas=1)
    pending = 'max(headrace_queue_jobs{queue="tiny",state="queued"})'
    assert cluster.one(pending) == 0, "which a scaler on pending jobs would take for idle"
    assert cluster.one('max(headrace_queue_jobs{queue="tiny",state="running"})') == 12
    finish_all(source, claimed)
    source.unregister()
    cluster.expect(jobs=0, tokens=0, replicas=0)


def test_a_retry_that_waits_its_turn_is_work(cluster: Cluster, client: Client) -> None:
    submit(client, 3)
    source = new_source(cluster.redis.url, backoff_first=30.0)
    for job in source.claim(3, 1.0):
        source.finish([failure(job, OutcomeKind.RETRY)])
    source.unregister()
    assert client.redis.zcard(f"rq:scheduled:{QUEUE}") == 3
    cluster.expect(jobs=3, tokens=cluster.tokens(), replicas=1)


def test_a_job_for_next_week_is_no_work_yet(cluster: Cluster, client: Client) -> None:
    client.submit("later", start_at=time.time() + 7 * 86400)
    cluster.prometheus.settle()
    assert cluster.keda("jobs") == cluster.adapter("jobs") == 0
    assert cluster.one('max(headrace_queue_jobs{queue="tiny",state="scheduled"})') == 1


def test_zero_workers_and_then_measured_rates_decide_the_replicas(
    cluster: Cluster, client: Client
) -> None:
    """400 jobs of 20 output tokens at 10 a second are 800 s of decoding; within the chart's 600 s
    that takes two workers that are there, and more than two where each must start first."""
    submit(client, 400)
    cluster.prometheus.settle()
    assert cluster.recorded("headrace:queue_workers_ready") == 0
    assert cluster.keda("replicas") == 1
    source = new_source(cluster.redis.url)
    facts = WorkerFacts(
        model=QUEUE,
        state=WorkerState.READY,
        queues=(QUEUE,),
        slots=16,
        prefill_tokens_per_second=1e6,
        decode_tokens_per_second=10.0,
        cold_start_seconds=60.0,
        started_at=time.time(),
    )
    source.announce(facts)
    cluster.prometheus.settle()
    assert cluster.recorded("headrace:queue_workers_ready") == 1
    decoding = client.redis.hget(f"rq:x:n:{QUEUE}", "output_tokens")
    seconds = int(decoding) / 10.0
    least = 1 + math.ceil((seconds - 600) / (600 - 60))
    assert cluster.keda("replicas") == cluster.adapter("replicas") == least
    source.unregister()


def test_one_dead_exporter_of_two_changes_nothing(cluster: Cluster, client: Client) -> None:
    submit(client, 25)
    cluster.exporters[0].kill()
    try:
        cluster.expect(jobs=25, tokens=cluster.tokens(), replicas=1)
        assert cluster.one("count(headrace_queue_outstanding_jobs)") == 1
    finally:
        cluster.exporters[0].start()


def test_without_any_exporter_the_depth_is_unknown_and_nothing_is_scaled(
    cluster: Cluster, client: Client
) -> None:
    submit(client, 25)
    cluster.expect(jobs=25, tokens=cluster.tokens(), replicas=1)
    for exporter in cluster.exporters:
        exporter.kill()
    try:
        cluster.expect_unknown()
        assert cluster.prometheus.samples("headrace_queue_source_available") == []
        assert cluster.one("absent(headrace_queue_source_available)") == 1
    finally:
        for exporter in cluster.exporters:
            exporter.start()
    cluster.expect(jobs=25, tokens=cluster.tokens(), replicas=1)


def test_while_redis_is_down_the_depth_is_unknown_and_the_exporters_say_so(
    cluster: Cluster, client: Client
) -> None:
    submit(client, 25)
    tokens = cluster.tokens()
    cluster.expect(jobs=25, tokens=tokens, replicas=1)
    cluster.redis.kill()
    try:
        cluster.expect_unknown()
        assert cluster.one("count(up == 1)") == 2, "the exporters live"
        assert cluster.one("max(headrace_queue_source_available)") == 0
    finally:
        cluster.redis.start()
    cluster.expect(jobs=25, tokens=tokens, replicas=1)


def test_the_fallback_holds_the_replicas_that_are_there(cluster: Cluster) -> None:
    """After more failures than the manifest forgives KEDA makes up a metric: for what is there."""
    assert keda_keeps(5, turns=40) == 5
    assert keda_keeps(1, turns=40) == 1


def test_another_namespace_is_another_queue(cluster: Cluster, client: Client) -> None:
    """The same queue name in another release must not scale this one."""
    submit(client, 4)
    cluster.prometheus.settle()
    (query,) = keda_queries(render(WORKERS)).values()
    elsewhere = query.replace(f'namespace="{NAMESPACE}"', 'namespace="other"')
    assert elsewhere != query
    assert cluster.prometheus.samples(elsewhere) == []
