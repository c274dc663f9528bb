"""Every case that the controllers' own tests hold, run against our form of their rules.

tests/data/autoscale/autoscaling_vectors.json names the upstream test of each. A kind without a
runner here fails; nothing is skipped.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.worker.autoscale import behavior as bh
from headrace.worker.autoscale import keda, keda_formula, keda_jobs, proposal
from headrace.worker.autoscale.adapter import Requirement, label_matchers
from headrace.worker.autoscale.hpa import HorizontalPodAutoscaler, HpaSpec
from headrace.worker.autoscale.podgroup import Pod, PodMetric, group_pods
from headrace.worker.autoscale.proposal import PodState, PodUsage, Reading, Scale, Tolerance

DATA = Path(__file__).parents[2] / "data" / "autoscale" / "autoscaling_vectors.json"
VECTORS = json.loads(DATA.read_text())
NOW = 1_000_000.0
Inputs = dict[str, Any]
RUNNERS: dict[str, Callable[[Inputs], Inputs]] = {}


def runs(*kinds: str) -> Callable[[Callable[[Inputs], Inputs]], Callable[[Inputs], Inputs]]:
    def register(function: Callable[[Inputs], Inputs]) -> Callable[[Inputs], Inputs]:
        RUNNERS.update(dict.fromkeys(kinds, function))
        return function

    return register


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_agrees_with_the_controllers_own_test(vector: Inputs) -> None:
    got = RUNNERS[vector["inputs"]["kind"]](vector["inputs"])
    assert {key: got.get(key) for key in vector["expected"]} == vector["expected"]


def test_every_vector_is_here_and_named_once() -> None:
    assert len(VECTORS) == 192
    assert {v["inputs"]["kind"] for v in VECTORS} == RUNNERS.keys()


def tolerance(i: Inputs) -> Tolerance:
    return Tolerance(down=i["tolerance"]["scaleDown"], up=i["tolerance"]["scaleUp"])


def pods(raw: list[Inputs]) -> list[PodUsage]:
    return [PodUsage(PodState(p["state"]), p.get("usageMilli"), p.get("requestMilli")) for p in raw]


def reading(i: Inputs) -> Reading:
    if i.get("error") and i["type"] == "Invalid":
        return proposal.UnreadableReading("InvalidMetricSourceType")
    per_pod = i["target"] == "AverageValue"
    match i["type"]:
        case "External":
            return proposal.ExternalReading(i["levelsMilli"], i["targetMilli"], per_pod)
        case "Object":
            return proposal.ObjectReading(i["levelMilli"], i["targetMilli"], per_pod)
        case "Pods":
            return proposal.PodsReading(pods(i["pods"]), i["targetMilli"])
        case "Resource":
            return proposal.ResourceReading(pods(i["pods"]), i["targetUtilizationPercent"])
    raise AssertionError(i["type"])


@runs("external_average_value", "external_value", "object_value", "object_average_value")
def run_level(i: Inputs) -> Inputs:
    source, _, target = i["kind"].partition("_")
    count = i["statusReplicas"] if "statusReplicas" in i else i["currentReplicas"]
    full = {
        "type": source.capitalize(),
        "target": "Value" if target == "value" else "AverageValue",
        "targetMilli": i.get("targetMilli", i.get("targetAverageMilli")),
        **{key: i[key] for key in ("levelsMilli", "levelMilli") if key in i},
    }
    got = reading(full).propose(Scale(count, count, i.get("readyPods", count)), tolerance(i))
    return {"replicas": got.replicas, "usageMilli": got.usage_milli}


@runs("pods_average_value")
def run_pods(i: Inputs) -> Inputs:
    metric = proposal.PodsReading(pods(i["pods"]), i["targetAverageMilli"])
    count = i["currentReplicas"]
    got = metric.propose(Scale(count, count, count), tolerance(i))
    return {"replicas": got.replicas, "usageMilli": got.usage_milli}


@runs("resource_utilization")
def run_resource(i: Inputs) -> Inputs:
    metric = proposal.ResourceReading(pods(i["pods"]), i["targetUtilizationPercent"])
    count = i["currentReplicas"]
    got = metric.propose(Scale(count, count, count), tolerance(i))
    return {
        "replicas": got.replicas,
        "utilizationPercent": got.utilization_percent,
        "rawAverageMilli": got.usage_milli,
    }


@runs("group_pods")
def run_group_pods(i: Inputs) -> Inputs:
    def metric(raw: Inputs | None) -> PodMetric | None:
        if raw is None:
            return None
        age = raw["sampleSecondsAgo"]
        return PodMetric(math.inf if age is None else age, raw["windowSeconds"] or 0.0)

    states = group_pods(
        {
            p["name"]: Pod(
                p["phase"],
                p["deleted"],
                p["startedSecondsAgo"],
                p["readyCondition"],
                p["readyTransitionSecondsAgo"],
                metric(p["metric"]),
            )
            for p in i["pods"]
        },
        cpu=i["resource"] == "cpu",
        initialization_period_s=i["cpuInitializationPeriodSeconds"],
        readiness_delay_s=i["initialReadinessDelaySeconds"],
    )

    def named(state: PodState) -> list[str]:
        return sorted(name for name, found in states.items() if found is state)

    return {
        "readyPodCount": len(named(PodState.READY)),
        "unready": named(PodState.UNREADY),
        "missing": named(PodState.MISSING),
        "ignored": named(PodState.IGNORED),
    }


@runs("legacy_convert")
def run_legacy_convert(i: Inputs) -> Inputs:
    got = bh.limit_legacy(
        i["currentReplicas"], i["desiredReplicas"], i["minReplicas"], i["maxReplicas"]
    )
    return {"replicas": got.replicas, "condition": got.condition}


def rules(raw: Inputs | None) -> bh.Rules:
    if raw is None:
        return bh.Rules()
    return bh.Rules(
        tuple(
            bh.RatePolicy(bh.PolicyType(p["type"]), p["value"], p["periodSeconds"])
            for p in raw["policies"]
        ),
        bh.SelectPolicy(raw["selectPolicy"]),
        raw.get("stabilizationWindowSeconds"),
    )


def behavior(up: Inputs | None, down: Inputs | None) -> bh.Behavior:
    return bh.Behavior(rules(up), rules(down)).filled(300.0)


def events(i: Inputs) -> bh.EventLog:
    def log(raw: list[Inputs]) -> list[bh.ScaleEvent]:
        return [bh.ScaleEvent(e["change"], NOW - e["secondsAgo"]) for e in raw]

    return bh.EventLog(log(i["scaleUpEvents"]), log(i["scaleDownEvents"]))


def recommendations(raw: list[Inputs]) -> list[bh.Recommendation]:
    return [bh.Recommendation(r["replicas"], NOW - r["secondsAgo"]) for r in raw]


@runs("scale_up_limit")
def run_scale_up_limit(i: Inputs) -> Inputs:
    return {"limit": events(i).up_limit(i["currentReplicas"], NOW, rules(i["rules"]))}


@runs("scale_down_limit")
def run_scale_down_limit(i: Inputs) -> Inputs:
    return {"limit": events(i).down_limit(i["currentReplicas"], NOW, rules(i["rules"]))}


@runs("legacy_stabilize")
def run_legacy_stabilize(i: Inputs) -> Inputs:
    log = recommendations(i["recommendations"])
    got = bh.stabilize_legacy(log, i["desiredReplicas"], NOW, i["windowSeconds"])
    return {"replicas": got, "logLength": len(log)}


@runs("behavior_stabilize")
def run_behavior_stabilize(i: Inputs) -> Inputs:
    log = recommendations(i["recommendations"])
    got = bh.stabilize(
        log,
        spec=i["currentReplicas"],
        desired=i["desiredReplicas"],
        now=NOW,
        up_window_s=i["scaleUpWindowSeconds"],
        down_window_s=i["scaleDownWindowSeconds"],
    )
    return {"replicas": got, "log": [r.replicas for r in log]}


@runs("policy_limit")
def run_policy_limit(i: Inputs) -> Inputs:
    got = events(i).limit(
        i["currentReplicas"],
        i["desiredReplicas"],
        i["minReplicas"],
        i["maxReplicas"],
        NOW,
        behavior(i["scaleUpRules"], i["scaleDownRules"]),
    )
    return {"replicas": got.replicas, "condition": got.condition}


@runs("store_event")
def run_store_event(i: Inputs) -> Inputs:
    log = bh.EventLog(
        [bh.ScaleEvent(e["change"], NOW - e["secondsAgo"]) for e in i["previousEvents"]]
    )
    counted = bh.change_in_period(log.up, NOW, i["countPeriodSeconds"])
    with_behavior = None if i["rules"] is None else behavior(i["rules"], None)
    log.store(10, 10 + i["newChange"], NOW, with_behavior)
    after = [{"change": e.change, "outdated": e.outdated} for e in log.up]
    return {"changeInPeriod": counted, "eventsAfter": after}


@runs("reconcile")
def run_reconcile(i: Inputs) -> Inputs:
    up, down = i["scaleUpRules"], i["scaleDownRules"]
    spec = HpaSpec(
        min_replicas=i["minReplicas"],
        max_replicas=i["maxReplicas"],
        behavior=None if up is None and down is None else bh.Behavior(rules(up), rules(down)),
        tolerance=tolerance(i),
        downscale_window_s=i["clusterDownscaleWindowSeconds"],
    )
    log = None if i["recommendations"] is None else recommendations(i["recommendations"])
    got = HorizontalPodAutoscaler(spec, log).sync(
        NOW,
        Scale(i["specReplicas"], i["statusReplicas"], i["readyPods"]),
        [reading(metric) for metric in i["metrics"]],
    )
    return {
        "replicas": got.replicas,
        "scalingLimited": got.limited,
        "scalingActive": got.inactive,
    }


@runs("keda_fallback")
def run_keda_fallback(i: Inputs) -> Inputs:
    kind = keda.FallbackBehavior(i["behavior"] or "static")
    obj = keda.ScaledObject(
        threshold=i["target"],
        per_pod=i["targetType"] == "AverageValue",
        fallback=keda.Fallback(i["failureThreshold"], i["fallbackReplicas"], kind),
    )
    health = keda.TriggerHealth(i["failuresBefore"])
    result = None if i["scalerResult"] == "error" else i["scalerResult"]
    try:
        got = keda.measure(obj, health, result, current_replicas=i["currentReplicas"])
    except keda.KedaError:
        return {"error": True, "failures": health.failures, "fallbackActive": False}
    return {
        "metric": got.value,
        "failures": health.failures,
        "fallbackActive": got.from_fallback,
    }


@runs("keda_executor")
def run_keda_executor(i: Inputs) -> Inputs:
    given = {
        "max_replica_count": i["maxReplicaCount"],
        "cooldown_period_s": i["cooldownPeriod"],
        "initial_cooldown_period_s": i["initialCooldownPeriod"],
    }
    obj = keda.ScaledObject(
        min_replica_count=i["minReplicaCount"],
        idle_replica_count=i["idleReplicaCount"],
        annotations=i["annotations"],
        **{key: value for key, value in given.items() if value is not None},
    )
    ago = i["lastActiveSecondsAgo"]
    got = keda.poll(
        obj,
        now=NOW,
        replicas=i["currentReplicas"],
        active=i["isActive"],
        error=i["isError"],
        last_active=None if ago is None else NOW - ago,
        created=0.0 if i["createdLongAgo"] else NOW,
    )
    return {"replicas": got.replicas, "activeCondition": got.active}


@runs("keda_prometheus")
def run_keda_prometheus(i: Inputs) -> Inputs:
    try:
        got = keda.prometheus_value(i["httpStatus"], i["body"], ignore_null=i["ignoreNullValues"])
    except keda.KedaError:
        return {"error": True}
    return {"value": got, "error": False}


def strategy(i: Inputs) -> keda_jobs.Strategy:
    match i["strategy"]:
        case "default":
            return keda_jobs.DefaultStrategy()
        case "custom":
            return keda_jobs.CustomStrategy(
                i["customScalingQueueLengthDeduction"], i["customScalingRunningJobPercentage"]
            )
        case "accurate":
            return keda_jobs.AccurateStrategy()
        case "eager":
            return keda_jobs.EagerStrategy()
    raise AssertionError(i["strategy"])


@runs("keda_job_strategy", "keda_job_decision")
def run_keda_job(i: Inputs) -> Inputs:
    got = keda_jobs.decide(
        strategy(i),
        scale_to=i["scaleTo"],
        max_scale=i["maxScale"],
        jobs=keda_jobs.Jobs(i["runningJobs"], i["pendingJobs"]),
        minimum=i.get("minReplicaCount", 0),
        maximum=i["maxReplicaCount"],
    )
    return {"effectiveMaxScale": got.effective_max_scale, "scaleTo": got.scale_to}


@runs("keda_job_state")
def run_keda_job_state(i: Inputs) -> Inputs:
    got = keda_jobs.combine(
        [
            keda_jobs.Trigger(s["queueLength"], s["targetAverage"], s["active"])
            for s in i["scalers"]
        ],
        keda_jobs.Combine(i["multipleScalersCalculation"]),
        minimum=i["minReplicaCount"],
        maximum=i["maxReplicaCount"],
    )
    return {"isActive": got.active, "queueLength": got.queue_length, "maxScale": got.max_scale}


@runs("keda_job_count")
def run_keda_job_count(i: Inputs) -> Inputs:
    demand = keda_jobs.combine(
        [keda_jobs.Trigger(i["queueLength"], i["targetAverage"])],
        keda_jobs.Combine.MAX,
        minimum=i["minReplicaCount"],
        maximum=i["maxReplicaCount"],
    )
    got = keda_jobs.decide(
        strategy(i),
        scale_to=demand.queue_length,
        max_scale=demand.max_scale,
        jobs=keda_jobs.Jobs(i["runningJobs"], i["pendingJobs"]),
        minimum=i["minReplicaCount"],
        maximum=i["maxReplicaCount"],
    )
    return {"jobsCreated": got.jobs}


@runs("keda_target_average")
def run_keda_target_average(i: Inputs) -> Inputs:
    return {"value": keda_jobs.target_average(i["targets"])}


@runs("keda_modifiers")
def run_keda_modifiers(i: Inputs) -> Inputs:
    milli = keda_formula.composite_milli(
        i["formula"],
        i["triggers"],
        target=float(i["target"]),
        fallback_replicas=i["fallbackReplicas"],
    )
    return {"metricName": keda_formula.COMPOSITE_METRIC, "valueMilli": milli}


@runs("keda_trigger_gate")
def run_keda_trigger_gate(i: Inputs) -> Inputs:
    fallback = keda.Fallback(i["failureThreshold"], 1, keda.FallbackBehavior(i["behavior"]))
    return {"value": keda_formula.trigger_value(i["value"], i["failures"], fallback)}


@runs("keda_metric_name")
def run_keda_metric_name(i: Inputs) -> Inputs:
    try:
        name = keda.name_without_index(i["triggerIndex"], i["metricName"])
    except keda.KedaError:
        return {"error": True}
    return {"nameWithoutIndex": name}


@runs("keda_metric_value")
def run_keda_metric_value(i: Inputs) -> Inputs:
    return {"isZero": keda.to_milli(float(i["value"])) == 0}


@runs("adapter_label_matchers")
def run_adapter(i: Inputs) -> Inputs:
    selector = [Requirement(label, op, tuple(values)) for label, op, values in i["selector"]]
    namespace = i["namespace"] if i["namespaced"] else None
    return {
        "labelMatchers": label_matchers(
            selector, namespace=namespace, namespace_label=i["namespaceLabel"]
        )
    }
