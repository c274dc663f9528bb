"""What a queue is scaled on: one object a policy, each giving the metric and its target.

The exporter and the simulator measure with the same objects. The metric is a total over the queue,
its target an AverageValue: the HPA asks for ceil(metric / target) replicas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.worker.autoscale.required import Capacity, Due, replicas_required
from headrace.worker.autoscale.service import ServiceRate


class QueueView(Protocol):
    """What is known of a queue and its workers at one moment."""

    @property
    def pending(self) -> int:
        """Jobs that wait to be claimed."""

    @property
    def running(self) -> int:
        """Jobs that a worker holds."""

    @property
    def scheduled_due(self) -> int:
        """Jobs put off (retries) that fall due within one cold start."""

    @property
    def prompt_tokens(self) -> int:
        """Outstanding, in jobs pending, running and due."""

    @property
    def output_tokens(self) -> int:
        """As prompt_tokens."""

    def due(self) -> Sequence[Due]:
        """Outstanding work in worker seconds by its deadline."""

    def capacity(self) -> Capacity:
        """Workers ready and loading, and the cold start of a new one. Rate 1."""


class ScalingPolicy(Protocol):
    """`name` as the command line has it; `unit` is what `target` counts; `caveat` is why it is
    measured but never recommended, empty for the others."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> float: ...
    @property
    def unit(self) -> str: ...
    @property
    def caveat(self) -> str: ...
    def measure(self, queue: QueueView) -> float: ...


def replicas_wanted(policy: ScalingPolicy, queue: QueueView) -> int:
    """What the HPA would ask for, before tolerance, windows and bounds."""
    return math.ceil(policy.measure(queue) / policy.target)


def jobs_target(slots: int, acceptable_wait_s: float, mean_job_s: float) -> float:
    """Outstanding jobs per replica: slots x acceptable wait / mean job time, at least one job.

    mean_job_s is a job's time in a full batch, that is slots x its worker seconds.
    """
    return max(1.0, slots * acceptable_wait_s / mean_job_s)


@dataclass(frozen=True, slots=True)
class PendingOnly:
    """Jobs not yet claimed. Reads 0 while every worker is full: kept to show what that does."""

    target: float
    name: str = field(default="pending", init=False)
    unit: str = field(default="pending jobs per replica", init=False)
    caveat: str = field(default="reads 0 while every worker is full", init=False)

    def measure(self, queue: QueueView) -> float:
        return float(queue.pending)


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Jobs accepted and not finished."""

    target: float
    name: str = field(default="outstanding", init=False)
    unit: str = field(default="outstanding jobs per replica", init=False)
    caveat: str = field(default="", init=False)

    def measure(self, queue: QueueView) -> float:
        return float(queue.pending + queue.running + queue.scheduled_due)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Outstanding tokens in seconds of one worker; the target is the acceptable wait."""

    target: float
    rate: ServiceRate
    name: str = field(default="tokens", init=False)
    unit: str = field(default="seconds of work per replica", init=False)
    caveat: str = field(default="", init=False)

    def measure(self, queue: QueueView) -> float:
        return self.rate.work_s(queue.prompt_tokens, queue.output_tokens)


@dataclass(frozen=True, slots=True)
class Deadline:
    """`replicas_required`, target 1. Arguments as there."""

    max_replicas: int
    catch_up_s: float
    margin_s: float = 0.0
    target: float = 1.0
    name: str = field(default="deadline", init=False)
    unit: str = field(default="replicas required", init=False)
    caveat: str = field(default="", init=False)

    def measure(self, queue: QueueView) -> float:
        required = replicas_required(
            queue.due(),
            queue.capacity(),
            max_replicas=self.max_replicas,
            catch_up_s=self.catch_up_s,
            margin_s=self.margin_s,
        )
        return float(required.replicas)
