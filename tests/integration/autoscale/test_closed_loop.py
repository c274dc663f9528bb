"""0 -> n -> 0 on this machine: the chart's scaler on the real metric, over real workers.

HEADRACE_PLOTS names a folder in which the loop is drawn beside its simulation.
"""

import os
import signal
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from charts import kind, render
from closed_loop import SPEED, ClosedLoop, Deployment
from prometheus_support import ExporterProcess
from scalers import keda_controller
from serving import WorkerProcess

from headrace.producer import Client
from headrace.worker.autoscale.fleet import Machine
from headrace.worker.autoscale.outcome import Outcome, Scenario
from headrace.worker.autoscale.policy import Outstanding
from headrace.worker.autoscale.service import ServiceRate
from headrace.worker.autoscale.simulate import simulate
from headrace.worker.autoscale.trace import Trace

QUEUE = "tiny"
SLOTS = 8
JOBS = 48
TARGET = 24
TOKENS = 450
PROMPT = [7, 8, 9]
OUTSTANDING = 'headrace_queue_outstanding_jobs{queue="tiny"}'
PENDING = 'headrace_queue_jobs{queue="tiny",state="queued"}'
VALUES = {
    "workers": [{"name": "tiny", "model": "/models/tiny", "target": TARGET}],
    "workerDefaults": {
        "coldStartSeconds": 120,
        "onDemand": {"share": 1, "maxReplicas": 6},
        "spot": {"enabled": False},
    },
}

Start = Callable[[Callable[[], float]], Deployment]


@pytest.fixture
def deployment(redis_url: str, model: Path, tmp_path: Path) -> Iterator[Start]:
    made: list[Deployment] = []

    def make(clock: Callable[[], float]) -> Deployment:
        def start(number: int) -> WorkerProcess:
            log = tmp_path / f"worker-{number}.log"
            return WorkerProcess(redis_url, model, log, "--max-num-seqs", str(SLOTS), *arguments)

        arguments = ["--lease-seconds", "3", "--drain-timeout", "2", "--checkpoint-every", "64"]
        made.append(Deployment(start, clock))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url, queue=QUEUE) as client:
        yield client


def submit(client: Client, lengths: list[int]) -> dict[str, int]:
    """One job a length; the ids with the tokens that each must have."""
    body = {"prompt": PROMPT, "ignore_eos": True}
    requests = [{**body, "seed": i, "max_tokens": n} for i, n in enumerate(lengths)]
    jobs = client.submit_many(requests)
    return {job.id: length for job, length in zip(jobs, lengths, strict=True)}


def loop_on(
    exporter: ExporterProcess,
    deployment: Start,
    values: dict = VALUES,
    metric: str = OUTSTANDING,
) -> ClosedLoop:
    (scaled,) = kind(render(values), "ScaledObject")
    return ClosedLoop(deployment, keda_controller(scaled), exporter.target, QUEUE, metric)


def at_rest(loop: ClosedLoop) -> bool:
    """Nothing asked for, nothing there, and that for some turns."""
    return (
        bool(loop.changes)
        and loop.deployment.spec == 0
        and not loop.deployment.pods
        and loop.now() - loop.changes[-1][0] > 60
    )


def assert_all_answered(client: Client, lengths: dict[str, int]) -> None:
    """Each job once, whole."""
    results = client.results(list(lengths))
    assert {job: result.failure for job, result in results.items()} == dict.fromkeys(lengths)
    assert {job: result.usage.completion_tokens for job, result in results.items()} == lengths


def assert_depth_is_conserved(loop: ClosedLoop, accepted: int) -> None:
    """At every reading the states add up to what was accepted."""
    assert len(loop.seen) > 20
    for seen in loop.seen:
        assert seen.metric is not None
        states = ("queued", "started", "scheduled", "finished", "failed")
        assert sum(seen.counts[s] for s in states) == seen.counts["accepted"] == accepted


