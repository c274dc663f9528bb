"""How many replicas one metric asks for: the arithmetic of the HPA's replica calculator.

Source: kubernetes/kubernetes pkg/controller/podautoscaler/replica_calculator.go (1.33 and later).
Values and targets are integers in thousandths, ratios are doubles in the controller's own order of
operations: the rounding is part of the behaviour. Nothing here knows windows, policies, bounds or
time of day; `behavior` and `hpa` do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


class MetricError(Exception):
    """A metric gave no proposal. `reason` is the one the controller writes in ScalingActive."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a ratio may lie from 1 before anything happens, both ends included."""

    down: float = 0.1
    up: float = 0.1

    def contains(self, ratio: float) -> bool:
        return (1.0 - self.down) <= ratio <= (1.0 + self.up)


DEFAULT_TOLERANCE = Tolerance()


@dataclass(frozen=True, slots=True)
class Scale:
    """The replica counts that a sync starts from.

    `spec` is what is asked for, `status` how many pods exist (starting ones too, terminating ones
    not), `ready` how many of them are running and ready.
    """

    spec: int
    status: int
    ready: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """`usage_milli` is what the controller shows in status.currentMetrics."""

    replicas: int
    usage_milli: int
    utilization_percent: int | None = None


class Reading(Protocol):
    """One metric, read at one sync."""

    def propose(self, scale: Scale, tolerance: Tolerance) -> Proposal:
        """Raises MetricError when the metric cannot be used."""


def _ceil_capped(value: float, limit: int) -> int:
    if math.isnan(value):
        return 0
    return limit if value >= limit else math.ceil(value)


def _divide(a: float, b: float) -> float:
    if b == 0.0:
        return math.nan if a == 0.0 else math.inf
    return a / b


def _total(levels_milli: Sequence[int], reason: str) -> int:
    """The sum in 64 bits; a negative one is taken for an overflow, as the controller does."""
    if not levels_milli:
        raise MetricError(reason, "no metrics returned")
    total = sum(levels_milli)
    return total if 0 <= total <= INT64_MAX else INT64_MAX


def average_value(total_milli: int, target_milli: int, status: int, tol: Tolerance) -> Proposal:
    """`ceil(total / target)`; the current count matters only for the tolerance."""
    ratio = _divide(float(total_milli), float(target_milli) * float(status))
    replicas = status
    if not tol.contains(ratio):
        replicas = _ceil_capped(float(total_milli) / float(target_milli), INT32_MAX)
    shown = _ceil_capped(_divide(float(total_milli), float(status)), INT64_MAX)
    return Proposal(replicas, shown)


def value(total_milli: int, target_milli: int, scale: Scale, tol: Tolerance) -> Proposal:
    """`ceil(total / target * ready pods)`; from zero replicas `ceil(total / target)`."""
    ratio = float(total_milli) / float(target_milli)
    if scale.spec == 0:
        return Proposal(_ceil_capped(ratio, INT32_MAX), total_milli)
    if tol.contains(ratio):
        return Proposal(scale.spec, total_milli)
    return Proposal(_ceil_capped(ratio * scale.ready, INT32_MAX), total_milli)


@dataclass(frozen=True, slots=True)
class ExternalReading:
    """An External metric: every series that the metrics API returned, which are added up.

    `per_pod` chooses AverageValue (else Value). No series at all is an error, not zero.
    """

    levels_milli: Sequence[int]
    target_milli: int
    per_pod: bool = True

    def propose(self, scale: Scale, tolerance: Tolerance) -> Proposal:
        total = _total(self.levels_milli, "FailedGetExternalMetric")
        if self.per_pod:
            return average_value(total, self.target_milli, scale.status, tolerance)
        return value(total, self.target_milli, scale, tolerance)


@dataclass(frozen=True, slots=True)
class ObjectReading:
    """An Object metric: one number."""

    level_milli: int
    target_milli: int
    per_pod: bool = False

    def propose(self, scale: Scale, tolerance: Tolerance) -> Proposal:
        if self.per_pod:
            return average_value(self.level_milli, self.target_milli, scale.status, tolerance)
        return value(self.level_milli, self.target_milli, scale, tolerance)


