"""KEDA's ScaledJob: how many Jobs a poll creates. It never stops one.

Source: kedacore/keda pkg/scaling/executor/scale_jobs.go, pkg/scaling/scaledjob/metrics.go.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Combine(Enum):
    """multipleScalersCalculation."""

    MAX = "max"
    MIN = "min"
    AVG = "avg"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Trigger:
    queue_length: float
    target_average: float
    active: bool = True


@dataclass(frozen=True, slots=True)
class Demand:
    """`queue_length` jobs waiting, which `max_scale` Jobs should serve."""

    active: bool
    queue_length: int
    max_scale: int


def combine(triggers: Sequence[Trigger], how: Combine, *, minimum: int, maximum: int) -> Demand:
    """The demand of all active triggers. A minimum above zero is always active."""
    pairs = [
        (t.queue_length, min(t.queue_length / t.target_average, float(maximum)))
        for t in triggers
        if t.active and t.target_average
    ]
    queue, scale = 0.0, 0.0
    if pairs:
        match how:
            case Combine.MAX:
                queue, scale = max(pairs, key=lambda pair: pair[0])
            case Combine.MIN:
                queue, scale = min(pairs, key=lambda pair: pair[0])
            case Combine.AVG:
                queue = sum(q for q, _ in pairs) / len(pairs)
                scale = sum(x for _, x in pairs) / len(pairs)
            case Combine.SUM:
                queue, scale = sum(q for q, _ in pairs), sum(x for _, x in pairs)
    active = minimum > 0 or any(t.active for t in triggers)
    return Demand(active, math.ceil(queue), math.ceil(min(scale, float(maximum))))


def target_average(targets: Sequence[float]) -> float:
    """The mean target of a trigger's metrics; 0 without any."""
    return sum(targets) / len(targets) if targets else 0.0


@dataclass(frozen=True, slots=True)
class Jobs:
    """Unfinished Jobs, and those among them that have no pod running yet."""

    running: int
    pending: int = 0


class Strategy(Protocol):
    """scalingStrategy: Jobs to create at most, and the queue length that bounds them."""

    def bound(self, max_scale: int, jobs: Jobs, maximum: int) -> int: ...
    def queue(self, scale_to: int, maximum: int) -> int: ...


class DefaultStrategy:
    def bound(self, max_scale: int, jobs: Jobs, maximum: int) -> int:
        return max_scale - jobs.running

    def queue(self, scale_to: int, maximum: int) -> int:
        return scale_to


@dataclass(frozen=True, slots=True)
class CustomStrategy:
    """`running_percentage` stays text: what does not parse means the default strategy."""

    deduction: int | None = None
    running_percentage: str | None = None

    def bound(self, max_scale: int, jobs: Jobs, maximum: int) -> int:
        try:
            share = float(self.running_percentage or "")
        except ValueError:
            return max_scale - jobs.running
        return min(max_scale - (self.deduction or 0) - math.trunc(jobs.running * share), maximum)

    def queue(self, scale_to: int, maximum: int) -> int:
        return scale_to


class AccurateStrategy:
    def bound(self, max_scale: int, jobs: Jobs, maximum: int) -> int:
        if max_scale + jobs.running - jobs.pending > maximum:
            return maximum - jobs.running
        return max_scale - jobs.pending

    def queue(self, scale_to: int, maximum: int) -> int:
        return scale_to


class EagerStrategy:
    def bound(self, max_scale: int, jobs: Jobs, maximum: int) -> int:
        return min(maximum - jobs.running - jobs.pending, max_scale)

    def queue(self, scale_to: int, maximum: int) -> int:
        return maximum


@dataclass(frozen=True, slots=True)
class Creation:
    """`effective_max_scale` and `scale_to`; Jobs created are the smaller, when active."""

    effective_max_scale: int
    scale_to: int

    @property
    def jobs(self) -> int:
        return max(0, min(self.effective_max_scale, self.scale_to))


def decide(
    strategy: Strategy, *, scale_to: int, max_scale: int, jobs: Jobs, minimum: int, maximum: int
) -> Creation:
    """What an active poll creates: first the missing part of the minimum, then the strategy's."""
    if jobs.running < minimum:
        missing = minimum - jobs.running
        return Creation(missing, missing)
    above = Jobs(jobs.running - minimum, jobs.pending)
    return Creation(strategy.bound(max_scale, above, maximum), strategy.queue(scale_to, maximum))
