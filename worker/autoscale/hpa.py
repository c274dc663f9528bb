"""One HorizontalPodAutoscaler (autoscaling/v2): what a sync of the controller decides.

Source: reconcileAutoscaler in kubernetes/kubernetes pkg/controller/podautoscaler/horizontal.go.
The object holds what the controller holds in memory, the logs of recommendations and of scale
events, and no more. It reads no metric itself and knows no queue: readings are passed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headrace.worker.autoscale.behavior import (
    Behavior,
    EventLog,
    Recommendation,
    limit_legacy,
    stabilize,
    stabilize_legacy,
)
from headrace.worker.autoscale.proposal import (
    DEFAULT_TOLERANCE,
    MetricError,
    Reading,
    Scale,
    Tolerance,
)

SYNC_PERIOD_S = 15.0


class ZeroRule(Enum):
    """What a plain HPA with `minReplicas: 0` does at zero replicas.

    METRICS: reads its metrics as at any other count (feature gate HPAScaleToZero up to 1.35).
    CONDITION: only if it went to zero by itself (1.36 and later), so that a zero set by hand means
    paused.
    """

    METRICS = "metrics"
    CONDITION = "condition"


@dataclass(frozen=True, slots=True)
class HpaSpec:
    """The object's spec and the controller flags that bear on it. Defaults are Kubernetes'."""

    max_replicas: int
    min_replicas: int = 1
    behavior: Behavior | None = None
    tolerance: Tolerance = DEFAULT_TOLERANCE
    downscale_window_s: float = 300.0
    zero: ZeroRule = ZeroRule.METRICS

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(
                f"min_replicas {self.min_replicas} and max_replicas {self.max_replicas}: "
                "need 0 <= min <= max and max >= 1"
            )


@dataclass(frozen=True, slots=True)
class Decision:
    """`replicas` is the new spec. `limited` is the ScalingLimited reason where metrics were used,
    `inactive` the ScalingActive=False reason where nothing could be decided."""

    replicas: int
    limited: str | None = None
    inactive: str | None = None


class HorizontalPodAutoscaler:
    """`sync` once every 15 s. `recommendations` None: first seen by this controller."""

    def __init__(
        self, spec: HpaSpec, recommendations: Sequence[Recommendation] | None = None
    ) -> None:
        self.spec = spec
        self.events = EventLog()
        self.recommendations = None if recommendations is None else list(recommendations)
        self._behavior = spec.behavior and spec.behavior.filled(spec.downscale_window_s)
        self._tolerance = self._effective_tolerance()
        self._scaled_to_zero = False

    def sync(self, now: float, scale: Scale, readings: Sequence[Reading]) -> Decision:
        """The replica count to set, given this sync's reading of every metric."""
        if self.recommendations is None:
            self.recommendations = [Recommendation(scale.spec, now)]
        decision = self._decide(now, scale, readings, self.recommendations)
        if decision.replicas != scale.spec:
            self.events.store(scale.spec, decision.replicas, now, self._behavior)
            self._scaled_to_zero = decision.replicas == 0
        return decision

    def _decide(
        self, now: float, scale: Scale, readings: Sequence[Reading], log: list[Recommendation]
    ) -> Decision:
        low, high = self.spec.min_replicas, self.spec.max_replicas
        if scale.spec == 0 and not self._active_at_zero():
            return Decision(0, inactive="ScalingDisabled")
        if scale.spec > high:
            return Decision(high)
        # From zero the floor is met below, by the metrics' own result.
        if scale.spec < low and scale.spec > 0:
            return Decision(low)
        try:
            proposed = propose(scale, readings, self._tolerance)
        except MetricError as error:
            return Decision(scale.spec, inactive=error.reason)
        desired = max(0, proposed)
        if self._behavior is None:
            stable = stabilize_legacy(log, desired, now, self.spec.downscale_window_s)
            limited = limit_legacy(scale.spec, stable, low, high)
        else:
            stable = stabilize(
                log,
                spec=scale.spec,
                desired=desired,
                now=now,
                up_window_s=self._behavior.up.window_s or 0.0,
                down_window_s=self._behavior.down.window_s or 0.0,
            )
            limited = self.events.limit(scale.spec, stable, low, high, now, self._behavior)
        return Decision(max(limited.replicas, low), limited=limited.condition)

    def _active_at_zero(self) -> bool:
        if self.spec.zero is ZeroRule.CONDITION:
            return self._scaled_to_zero
        return self.spec.min_replicas == 0

    def _effective_tolerance(self) -> Tolerance:
        base, behavior = self.spec.tolerance, self._behavior
        if behavior is None:
            return base
        down, up = behavior.down.tolerance, behavior.up.tolerance
        return Tolerance(base.down if down is None else down, base.up if up is None else up)


def propose(scale: Scale, readings: Sequence[Reading], tolerance: Tolerance) -> int:
    """The largest proposal of all metrics.

    Raises MetricError when none could be computed, or when some could not and the rest would scale
    down: an unreadable metric may hold replicas, never remove them.
    """
    best: int | None = None
    failed: MetricError | None = None
    for reading in readings:
        try:
            proposal = reading.propose(scale, tolerance)
        except MetricError as error:
            failed = failed or error
            continue
        best = proposal.replicas if best is None else max(best, proposal.replicas)
    if best is None:
        raise failed or MetricError("FailedGetMetrics", "no metric is configured")
    if failed is not None and best < scale.spec:
        raise failed
    return best