@dataclass(frozen=True, slots=True)
class UnreadableReading:
    """A metric that could not be fetched, or of a type that the controller does not know."""

    reason: str

    def propose(self, scale: Scale, tolerance: Tolerance) -> Proposal:
        raise MetricError(self.reason, "the metric could not be read")


class PodState(Enum):
    READY = "ready"
    UNREADY = "unready"
    MISSING = "missing"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class PodUsage:
    """`usage_milli` is None for a pod without a metric; `request_milli` only for Resource."""

    state: PodState
    usage_milli: int | None = None
    request_milli: int | None = None


@dataclass(frozen=True, slots=True)
class PodsReading:
    """A Pods metric with an AverageValue target, pods already grouped (see `podgroup`)."""

    pods: Sequence[PodUsage]
    target_milli: int

    def propose(self, scale: Scale, tolerance: Tolerance) -> Proposal:
        counted = [p.usage_milli or 0 for p in self.pods if p.state is PodState.READY]
        if not counted:
            raise MetricError("FailedGetPodsMetric", "no pod with a metric")
        average = sum(counted) // len(counted)
        ratio = average / self.target_milli
        missing = sum(p.state is PodState.MISSING for p in self.pods)
        unready = sum(p.state is PodState.UNREADY for p in self.pods)
        if not missing and not (unready and ratio > 1.0):
            return Proposal(_plain(ratio, len(counted), scale.spec, tolerance), average)
        filled = list(counted)
        if ratio != 1.0:
            filled += [self.target_milli if ratio < 1.0 else 0] * missing
        if ratio > 1.0:
            filled += [0] * unready
        refilled = (sum(filled) // len(filled)) / self.target_milli
        return Proposal(_filled(ratio, refilled, len(filled), scale.spec, tolerance), average)


@dataclass(frozen=True, slots=True)
class ResourceReading:
    """A Resource metric with a Utilization target in percent of the requests."""

    pods: Sequence[PodUsage]
    target_percent: int

    def propose(self, scale: Scale, tolerance: Tolerance) -> Proposal:
        counted = [self._pair(p) for p in self.pods if p.state is PodState.READY]
        if not counted:
            raise MetricError("FailedGetResourceMetric", "no pod with a metric")
        percent = self._percent(counted)
        ratio = percent / self.target_percent
        average = sum(usage for usage, _ in counted) // len(counted)
        missing = [p for p in self.pods if p.state is PodState.MISSING]
        unready = [p for p in self.pods if p.state is PodState.UNREADY]
        if not missing and not (unready and ratio > 1.0):
            replicas = _plain(ratio, len(counted), scale.spec, tolerance)
            return Proposal(replicas, average, percent)
        filled = list(counted)
        for pod in missing:
            request = self._request(pod)
            if ratio < 1.0:
                filled.append((request * max(100, self.target_percent) // 100, request))
            elif ratio > 1.0:
                filled.append((0, request))
        if ratio > 1.0:
            filled += [(0, self._request(pod)) for pod in unready]
        refilled = self._percent(filled) / self.target_percent
        replicas = _filled(ratio, refilled, len(filled), scale.spec, tolerance)
        return Proposal(replicas, average, percent)

    def _pair(self, pod: PodUsage) -> tuple[int, int]:
        return pod.usage_milli or 0, self._request(pod)

    @staticmethod
    def _request(pod: PodUsage) -> int:
        if not pod.request_milli:
            raise MetricError("FailedGetResourceMetric", "a pod has no request for the resource")
        return pod.request_milli

    @staticmethod
    def _percent(pairs: Sequence[tuple[int, int]]) -> int:
        return sum(usage for usage, _ in pairs) * 100 // sum(request for _, request in pairs)


def _plain(ratio: float, counted: int, spec: int, tolerance: Tolerance) -> int:
    if tolerance.contains(ratio):
        return spec
    return _ceil_capped(ratio * counted, INT32_MAX)


def _filled(ratio: float, refilled: float, pods: int, spec: int, tolerance: Tolerance) -> int:
    """The rule once unready and missing pods were given a value: never reverse the direction."""
    if tolerance.contains(refilled) or (ratio - 1.0) * (refilled - 1.0) < 0.0:
        return spec
    replicas = _ceil_capped(refilled * pods, INT32_MAX)
    if (refilled < 1.0 and replicas > spec) or (refilled > 1.0 and replicas < spec):
        return spec
    return replicas
