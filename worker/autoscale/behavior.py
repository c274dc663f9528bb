"""How fast the HPA lets a proposal through: stabilization windows and rate policies.

Source: kubernetes/kubernetes pkg/controller/podautoscaler/horizontal.go. Both forms are here: the
one with `spec.behavior` and the older one without. Every time is in seconds on the caller's clock;
nothing here reads a clock or a metric.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class SelectPolicy(Enum):
    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


class PolicyType(Enum):
    PODS = "Pods"
    PERCENT = "Percent"


@dataclass(frozen=True, slots=True)
class RatePolicy:
    """At most `value` pods, or percent of the pods at the period's start, within `period_s`."""

    type: PolicyType
    value: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Rules:
    """One direction of `behavior`. None means the default of that direction."""

    policies: tuple[RatePolicy, ...] | None = None
    select: SelectPolicy = SelectPolicy.MAX
    window_s: float | None = None
    tolerance: float | None = None

    def longest_period(self) -> float:
        return max((p.period_s for p in self.policies or ()), default=0.0)


DEFAULT_UP = Rules(
    (RatePolicy(PolicyType.PODS, 4, 15.0), RatePolicy(PolicyType.PERCENT, 100, 15.0)),
    window_s=0.0,
)
DEFAULT_DOWN = Rules((RatePolicy(PolicyType.PERCENT, 100, 15.0),))


@dataclass(frozen=True, slots=True)
class Behavior:
    """`spec.behavior`. A policy list that is given replaces the default list as a whole."""

    up: Rules = DEFAULT_UP
    down: Rules = DEFAULT_DOWN

    def filled(self, cluster_window_s: float) -> "Behavior":
        """The same with every default written out, as the API server stores it."""
        return Behavior(
            _fill(self.up, DEFAULT_UP, 0.0), _fill(self.down, DEFAULT_DOWN, cluster_window_s)
        )


def _fill(rules: Rules, default: Rules, window_s: float) -> Rules:
    return Rules(
        rules.policies if rules.policies is not None else default.policies,
        rules.select,
        rules.window_s if rules.window_s is not None else window_s,
        rules.tolerance,
    )


@dataclass(slots=True)
class Recommendation:
    replicas: int
    at: float


@dataclass(slots=True)
class ScaleEvent:
    change: int
    at: float
    outdated: bool = False


@dataclass(frozen=True, slots=True)
class Limited:
    """A bounded count, and the condition that the HPA reports with it."""

    replicas: int
    condition: str


def stabilize_legacy(
    log: list[Recommendation], desired: int, now: float, window_s: float = 300.0
) -> int:
    """Without `behavior`: the largest recommendation no older than the window. Logs `desired`."""
    cutoff = now - window_s
    best = desired
    reuse: int | None = None
    for index, rec in enumerate(log):
        if rec.at < cutoff:
            reuse = index
        else:
            best = max(best, rec.replicas)
    _record(log, reuse, Recommendation(desired, now))
    return best


def stabilize(
    log: list[Recommendation],
    *,
    spec: int,
    desired: int,
    now: float,
    up_window_s: float,
    down_window_s: float,
) -> int:
    """With `behavior`: rise to the lowest recent recommendation, fall to the highest, else hold."""
    up_cutoff, down_cutoff = now - up_window_s, now - down_window_s
    lowest = highest = desired
    reuse: int | None = None
    for index, rec in enumerate(log):
        if rec.at > up_cutoff:
            lowest = min(lowest, rec.replicas)
        if rec.at > down_cutoff:
            highest = max(highest, rec.replicas)
        if rec.at < up_cutoff and rec.at < down_cutoff:
            reuse = index
    _record(log, reuse, Recommendation(desired, now))
    return min(max(spec, lowest), highest)


def _record(log: list[Recommendation], reuse: int | None, entry: Recommendation) -> None:
    if reuse is None:
        log.append(entry)
    else:
        log[reuse] = entry


