"""KEDA's ScaledObject: its own loop between zero and not zero, and the metric it hands to the HPA.

Source: kedacore/keda pkg/scaling/executor/scale_scaledobjects.go, pkg/fallback/fallback.go,
pkg/scalers/{scaler,prometheus_scaler}.go (main of August 2026; documentation 2.21). Counts above
one are the HPA's business (`hpa`). Nothing here does I/O or reads a clock.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

PAUSED = "autoscaling.keda.sh/paused"
PAUSED_REPLICAS = "autoscaling.keda.sh/paused-replicas"
PAUSED_SCALE_IN = "autoscaling.keda.sh/paused-scale-in"
PAUSED_SCALE_OUT = "autoscaling.keda.sh/paused-scale-out"
FORCE_ACTIVATION = "autoscaling.keda.sh/force-activation"


class KedaError(Exception):
    """A trigger could not give a value."""


class FallbackBehavior(Enum):
    STATIC = "static"
    CURRENT_REPLICAS = "currentReplicas"
    CURRENT_REPLICAS_IF_HIGHER = "currentReplicasIfHigher"
    CURRENT_REPLICAS_IF_LOWER = "currentReplicasIfLower"
    SCALING_MODIFIERS = "scalingModifiers"


@dataclass(frozen=True, slots=True)
class Fallback:
    """What to report once a trigger has failed more than `failure_threshold` times in a row."""

    failure_threshold: int
    replicas: int
    behavior: FallbackBehavior = FallbackBehavior.STATIC

    def wanted(self, current_replicas: int) -> int:
        """The replica count that the made-up metric stands for."""
        match self.behavior:
            case FallbackBehavior.CURRENT_REPLICAS:
                return current_replicas
            case FallbackBehavior.CURRENT_REPLICAS_IF_HIGHER:
                return max(current_replicas, self.replicas)
            case FallbackBehavior.CURRENT_REPLICAS_IF_LOWER:
                return min(current_replicas, self.replicas)
            case _:
                return self.replicas


@dataclass(frozen=True, slots=True)
class ScaledObject:
    """The fields of a ScaledObject with one trigger that bear on replica counts."""

    max_replica_count: int = 100
    min_replica_count: int | None = None
    idle_replica_count: int | None = None
    polling_interval_s: float = 30.0
    cooldown_period_s: float = 300.0
    initial_cooldown_period_s: float = 0.0
    threshold: float = 5.0
    activation_threshold: float = 0.0
    per_pod: bool = True
    use_cached_metrics: bool = False
    fallback: Fallback | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        idle, low = self.idle_replica_count, self.min_replicas
        if idle is not None and idle >= low:
            raise ValueError(
                f"idle_replica_count {idle} must be below min_replica_count {low}: "
                "raise the minimum or leave idle out"
            )
        if not 0 <= low <= self.max_replica_count:
            raise ValueError(
                f"min_replica_count {low} and max_replica_count {self.max_replica_count}: "
                "need 0 <= min <= max"
            )

    @property
    def min_replicas(self) -> int:
        return self.min_replica_count or 0

    @property
    def hpa_min_replicas(self) -> int:
        """The `minReplicas` of the HPA that KEDA makes: never zero."""
        return self.min_replicas or 1

    def is_set(self, annotation: str) -> bool:
        return self.annotations.get(annotation, "").lower() == "true"

    @property
    def paused(self) -> bool:
        if PAUSED_REPLICAS in self.annotations:
            return True
        text = self.annotations.get(PAUSED)
        # KEDA takes any text that is no boolean for "paused".
        return text is not None and text.lower() not in {"false", "f", "0"}


@dataclass(frozen=True, slots=True)
class Poll:
    """`replicas` to set (equal to the current count: nothing to do); `active` as in the Active
    condition; `touched` when lastActiveTime becomes now."""

    replicas: int
    active: bool
    touched: bool = False


def poll(
    obj: ScaledObject,
    *,
    now: float,
    replicas: int,
    active: bool,
    error: bool,
    last_active: float | None,
    created: float,
) -> Poll:
    """One turn of the operator's loop. `active`: some trigger is above its activation threshold."""
    low = obj.min_replicas
    if obj.paused:
        return Poll(replicas, active)
    if active or obj.is_set(FORCE_ACTIVATION):
        if obj.is_set(PAUSED_SCALE_OUT):
            return Poll(replicas, True)
        if replicas == 0 or (obj.idle_replica_count is not None and replicas < low):
            return Poll(low or 1, True, touched=True)
        return Poll(replicas, True, touched=not error)
    if error:
        # The metric is unknown, not zero: neither loop may remove anything on its account.
        return Poll(replicas, False)
    idle = obj.idle_replica_count
    if (idle is not None and replicas > idle) or (replicas > 0 and low == 0):
        target = low if idle is None else idle
        if _cooled_down(obj, now, last_active, created) and not obj.is_set(PAUSED_SCALE_IN):
            return Poll(target, False)
        return Poll(replicas, False)
    if idle is None and replicas < low:
        return Poll(low, False)
    return Poll(replicas, False)


