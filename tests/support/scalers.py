"""From the chart's manifests to the controllers that would act on them."""

from typing import Any

from headrace.worker.autoscale.behavior import Behavior, PolicyType, RatePolicy, Rules
from headrace.worker.autoscale.controllers import KedaController
from headrace.worker.autoscale.keda import Fallback, FallbackBehavior, ScaledObject


def keda_controller(manifest: dict[str, Any], created: float = 0.0) -> KedaController:
    """KEDA, and the HPA that it makes, with everything that a ScaledObject says."""
    spec = manifest["spec"]
    (trigger,) = spec["triggers"]
    fallback = spec["fallback"]
    obj = ScaledObject(
        max_replica_count=spec["maxReplicaCount"],
        min_replica_count=spec["minReplicaCount"],
        polling_interval_s=float(spec["pollingInterval"]),
        cooldown_period_s=float(spec["cooldownPeriod"]),
        threshold=float(trigger["metadata"]["threshold"]),
        activation_threshold=float(trigger["metadata"]["activationThreshold"]),
        fallback=Fallback(
            fallback["failureThreshold"],
            fallback["replicas"],
            FallbackBehavior(fallback["behavior"]),
        ),
    )
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    ignore = trigger["metadata"]["ignoreNullValues"] == "true"
    return KedaController(obj, behavior=hpa_behavior(behavior), ignore_null=ignore, created=created)


def hpa_behavior(behavior: dict[str, Any]) -> Behavior:
    return Behavior(up=_rules(behavior["scaleUp"]), down=_rules(behavior["scaleDown"]))


def _rules(rules: dict[str, Any]) -> Rules:
    policies = tuple(
        RatePolicy(PolicyType(p["type"]), p["value"], float(p["periodSeconds"]))
        for p in rules["policies"]
    )
    return Rules(policies, window_s=float(rules["stabilizationWindowSeconds"]))