def limit_legacy(spec: int, desired: int, minimum: int, maximum: int) -> Limited:
    """Without `behavior`: the bounds, and at most max(2 * spec, 4) in one sync."""
    if desired < minimum:
        return Limited(minimum, "TooFewReplicas")
    limit = max(2 * spec, 4)
    if desired > min(maximum, limit):
        if limit < maximum:
            return Limited(limit, "ScaleUpLimit")
        return Limited(maximum, "TooManyReplicas")
    return Limited(desired, "DesiredWithinRange")


def change_in_period(events: Sequence[ScaleEvent], now: float, period_s: float) -> int:
    """Replicas added (or removed) by events younger than the period."""
    cutoff = now - period_s
    return sum(event.change for event in events if event.at > cutoff)


@dataclass(slots=True)
class EventLog:
    """What the HPA changed lately, by direction. Changes made by others are not in it."""

    up: list[ScaleEvent] = field(default_factory=list)
    down: list[ScaleEvent] = field(default_factory=list)

    def store(self, before: int, after: int, now: float, behavior: Behavior | None) -> None:
        """Events are kept only where `behavior` is set."""
        if behavior is None or before == after:
            return
        if after > before:
            store_event(self.up, after - before, now, behavior.up)
        else:
            store_event(self.down, before - after, now, behavior.down)

    def _start(self, spec: int, now: float, period_s: float) -> int:
        added = change_in_period(self.up, now, period_s)
        return spec - added + change_in_period(self.down, now, period_s)

    def up_limit(self, spec: int, now: float, rules: Rules) -> int:
        """The most replicas that the scale-up policies allow now."""
        if rules.select is SelectPolicy.DISABLED:
            return spec
        limits = []
        for policy in rules.policies or ():
            start = self._start(spec, now, policy.period_s)
            if policy.type is PolicyType.PODS:
                limits.append(start + policy.value)
            else:
                limits.append(math.ceil(start * (1 + policy.value / 100)))
        pick = min if rules.select is SelectPolicy.MIN else max
        return pick(limits, default=spec)

    def down_limit(self, spec: int, now: float, rules: Rules) -> int:
        """The fewest replicas that the scale-down policies allow now."""
        if rules.select is SelectPolicy.DISABLED:
            return spec
        limits = []
        for policy in rules.policies or ():
            start = self._start(spec, now, policy.period_s)
            if policy.type is PolicyType.PODS:
                limits.append(start - policy.value)
            else:
                limits.append(math.trunc(start * (1 - policy.value / 100)))
        pick = max if rules.select is SelectPolicy.MIN else min
        return pick(limits, default=spec)

    def limit(
        self, spec: int, desired: int, minimum: int, maximum: int, now: float, behavior: Behavior
    ) -> Limited:
        """With `behavior`: the bounds and the rate policies of the direction taken."""
        if desired > spec:
            rate = max(self.up_limit(spec, now, behavior.up), spec)
            cap = min(maximum, rate)
            if desired > cap:
                return Limited(cap, "ScaleUpLimit" if rate < maximum else "TooManyReplicas")
        elif desired < spec:
            rate = min(self.down_limit(spec, now, behavior.down), spec)
            floor = max(minimum, rate)
            if desired < floor:
                return Limited(floor, "ScaleDownLimit" if rate > minimum else "TooFewReplicas")
        return Limited(desired, "DesiredWithinRange")


def store_event(events: list[ScaleEvent], change: int, now: float, rules: Rules) -> None:
    """Add an event, in the place of the last one that no policy of this direction can see."""
    cutoff = now - rules.longest_period()
    reuse: int | None = None
    for index, event in enumerate(events):
        if event.at < cutoff:
            event.outdated = True
            reuse = index
    if reuse is None:
        events.append(ScaleEvent(change, now))
    else:
        events[reuse] = ScaleEvent(change, now)