def _cooled_down(obj: ScaledObject, now: float, last_active: float | None, created: float) -> bool:
    if last_active is None:
        return now > created + obj.initial_cooldown_period_s
    return now > last_active + obj.cooldown_period_s


@dataclass(slots=True)
class TriggerHealth:
    """Failures in a row of one trigger, counted by both loops."""

    failures: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    value: float
    from_fallback: bool = False


def measure(
    obj: ScaledObject,
    health: TriggerHealth,
    reading: float | None,
    *,
    current_replicas: int,
    ready: int = 0,
) -> Measured:
    """The trigger's value, or its fallback. `reading` None: the scaler failed.

    Raises KedaError while there is no value and no fallback yet.
    """
    if reading is not None:
        health.failures = 0
        return Measured(reading)
    health.failures += 1
    fallback = obj.fallback
    if fallback is None or health.failures <= fallback.failure_threshold:
        raise KedaError(f"the trigger failed {health.failures} times in a row")
    wanted = fallback.wanted(current_replicas)
    if obj.per_pod:
        return Measured(obj.threshold * wanted, True)
    if ready == 0:
        raise KedaError("a fallback for a Value target needs a ready pod")
    return Measured(obj.threshold * wanted / ready, True)


def to_milli(value: float) -> int:
    """The metric as the HPA gets it: three decimals; NaN, infinite and negative become 0."""
    if not math.isfinite(value) or value < 0:
        return 0
    return int(f"{value:.3f}".replace(".", ""))


def prometheus_value(status: int, body: str, *, ignore_null: bool = True) -> float:
    """What the prometheus trigger reads from an instant query's answer.

    With `ignore_null` (KEDA's default) a target that is gone reads as 0, which is an empty queue:
    set `ignoreNullValues: "false"`. Raises KedaError.
    """
    if not 200 <= status <= 299:
        raise KedaError(f"Prometheus answered {status}")
    try:
        data = json.loads(body).get("data") or {}
        series = data.get("result") or []
        sample = (series[0].get("value") or []) if len(series) == 1 else []
    except (ValueError, AttributeError, TypeError) as error:
        raise KedaError(f"Prometheus answered something else than a vector: {error}") from error
    if len(series) > 1:
        raise KedaError(f"the query gave {len(series)} series: aggregate them to one")
    if not sample:
        return _null("no sample", ignore_null)
    if len(sample) < 2:
        raise KedaError("the sample has no value")
    try:
        value = float(sample[1])
    except (ValueError, TypeError) as error:
        raise KedaError(f"the sample {sample[1]!r} is not a number") from error
    return value if math.isfinite(value) else _null(f"the sample is {sample[1]}", ignore_null)


def _null(what: str, ignore_null: bool) -> float:
    if ignore_null:
        return 0.0
    raise KedaError(what)


def metric_name(trigger_index: int, name: str) -> str:
    """The External metric's name that KEDA gives to a trigger."""
    return f"s{trigger_index}-" + re.sub(r"[/.:%()]", "-", name)


def name_without_index(trigger_index: int, metric: str) -> str:
    """The inverse of `metric_name`, as far as there is one. Raises KedaError."""
    prefix = f"s{trigger_index}-"
    if not metric.startswith(prefix):
        raise KedaError(f"metric name {metric!r} does not start with {prefix!r}")
    return metric.removeprefix(prefix)