def test_a_burst_takes_the_workers_from_zero_to_n_and_back_to_zero(
    exporter: ExporterProcess,
    deployment: Start,
    client: Client,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """48 jobs at 24 a replica: two workers, although six are allowed."""
    lengths = submit(client, [TOKENS] * JOBS)
    loop = loop_on(exporter, deployment)
    rates: list[tuple[float, float]] = []

    def watch(loop: ClosedLoop) -> bool:
        for worker in client.workers():
            prefill, decode = (
                float(worker.facts.get(f"{kind}_tokens_per_second", 0) or 0)
                for kind in ("prefill", "decode")
            )
            if prefill and decode:
                rates.append((prefill, decode))
        return at_rest(loop)

    loop.run(watch)

    wanted = -(-JOBS // TARGET)
    specs = loop.specs
    peak = specs.index(max(specs))
    assert max(specs) == wanted, f"no cascade while workers load: {loop.changes}"
    assert specs[: peak + 1] == sorted(specs[: peak + 1]), "up, "
    assert specs[peak:] == sorted(specs[peak:], reverse=True), "then down: no flapping"
    assert specs[0] == specs[-1] == 0
    assert len(loop.deployment.history) == wanted, "nobody was started twice"
    loading = [s for s in loop.seen if s.replicas and not s.ready]
    assert len(loading) >= 3, "the scaler looked often while nobody was ready yet"
    for seen in loop.seen:
        assert seen.spec > 0 or seen.metric == 0 or seen.at < 30, "never at zero with work"
    assert all(pod.busy_when_stopped == 0 for pod in loop.deployment.history)
    assert all(pod.worker.exit_status() == 0 for pod in loop.deployment.history)
    assert_depth_is_conserved(loop, JOBS)
    assert_all_answered(client, lengths)

    predicted = predict(loop, rates)
    ratio = loop.replica_s / predicted.replica_s
    record_property("replica_seconds_over_predicted", round(ratio, 3))
    with capsys.disabled():
        print(beside(loop, predicted, ratio))
    if os.environ.get("HEADRACE_PLOTS"):
        plot(loop, predicted, Path(os.environ["HEADRACE_PLOTS"]) / "closed-loop.png")
    assert predicted.peak_replicas == wanted
    assert predicted.finished == JOBS


def predict(loop: ClosedLoop, rates: list[tuple[float, float]]) -> Outcome:
    """What the simulator makes of the same burst, with the rates and cold starts that were
    measured, on the controllers' clock."""
    starts = [p.ready_at - p.created_at for p in loop.deployment.history if p.ready_at is not None]
    prefill, decode = (sum(r[i] for r in rates) / len(rates) / SPEED for i in (0, 1))
    trace = Trace(
        "burst",
        array("d", [0.0] * JOBS),
        array("q", [len(PROMPT)] * JOBS),
        array("q", [TOKENS] * JOBS),
        array("d", [float("inf")] * JOBS),
    )
    machine = Machine(
        ServiceRate(prefill, decode, SLOTS), cold_start_s=sum(starts) / len(starts), drain_s=40.0
    )
    (scaled,) = kind(render(VALUES), "ScaledObject")
    scenario = Scenario(trace, machine, max_replicas=6, scrape_s=1.0)
    return simulate(scenario, Outstanding(TARGET), keda_controller(scaled))


def plot(loop: ClosedLoop, predicted: Outcome, path: Path) -> None:
    """Replicas and outstanding jobs over time, real and simulated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    real = [(s.at, s.replicas, s.ready, s.metric or 0) for s in loop.seen]
    fake = [(s.at, s.replicas, s.ready, s.metric or 0) for s in predicted.samples]
    for name, rows, style in (("real", real, "-"), ("simulated", fake, "--")):
        at, replicas, ready, metric = zip(*rows, strict=True)
        upper.step(at, replicas, style, where="post", color="tab:blue", label=f"replicas, {name}")
        upper.step(at, ready, style, where="post", color="tab:green", label=f"ready, {name}")
        lower.step(at, metric, style, where="post", color="tab:orange", label=f"jobs, {name}")
    upper.set_ylabel("replicas")
    lower.set_ylabel("outstanding jobs")
    lower.set_xlabel(f"seconds of the controllers' clock ({SPEED:g} times the wall's)")
    for axes in (upper, lower):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def beside(loop: ClosedLoop, predicted: Outcome, ratio: float) -> str:
    """Replicas over time, simulated and real, one line every 30 s of the controllers' clock."""
    lines = ["", "seconds  replicas simulated/real  outstanding simulated/real"]
    end = max(loop.seen[-1].at, predicted.end_s)
    for at in range(0, int(end) + 1, 30):
        real = [s for s in loop.seen if s.at <= at + 0.5]
        fake = [s for s in predicted.samples if s.at <= at + 0.5]
        r = (real[-1].replicas, real[-1].metric) if real else (0, 0)
        f = (fake[-1].replicas, fake[-1].metric) if fake else (0, 0)
        lines.append(f"{at:7d}  {f[0]:8d} / {r[0]:d}  {f[1] or 0:20.0f} / {r[1] or 0:.0f}")
    lines.append(
        f"replica-seconds: simulated {predicted.replica_s:.0f}, real {loop.replica_s:.0f},"
        f" ratio {ratio:.3f}"
    )
    return "\n".join(lines)


def test_a_scaler_on_pending_jobs_takes_busy_workers_and_still_nothing_is_lost(
    exporter: ExporterProcess, deployment: Start, client: Client
) -> None:
    """Two workers hold all of 16 jobs, so that none is pending: the wrong metric reads 0, and KEDA
    takes both away in one step. The query is put right, new workers go on, and one of them dies
    without a word. Every job is answered once and whole; the states add up at every reading."""
    entry = {"name": "tiny", "model": "/models/tiny", "target": 8, "coldStartSeconds": 30}
    values = {
        **VALUES,
        "workers": [{**entry, "onDemand": {"maxReplicas": 2}}],
        "autoscaling": {
            "keda": {"cooldownPeriod": 60},
            "behavior": {"scaleDown": {"periodSeconds": 1, "stabilizationSeconds": 0}},
        },
    }
    loop = loop_on(exporter, deployment, values, PENDING)
    loop.deployment.spec = 2
    loop.deployment.await_ready()
    lengths = submit(client, [400 + 20 * (7 * i % 16) for i in range(16)])
    killed: list[int] = []

    def watch(loop: ClosedLoop) -> bool:
        if any(pod.busy_when_stopped for pod in loop.deployment.history):
            loop.metric = OUTSTANDING
        if loop.metric == OUTSTANDING and not killed:
            for pod in loop.deployment.counted():
                if pod.jobs():
                    killed.append(pod.number)
                    pod.kill()
                    break
        return bool(killed) and at_rest(loop)

    loop.run(watch)
    assert any(pod.busy_when_stopped for pod in loop.deployment.history[:2])
    assert killed
    for pod in loop.deployment.history:
        if pod.stopped_at is not None:
            assert pod.worker.exit_status() == 0, pod.worker.log.read_text()
    assert_depth_is_conserved(loop, len(lengths))
    assert_all_answered(client, lengths)


def test_required_replicas_do_not_cascade_while_workers_load(
    redis_url: str, deployment: Start, client: Client, tmp_path: Path
) -> None:
    """40 x 700 tokens at an assumed 50 a second are 560 s of work; within 300 s, less 10 s of cold
    start, that takes 2 workers. Asked again while these two load it is still 2, not 4 and not 8."""
    submit(client, [700] * 40)
    told = ["--queue=tiny", "--decode-rate=50", "--prefill-rate=1000000", "--cold-start=10"]
    told += ["--acceptable-wait=300", "--max-replicas=6"]
    exporter = ExporterProcess(redis_url, tmp_path / "exporter.log", "exporter", *told)
    values = {**VALUES, "autoscaling": {"metric": "replicas"}}
    loop = loop_on(exporter, deployment, values, 'headrace_queue_replicas_required{queue="tiny"}')

    def watch(loop: ClosedLoop) -> bool:
        """Once known to load, both stand still for the looks to come, as on a slow disk."""
        looks = sum(s.counts["loading"] == 2 for s in loop.seen)
        for pod in loop.deployment.counted():
            pod.worker.signal(signal.SIGSTOP if 0 < looks < 6 else signal.SIGCONT)
        return any(s.ready for s in loop.seen)

    try:
        loop.run(watch)
    finally:
        exporter.stop()
    announced = [s for s in loop.seen if s.replicas == 2 and not s.ready]
    assert len(announced) >= 5, "the scaler looked often while both were loading"
    assert any(s.counts["loading"] == 2 for s in announced), "and the exporter knew of them"
    assert {s.metric for s in announced} == {2.0}
    assert max(loop.specs) == 2
