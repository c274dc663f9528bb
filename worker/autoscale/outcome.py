"""What a simulation is asked and what it answers: plain data."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.worker.autoscale.fleet import Machine
from headrace.worker.autoscale.policy import ScalingPolicy
from headrace.worker.autoscale.trace import Trace


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is the same for every policy compared. Times in seconds.

    scrape_s: how often the exporter is read. sync_jitter_s: how much later than its exact time a
    controller's turn may come. deadline_order: what is due first is claimed first, else first in
    first out. expire_late: a job whose deadline is past is not started. outages: (start, length)
    during which the metric cannot be read. run_on_s: how long after the last arrival the simulation
    may go on before what is left counts as unfinished.
    """

    trace: Trace
    machine: Machine
    min_replicas: int = 0
    max_replicas: int = 20
    initial_replicas: int = 0
    acceptable_wait_s: float = 300.0
    scrape_s: float = 15.0
    sync_jitter_s: float = 0.0
    deadline_order: bool = True
    expire_late: bool = False
    outages: tuple[tuple[float, float], ...] = ()
    run_on_s: float = 21600.0
    seed: int = 0

    def long_job_s(self) -> float:
        """Running time of a long job of the trace: 999 of 1000 take less, each by itself."""
        trace = self.trace
        return percentile(
            sorted(map(self.machine.rate.alone_s, trace.prompt_tokens, trace.output_tokens)), 99.9
        )

    def metric_readable(self, now: float) -> bool:
        return not any(start <= now < start + length for start, length in self.outages)


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one scrape. `metric` None: the exporter did not answer."""

    at: float
    pending: int
    running: int
    replicas: int
    ready: int
    metric: float | None


@dataclass(slots=True)
class Outcome:
    """What a run came to. Waits and latencies are in order of arrival, in seconds.

    waits: time in the queue, of all attempts together (up to the end, for a job left there).
    latencies: arrival to
    result, infinite where there was none. missed: finished late, expired, or unfinished when due.
    lost_work_s: worker seconds that had to be done again. busy_removals: workers told to stop by a
    scale-down while they held jobs. replica_s: pods not terminating, summed over time.
    """

    policy: ScalingPolicy
    waits: "array[float]"
    latencies: "array[float]"
    samples: list[Sample] = field(default_factory=list)
    end_s: float = 0.0
    finished: int = 0
    expired: int = 0
    missed: int = 0
    with_deadline: int = 0
    requeued: int = 0
    resumed_tokens: int = 0
    useful_work_s: float = 0.0
    lost_work_s: float = 0.0
    cold_starts: int = 0
    busy_removals: int = 0
    interruptions: int = 0
    on_demand_s: float = 0.0
    spot_s: float = 0.0
    replica_s: float = 0.0
    peak_replicas: int = 0

    @property
    def jobs(self) -> int:
        return len(self.waits)

    @property
    def unfinished(self) -> int:
        return self.jobs - self.finished - self.expired

    @property
    def machine_s(self) -> float:
        return self.on_demand_s + self.spot_s

    @property
    def utilization(self) -> float:
        """Work that led to results over all that the machines billed could have done."""
        return self.useful_work_s / self.machine_s if self.machine_s else 0.0


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed; 0 of none."""
    if not ascending:
        return 0.0
    return ascending[max(1, math.ceil(percent / 100.0 * len(ascending))) - 1]
