"""A cluster in miniature: real worker processes, started and stopped as a Deployment's pods are, by
a controller that reads the real exporter.

The controllers' clock runs `SPEED` times as fast as the wall's, so that every time constant of the
manifests is divided by it and none has to be written again. Times here are the controllers' unless
they say wall.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serving import WorkerProcess, get, sample

from headrace.worker.autoscale.controllers import Controller
from headrace.worker.autoscale.proposal import Scale

SPEED = 20.0


@dataclass
class Pod:
    """One worker process. `stopped_at` None: not told to stop. `killed`: by the test."""

    worker: WorkerProcess
    number: int
    created_at: float
    ready_at: float | None = None
    stopped_at: float | None = None
    busy_when_stopped: int = 0
    killed: bool = False

    @property
    def alive(self) -> bool:
        return self.worker.process.poll() is None

    def kill(self) -> None:
        """As when the machine is taken without notice."""
        self.killed = True
        self.worker.kill()

    def see(self, now: float) -> None:
        """The readiness probe."""
        if self.ready_at is None and self._is_ready():
            self.ready_at = now

    def _is_ready(self) -> bool:
        try:
            return self.worker.get("/readyz", timeout=0.25)[0] == 200
        except (AssertionError, OSError):
            return False

    def jobs(self) -> int:
        """Jobs under its lease, which is what its deletion cost grows with."""
        if self.ready_at is None:
            return 0
        try:
            return int(self.worker.value("headrace_worker_claimed_jobs"))
        except (AssertionError, OSError):
            return 0


@dataclass
class Deployment:
    """Keeps `spec` pods. Too many: those go first that a ReplicaSet would rank first."""

    start: Callable[[int], WorkerProcess]
    clock: Callable[[], float]
    spec: int = 0
    pods: list[Pod] = field(default_factory=list)
    history: list[Pod] = field(default_factory=list)

    def reconcile(self) -> None:
        now = self.clock()
        for pod in self.pods:
            if not pod.alive and pod.stopped_at is None and not pod.killed:
                raise AssertionError(f"worker {pod.number} ended: {pod.worker.log.read_text()}")
        self.pods = [pod for pod in self.pods if pod.alive]
        counted = self.counted()
        for _ in range(self.spec - len(counted)):
            number = len(self.history)
            pod = Pod(self.start(number), number, now)
            self.pods.append(pod)
            self.history.append(pod)
        for pod in counted:
            pod.see(now)
        surplus = len(counted) - self.spec
        for pod in sorted(counted, key=_rank)[: max(0, surplus)]:
            pod.busy_when_stopped = pod.jobs()
            pod.stopped_at = now
            pod.worker.signal(signal.SIGTERM)

    def await_ready(self, wall_seconds: float = 120.0) -> None:
        """As if somebody had set the count by hand: until all of them serve."""
        end = time.monotonic() + wall_seconds
        while self.scale().ready < self.spec:
            assert time.monotonic() < end, f"not ready after {wall_seconds} s"
            self.reconcile()
            time.sleep(0.05)

    def counted(self) -> list[Pod]:
        """status.replicas: terminating pods are not in it."""
        return [p for p in self.pods if p.alive and p.stopped_at is None]

    def scale(self) -> Scale:
        counted = self.counted()
        return Scale(self.spec, len(counted), sum(p.ready_at is not None for p in counted))

    def end(self) -> None:
        for pod in self.pods:
            pod.worker.end()


def _rank(pod: Pod) -> tuple[bool, int, float]:
    """Not ready before ready, then the lower cost, then the youngest."""
    return pod.ready_at is not None, pod.jobs(), -pod.created_at


@dataclass(frozen=True)
class Seen:
    """One reading of the exporter. `metric` None: it did not answer."""

    at: float
    metric: float | None
    spec: int
    replicas: int
    ready: int
    counts: dict[str, float]


class ClosedLoop:
    """Turns the controller's loops at their own periods until `done` says so. `metric` is a sample
    of the exporter, with its labels as they are written there."""

    def __init__(
        self,
        deployment: Callable[[Callable[[], float]], Deployment],
        controller: Controller,
        exporter: str,
        queue: str,
        metric: str,
    ) -> None:
        self._began = time.monotonic()
        self.deployment = deployment(self.now)
        self.seen: list[Seen] = []
        self.changes: list[tuple[float, int]] = []
        self.replica_s = 0.0
        self.metric = metric
        self._exporter, self._queue = exporter, queue
        self._loops = list(controller.loops())
        self._next = [0.0] * len(self._loops)
        self._turns = [0] * len(self._loops)

    def now(self) -> float:
        return (time.monotonic() - self._began) * SPEED

    def read(self) -> tuple[float | None, dict[str, float]]:
        try:
            status, text = get(f"http://{self._exporter}/metrics")
            name, brace, labels = self.metric.partition("{")
            value = sample(text, name, brace + labels)
        except (OSError, AssertionError):
            return None, {}
        if status != 200:
            return None, {}
        counts = {
            name: sample(text, "rq_jobs", f'{{queue="{self._queue}",status="{name}"}}')
            for name in ("queued", "started", "scheduled", "finished", "failed")
        }
        counts["accepted"] = sample(
            text, "headrace_jobs_enqueued_total", f'{{queue="{self._queue}"}}'
        )
        counts["loading"] = sample(
            text, "headrace_queue_workers", f'{{queue="{self._queue}",state="loading"}}'
        )
        return value, counts

    def run(self, done: Callable[["ClosedLoop"], bool], wall_seconds: float = 300.0) -> None:
        end = time.monotonic() + wall_seconds
        last = self.now()
        self._turns = [int(last / loop.period_s) for loop in self._loops]
        while not done(self):
            assert time.monotonic() < end, f"not done after {wall_seconds} s: {self.changes}"
            now = self.now()
            self.replica_s += len(self.deployment.counted()) * (now - last)
            last = now
            for index, loop in enumerate(self._loops):
                if now >= self._next[index]:
                    self._turns[index] += 1
                    self._next[index] = max(now, self._turns[index] * loop.period_s)
                    self._turn(index)
            self.deployment.reconcile()
            time.sleep(0.05)

    def _turn(self, index: int) -> None:
        value, counts = self.read()
        scale = self.deployment.scale()
        wanted = self._loops[index].step(self.now(), scale, value)
        self.seen.append(Seen(self.now(), value, scale.spec, scale.status, scale.ready, counts))
        if wanted != scale.spec:
            self.changes.append((self.now(), wanted))
            self.deployment.spec = wanted
            self.deployment.reconcile()

    @property
    def specs(self) -> list[int]:
        """Every count that was asked for, in order."""
        return [0, *(count for _, count in self.changes)]
