"""Simulated workers: cold start, a batch that shares the machine, drain, and who is removed first.

A worker's sequences share it equally, none using more than `ServiceRate.max_share`. `Worker.clock`
is the service each sequence has had since the worker began, so that a job of w worker seconds
admitted at clock c ends at clock c + w, whatever joins or leaves meanwhile. Nothing here knows the
queue, the controllers or what time it is.
"""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from headrace.worker.autoscale.service import ServiceRate


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker's machine and how it comes and goes. Times in seconds, prices per hour.

    A worker is billed from its order to its end. Cold starts vary evenly by +- `cold_start_jitter`
    of their length. On demand, a worker told to stop finishes what it can within `drain_s`, then
    checkpoints the rest. A spot machine checkpoints everything at the notice and goes on until
    `spot_notice_s`; what was done after the checkpoint by jobs that did not finish is lost. Without
    `checkpoint` an unfinished job starts from nothing.
    """

    rate: ServiceRate
    cold_start_s: float = 120.0
    cold_start_jitter: float = 0.0
    drain_s: float = 120.0
    checkpoint: bool = True
    deletion_cost: bool = True
    gpus: int = 1
    on_demand_price: float = 0.0
    spot_price: float = 0.0
    spot_share: float = 0.0
    on_demand_base: int = 0
    spot_notice_s: float = 25.0
    spot_interruptions_per_hour: float = 0.0


class State(Enum):
    LOADING = auto()
    READY = auto()
    DRAINING = auto()
    GONE = auto()


class Worker:
    """`batch` is a heap of (clock at which it ends, job, clock at which it was admitted)."""

    __slots__ = (
        "batch",
        "checkpoint_clock",
        "clock",
        "clock_at",
        "created",
        "id",
        "ready_at",
        "share",
        "spot",
        "state",
        "version",
    )

    def __init__(self, number: int, created: float, ready_at: float, spot: bool) -> None:
        self.id, self.created, self.ready_at, self.spot = number, created, ready_at, spot
        self.state = State.LOADING
        self.batch: list[tuple[float, int, float]] = []
        self.clock, self.clock_at, self.share = 0.0, ready_at, 0.0
        self.checkpoint_clock: float | None = None
        self.version = 0

    def advance(self, now: float) -> None:
        self.clock += (now - self.clock_at) * self.share
        self.clock_at = now

    def admit(self, job: int, work_s: float) -> None:
        """`advance` first, `rebalance` after."""
        heapq.heappush(self.batch, (self.clock + work_s, job, self.clock))

    def finished(self) -> Iterator[int]:
        """Take out the jobs that have had all their service by now."""
        batch, until = self.batch, self.clock + 1e-9
        while batch and batch[0][0] <= until:
            yield heapq.heappop(batch)[1]

    def rebalance(self, max_share: float) -> float:
        """Share the machine anew; the time at which the next job ends, infinite when idle."""
        self.version += 1
        if not self.batch:
            self.share = 0.0
            return math.inf
        self.share = min(1.0 / len(self.batch), max_share)
        return self.clock_at + max(0.0, self.batch[0][0] - self.clock) / self.share

    def checkpoint(self) -> None:
        """Write down how far every sequence is. `advance` first."""
        self.checkpoint_clock = self.clock

    def interrupt(self) -> list[tuple[int, float, float]]:
        """Take out every unfinished job with the worker seconds that a checkpoint holds of it and
        those spent on it. Without an earlier checkpoint the orderly one is written now."""
        kept = self.clock if self.checkpoint_clock is None else self.checkpoint_clock
        jobs = [(job, kept - start, self.clock - start) for _, job, start in self.batch]
        self.batch.clear()
        return jobs


class Fleet:
    """The pods of one Deployment: as many as asked for, and those that still drain."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine = machine
        self.wanted = 0
        self.workers: dict[int, Worker] = {}
        self.ready: list[Worker] = []
        self.started = 0
        self.machine_s = {False: 0.0, True: 0.0}
        self._seed = seed

    def counted(self) -> list[Worker]:
        """Pods in status.replicas: a terminating one is not."""
        return [w for w in self.workers.values() if w.state is not State.DRAINING]

    def start(self, now: float) -> Worker:
        """Order one more; it is ready at its `ready_at`."""
        number = self.started
        self.started += 1
        jitter = self.machine.cold_start_jitter
        cold = self.machine.cold_start_s
        if jitter:
            cold *= 1.0 + jitter * self._rng(number, "cold").uniform(-1.0, 1.0)
        worker = Worker(number, now, now + cold, self._next_is_spot())
        self.workers[number] = worker
        return worker

    def interruption(self, worker: Worker) -> float:
        """When the cloud takes this machine back: infinite for on-demand ones."""
        rate = self.machine.spot_interruptions_per_hour
        if not worker.spot or rate <= 0.0:
            return math.inf
        return worker.created + self._rng(worker.id, "spot").expovariate(rate / 3600.0)

    def _rng(self, number: int, what: str) -> random.Random:
        # One stream a worker, so that two policies meet the same machines in the same order.
        return random.Random(f"{self._seed}:{what}:{number}")

    def _next_is_spot(self) -> bool:
        if not self.machine.spot_share:
            return False
        counted = self.counted()
        spot = sum(w.spot for w in counted)
        if len(counted) - spot < self.machine.on_demand_base:
            return False
        above = max(0, len(counted) - self.machine.on_demand_base)
        # The nearest whole number of spot machines to the share.
        return spot + 0.5 <= self.machine.spot_share * (above + 1)

    def is_ready(self, worker: Worker) -> None:
        worker.state = State.READY
        self.ready.append(worker)

    def drain(self, worker: Worker) -> None:
        """No more claims; it counts no longer."""
        if worker.state is State.READY:
            self.ready.remove(worker)
        worker.state = State.DRAINING

    def gone(self, worker: Worker, now: float) -> None:
        if worker.state is State.READY:
            self.ready.remove(worker)
        worker.state = State.GONE
        del self.workers[worker.id]
        self.machine_s[worker.spot] += now - worker.created

    def close(self, now: float) -> None:
        """Bill what still runs at the end of the simulation."""
        for worker in self.workers.values():
            self.machine_s[worker.spot] += now - worker.created

    def victims(self, number: int) -> list[Worker]:
        """Who goes first, as a ReplicaSet ranks: not ready before ready, then the lower
        pod-deletion-cost (jobs in flight) where workers keep one, then the youngest."""
        with_cost = self.machine.deletion_cost

        def rank(w: Worker) -> tuple[bool, int, float, int]:
            cost = len(w.batch) if with_cost else 0
            return w.state is State.READY, cost, -w.ready_at, -w.id

        return sorted(self.counted(), key=rank)[:number]

    def loading_s(self, now: float) -> tuple[float, ...]:
        return tuple(
            max(0.0, w.ready_at - now) for w in self.workers.values() if w.state is State.LOADING
        )
