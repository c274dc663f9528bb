"""The controllers as loops over one Deployment: a plain HPA, or KEDA with the HPA it makes.

A loop has a period and a step; the caller keeps the time, reads the metric and sets the count.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.worker.autoscale.behavior import (
    DEFAULT_UP,
    Behavior,
    PolicyType,
    RatePolicy,
    Rules,
)
from headrace.worker.autoscale.hpa import SYNC_PERIOD_S, HorizontalPodAutoscaler, HpaSpec
from headrace.worker.autoscale.keda import (
    KedaError,
    Measured,
    ScaledObject,
    TriggerHealth,
    measure,
    poll,
    to_milli,
)
from headrace.worker.autoscale.proposal import (
    ExternalReading,
    Reading,
    Scale,
    UnreadableReading,
)

# From a metric's value (None: it cannot be read) and the counts now, the count to set.
Step = Callable[[float, Scale, float | None], int]


@dataclass(frozen=True, slots=True)
class Loop:
    name: str
    period_s: float
    step: Step


class Controller(Protocol):
    def loops(self) -> Sequence[Loop]: ...


def recommended_behavior(cold_start_s: float) -> Behavior:
    """Up without delay, 2 pods per cold start; down 1 pod per 120 s, after 300 s of less."""
    # The API takes whole seconds up to 1800.
    period = float(min(1800, max(15, math.ceil(cold_start_s))))
    return Behavior(
        up=replace(DEFAULT_UP, policies=(RatePolicy(PolicyType.PODS, 2, period),)),
        down=Rules((RatePolicy(PolicyType.PODS, 1, 120.0),), window_s=300.0),
    )


class HpaController:
    """A plain HPA on an External metric with an AverageValue target."""

    def __init__(self, spec: HpaSpec, target: float) -> None:
        self._hpa = HorizontalPodAutoscaler(spec)
        self._target_milli = max(1, math.ceil(target * 1000))

    def loops(self) -> Sequence[Loop]:
        return (Loop("hpa", SYNC_PERIOD_S, self._sync),)

    def _sync(self, now: float, scale: Scale, value: float | None) -> int:
        reading: Reading = UnreadableReading("FailedGetExternalMetric")
        if value is not None:
            reading = ExternalReading((math.trunc(value * 1000),), self._target_milli)
        return self._hpa.sync(now, scale, [reading]).replicas


class KedaController:
    """KEDA's two loops: its own between zero and not zero, and the HPA's above."""

    def __init__(
        self,
        obj: ScaledObject,
        *,
        behavior: Behavior | None,
        ignore_null: bool = False,
        created: float = 0.0,
    ) -> None:
        self._obj, self._ignore_null, self._created = obj, ignore_null, created
        self._hpa = HorizontalPodAutoscaler(
            HpaSpec(
                max_replicas=obj.max_replica_count,
                min_replicas=obj.hpa_min_replicas,
                behavior=behavior,
            )
        )
        self._target_milli = max(1, to_milli(obj.threshold))
        self._health = TriggerHealth()
        self._last_active: float | None = None
        self._cached: Measured | None = None

    def loops(self) -> Sequence[Loop]:
        return (
            Loop("keda", self._obj.polling_interval_s, self._poll),
            Loop("hpa", SYNC_PERIOD_S, self._sync),
        )

    def _measure(self, value: float | None, scale: Scale) -> Measured | None:
        if value is None and self._ignore_null:
            value = 0.0
        try:
            return measure(
                self._obj,
                self._health,
                value,
                current_replicas=scale.spec,
                ready=scale.ready,
            )
        except KedaError:
            return None

    def _poll(self, now: float, scale: Scale, value: float | None) -> int:
        measured = self._cached = self._measure(value, scale)
        active = measured is not None and (
            measured.from_fallback or measured.value > self._obj.activation_threshold
        )
        result = poll(
            self._obj,
            now=now,
            replicas=scale.spec,
            active=active,
            error=measured is None,
            last_active=self._last_active,
            created=self._created,
        )
        if result.touched:
            self._last_active = now
        return result.replicas

    def _sync(self, now: float, scale: Scale, value: float | None) -> int:
        cached = self._obj.use_cached_metrics
        measured = self._cached if cached else self._measure(value, scale)
        reading: Reading = UnreadableReading("FailedGetExternalMetric")
        if measured is not None:
            reading = ExternalReading((to_milli(measured.value),), self._target_milli)
        return self._hpa.sync(now, scale, [reading]).replicas
