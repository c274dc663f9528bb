"""Which pods of a workload a Pods or Resource metric counts. Times are seconds before now.

Source: groupPods in kubernetes/kubernetes pkg/controller/podautoscaler/replica_calculator.go.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.worker.autoscale.proposal import PodState


@dataclass(frozen=True, slots=True)
class PodMetric:
    """When the sample was taken (infinite: never), and the window it covers."""

    sample_age_s: float
    window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pod:
    """`started_ago_s` and `ready_changed_ago_s` are None where the pod carries no such time."""

    phase: str = "Running"
    deleted: bool = False
    started_ago_s: float | None = None
    ready: bool | None = None
    ready_changed_ago_s: float | None = None
    metric: PodMetric | None = None


def group_pods(
    pods: Mapping[str, Pod],
    *,
    cpu: bool,
    initialization_period_s: float = 300.0,
    readiness_delay_s: float = 30.0,
) -> dict[str, PodState]:
    """The state of every pod; readiness and age are looked at for CPU only."""
    return {
        name: _state(pod, cpu, initialization_period_s, readiness_delay_s)
        for name, pod in pods.items()
    }


def _state(pod: Pod, cpu: bool, initialization_period_s: float, delay_s: float) -> PodState:
    if pod.deleted or pod.phase == "Failed":
        return PodState.IGNORED
    if pod.phase == "Pending":
        return PodState.UNREADY
    if pod.metric is None:
        return PodState.MISSING
    if cpu and _warming_up(pod, pod.metric, initialization_period_s, delay_s):
        return PodState.UNREADY
    return PodState.READY


def _warming_up(pod: Pod, metric: PodMetric, period_s: float, delay_s: float) -> bool:
    if pod.ready is None or pod.started_ago_s is None:
        return True
    changed = pod.ready_changed_ago_s if pod.ready_changed_ago_s is not None else float("inf")
    if pod.started_ago_s < period_s:
        return not pod.ready or metric.sample_age_s > changed - metric.window_s
    # Older: unready only if it never was ready since it started.
    return not pod.ready and changed > pod.started_ago_s - delay_s
