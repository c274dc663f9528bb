"""A discrete-event simulation: a trace, a queue, workers, and the controllers that scale them.

Exact in what it models: the controllers' rules (`hpa`, `keda`), the order of claims, slots and
shared service rates, cold starts, drains, checkpoints, spot notices. Not modelled: prefix cache
hits, the KV memory limit, node shortage, and the seconds that Kubernetes needs to see a change.
Controllers run at exact multiples of their periods unless the scenario has a jitter; scrapes lie
half a scrape interval beside them, so that the metric is as old as a real one. Two runs with one
seed are equal.
"""

import heapq
import math
import random
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from headrace.worker.autoscale.backlog import Backlog
from headrace.worker.autoscale.controllers import Controller, Loop
from headrace.worker.autoscale.fleet import Fleet, State, Worker
from headrace.worker.autoscale.outcome import Outcome, Sample, Scenario
from headrace.worker.autoscale.policy import ScalingPolicy
from headrace.worker.autoscale.proposal import Scale
from headrace.worker.autoscale.required import Capacity, Due


class _Kind(IntEnum):
    """In the order in which events of the same moment happen."""

    ENDS = 0
    READY = 1
    NOTICE = 2
    KILL = 3
    SCRAPE = 4
    LOOP = 5


class Simulation:
    """One run of one policy; it is itself the QueueView that the policy measures."""

    def __init__(
        self,
        scenario: Scenario,
        policy: ScalingPolicy,
        controller: Controller,
        tell: Callable[[float], object] | None = None,
    ) -> None:
        self._tell = tell
        jobs = len(scenario.trace)
        self._scenario, self._policy = scenario, policy
        self._loops = tuple(controller.loops())
        self._backlog = Backlog(scenario)
        self._fleet = Fleet(scenario.machine, scenario.seed)
        self._slots = scenario.machine.rate.slots
        self._max_share = scenario.machine.rate.max_share
        self._events: list[tuple[float, int, int, Any, int]] = []
        self._pushed = 0
        self._jitter = random.Random(f"{scenario.seed}:sync")
        self._now = 0.0
        self._metric: float | None = None
        self._out = Outcome(
            policy,
            array("d", bytes(8 * jobs)),
            array("d", [math.inf]) * jobs,
            with_deadline=sum(d != math.inf for d in scenario.trace.deadline),
        )

    # What the policy sees.

    @property
    def pending(self) -> int:
        return self._backlog.pending

    @property
    def running(self) -> int:
        return self._backlog.running

    @property
    def scheduled_due(self) -> int:
        return 0

    @property
    def prompt_tokens(self) -> int:
        return self._backlog.prompt_tokens

    @property
    def output_tokens(self) -> int:
        return self._backlog.output_tokens

    def due(self) -> Sequence[Due]:
        return self._backlog.due(self._now)

    def capacity(self) -> Capacity:
        return Capacity(
            len(self._fleet.ready),
            self._fleet.loading_s(self._now),
            self._scenario.machine.cold_start_s,
        )

    # The run.

    def run(self) -> Outcome:
        """Events in order of time until all is done and the fleet is down, or time is up."""
        scenario, events = self._scenario, self._events
        arrivals, jobs = scenario.trace.arrival, len(scenario.trace)
        limit = scenario.trace.end_s + scenario.run_on_s
        handlers: dict[int, Callable[[Any, int], None]] = {
            _Kind.ENDS: self._ends,
            _Kind.READY: self._is_ready,
            _Kind.NOTICE: self._notice,
            _Kind.KILL: self._kill,
            _Kind.SCRAPE: self._scrape,
            _Kind.LOOP: self._turn,
        }
        self._resize(scenario.initial_replicas)
        self._push(scenario.scrape_s / 2.0, _Kind.SCRAPE, None)
        for loop in self._loops:
            self._push(0.0, _Kind.LOOP, loop)
        job = 0
        while True:
            arrives = arrivals[job] if job < jobs else math.inf
            if arrives <= events[0][0]:
                self._now = arrives
                self._arrive(job)
                job += 1
                continue
            at, kind, _, subject, version = heapq.heappop(events)
            if job == jobs and self._at_rest():
                break
            if at > limit:
                self._now = limit
                break
            self._now = at
            handlers[kind](subject, version)
        return self._close()

    def _push(self, at: float, kind: _Kind, subject: Any, version: int = 0) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (at, kind, self._pushed, subject, version))

    def _at_rest(self) -> bool:
        fleet = self._fleet
        return (
            self._backlog.empty
            and fleet.wanted <= self._scenario.min_replicas
            and all(w.state is not State.DRAINING for w in fleet.workers.values())
        )

    # Jobs.

    def _arrive(self, job: int) -> None:
        self._backlog.arrive(job)
        free = [w for w in self._fleet.ready if len(w.batch) < self._slots]
        if free:
            self._claim(min(free, key=lambda w: len(w.batch)))

    def _claim(self, worker: Worker) -> None:
        """Fill the worker's free slots, then see when its next job ends."""
        worker.advance(self._now)
        backlog, out, trace = self._backlog, self._out, self._scenario.trace
        while backlog.pending and len(worker.batch) < self._slots:
            job = backlog.claim()
            out.waits[job] += self._now - backlog.queued_at[job]
            if self._scenario.expire_late and self._now > trace.deadline[job]:
                out.expired += 1
                out.missed += 1
                backlog.settle(job)
            else:
                worker.admit(job, backlog.work_s[job])
        self._reschedule(worker)

    def _reschedule(self, worker: Worker) -> None:
        ends = worker.rebalance(self._max_share)
        if ends < math.inf:
            self._push(ends, _Kind.ENDS, worker, worker.version)

    def _ends(self, worker: Worker, version: int) -> None:
        if version != worker.version:
            return
        worker.advance(self._now)
        out, trace, backlog = self._out, self._scenario.trace, self._backlog
        for job in worker.finished():
            out.finished += 1
            out.latencies[job] = self._now - trace.arrival[job]
            out.missed += self._now > trace.deadline[job]
            out.useful_work_s += backlog.full_work_s[job]
            out.lost_work_s += (
                backlog.done_tokens[job] / self._scenario.machine.rate.prefill_tokens_per_s
            )
            backlog.settle(job)
        if worker.state is State.READY:
            self._claim(worker)
        elif worker.batch:
            self._reschedule(worker)
        else:
            worker.version += 1
            self._fleet.gone(worker, self._now)

    # Workers.

    def _resize(self, replicas: int) -> None:
        """What a Deployment does when its count changes, or when a pod of it is gone."""
        fleet = self._fleet
        fleet.wanted = replicas
        counted = len(fleet.counted())
        for _ in range(replicas - counted):
            worker = fleet.start(self._now)
            self._push(worker.ready_at, _Kind.READY, worker)
            notice = fleet.interruption(worker)
            if notice < math.inf:
                self._push(notice, _Kind.NOTICE, worker)
        for worker in fleet.victims(max(0, counted - replicas)):
            self._out.busy_removals += bool(worker.batch)
            self._stop(worker, fleet.machine.drain_s)
        self._out.peak_replicas = max(self._out.peak_replicas, replicas)

    def _stop(self, worker: Worker, grace_s: float) -> None:
        if worker.batch:
            self._fleet.drain(worker)
            self._push(self._now + grace_s, _Kind.KILL, worker)
        else:
            self._fleet.gone(worker, self._now)

    def _is_ready(self, worker: Worker, version: int) -> None:
        if worker.state is State.LOADING:
            self._fleet.is_ready(worker)
            self._out.cold_starts += 1
            self._claim(worker)

    def _notice(self, worker: Worker, version: int) -> None:
        if worker.state is State.GONE:
            return
        self._out.interruptions += 1
        if worker.batch:
            worker.advance(self._now)
            worker.checkpoint()
        self._stop(worker, self._fleet.machine.spot_notice_s)
        self._resize(self._fleet.wanted)

    def _kill(self, worker: Worker, version: int) -> None:
        if worker.state is State.GONE:
            return
        worker.advance(self._now)
        out, rate = self._out, self._scenario.machine.rate
        for job, kept_s, spent_s in worker.interrupt():
            gained = self._backlog.put_back(job, self._now, kept_s)
            out.requeued += 1
            out.resumed_tokens += gained
            out.lost_work_s += max(0.0, spent_s - gained / rate.decode_tokens_per_s)
        worker.version += 1
        self._fleet.gone(worker, self._now)
        for other in self._fleet.ready:
            if self._backlog.pending and len(other.batch) < self._slots:
                self._claim(other)

    # Clockwork.

    def _scrape(self, subject: None, version: int) -> None:
        self._read()
        if self._tell is not None:
            self._tell(self._now)
        backlog, fleet = self._backlog, self._fleet
        counted = len(fleet.counted())
        self._out.replica_s += counted * self._scenario.scrape_s
        self._out.samples.append(
            Sample(
                self._now,
                backlog.pending,
                backlog.running,
                counted,
                len(fleet.ready),
                self._metric,
            )
        )
        self._push(self._now + self._scenario.scrape_s, _Kind.SCRAPE, None)

    def _read(self) -> None:
        readable = self._scenario.metric_readable(self._now)
        self._metric = self._policy.measure(self) if readable else None

    def _turn(self, loop: Loop, version: int) -> None:
        """`version` counts the loop's turns, so that its times are exact multiples."""
        fleet = self._fleet
        if not self._out.samples:
            # Before the first scrape: what the exporter says when it starts.
            self._read()
        scale = Scale(fleet.wanted, len(fleet.counted()), len(fleet.ready))
        wanted = loop.step(self._now, scale, self._metric)
        if wanted != fleet.wanted:
            self._resize(wanted)
        late = self._scenario.sync_jitter_s
        at = (version + 1) * loop.period_s + (self._jitter.uniform(0.0, late) if late else 0.0)
        self._push(max(at, self._now), _Kind.LOOP, loop, version + 1)

    def _close(self) -> Outcome:
        out, trace, fleet = self._out, self._scenario.trace, self._fleet
        fleet.close(self._now)
        out.end_s = self._now
        out.on_demand_s, out.spot_s = fleet.machine_s[False], fleet.machine_s[True]
        for job in self._backlog.unsettled():
            out.missed += trace.deadline[job] <= self._now
        for job in self._backlog.waiting():
            out.waits[job] += self._now - self._backlog.queued_at[job]
        return out


def simulate(
    scenario: Scenario,
    policy: ScalingPolicy,
    controller: Controller,
    tell: Callable[[float], object] | None = None,
) -> Outcome:
    """One run. The controller must be fresh: it remembers what it did. `tell` hears the simulated
    time at every scrape."""
    return Simulation(scenario, policy, controller, tell).run()
