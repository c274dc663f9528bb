"""Several policies and targets on one scenario, and which of them to use."""

import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from headrace.worker.autoscale.controllers import Controller
from headrace.worker.autoscale.hpa import SYNC_PERIOD_S
from headrace.worker.autoscale.outcome import Outcome, Scenario, percentile
from headrace.worker.autoscale.policy import (
    Deadline,
    Outstanding,
    PendingOnly,
    ScalingPolicy,
    Tokens,
    jobs_target,
)
from headrace.worker.autoscale.simulate import simulate

Watched = Callable[
    [Scenario, ScalingPolicy], AbstractContextManager[Callable[[float], object] | None]
]
POLICIES = ("pending", "outstanding", "tokens", "deadline")


@dataclass(frozen=True, slots=True)
class Goals:
    """What a policy must hold to be recommended.

    p95_wait_s: for jobs without a deadline; the others are held to theirs. missed_percent: of the
    jobs with a deadline.
    """

    p95_wait_s: float
    missed_percent: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """One policy's outcome with its price. `failures` says which goals it does not hold.

    sorted_waits, sorted_latencies: seconds, ascending. free_wait_s: p95 wait of the jobs that have
    no deadline.
    """

    outcome: Outcome
    sorted_waits: "array[float]"
    sorted_latencies: "array[float]"
    free_wait_s: float
    gpu_hours: float
    cost: float
    failures: tuple[str, ...]

    @property
    def policy(self) -> ScalingPolicy:
        return self.outcome.policy

    @property
    def label(self) -> str:
        return f"{self.policy.name} @ {self.policy.target:g}"

    @property
    def advisable(self) -> bool:
        return not self.failures and not self.policy.caveat


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`meets_goals` False: none did, and this is the least bad."""

    result: Result
    meets_goals: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    scenario: Scenario
    goals: Goals
    results: tuple[Result, ...]
    recommendation: Recommendation


def mean_work_s(scenario: Scenario) -> float:
    """Worker seconds of the trace's mean job."""
    trace, rate = scenario.trace, scenario.machine.rate
    total = rate.work_s(sum(trace.prompt_tokens), sum(trace.output_tokens))
    return total / len(trace)


def default_target(name: str, scenario: Scenario) -> float:
    """The target that follows from the acceptable wait and the trace's mean job."""
    wait = scenario.acceptable_wait_s
    if name == "tokens":
        return wait
    if name == "deadline":
        return 1.0
    slots = scenario.machine.rate.slots
    return float(round(jobs_target(slots, wait, slots * mean_work_s(scenario))))


def make_policy(name: str, target: float, scenario: Scenario) -> ScalingPolicy:
    """The policy object of that name. Raises KeyError."""
    rate, wait = scenario.machine.rate, scenario.acceptable_wait_s

    def deadline() -> Deadline:
        # Until the order is given, and then for a long job that is claimed last.
        margin_s = scenario.scrape_s / 2.0 + SYNC_PERIOD_S + scenario.long_job_s()
        return Deadline(
            scenario.max_replicas,
            catch_up_s=max(wait, 2.0 * scenario.machine.cold_start_s, 1.0),
            margin_s=margin_s,
            target=target,
        )

    makers: dict[str, Callable[[], ScalingPolicy]] = {
        "pending": lambda: PendingOnly(target),
        "outstanding": lambda: Outstanding(target),
        "tokens": lambda: Tokens(target, rate),
        "deadline": deadline,
    }
    return makers[name]()


def compare(
    scenario: Scenario,
    policies: Sequence[ScalingPolicy],
    controller: Callable[[ScalingPolicy], Controller],
    goals: Goals,
    *,
    search: int = 0,
    watched: Watched | None = None,
) -> Comparison:
    """Run every policy with a fresh controller, on the same jobs and the same machines' luck.

    While none holds the goals, all are run again with half the target, `search` times at most.
    `watched` is entered around each run and told the simulated time at every scrape.
    """

    def run(policy: ScalingPolicy) -> Result:
        with watched(scenario, policy) if watched else nullcontext() as tell:
            outcome = simulate(scenario, policy, controller(policy), tell)
        return _result(outcome, scenario, goals)

    results: list[Result] = []
    for _ in range(search + 1):
        results += map(run, policies)
        if any(result.advisable for result in results):
            break
        policies = [make_policy(policy.name, policy.target / 2.0, scenario) for policy in policies]
    return Comparison(scenario, goals, tuple(results), recommend(results, goals))


def _result(outcome: Outcome, scenario: Scenario, goals: Goals) -> Result:
    machine, deadlines = scenario.machine, scenario.trace.deadline
    cost = (
        outcome.on_demand_s * machine.on_demand_price + outcome.spot_s * machine.spot_price
    ) / 3600.0
    free = sorted(w for w, due in zip(outcome.waits, deadlines, strict=True) if due == math.inf)
    free_wait_s = percentile(free, 95.0)
    return Result(
        outcome,
        array("d", sorted(outcome.waits)),
        array("d", sorted(outcome.latencies)),
        free_wait_s,
        outcome.machine_s * machine.gpus / 3600.0,
        cost,
        tuple(_failures(outcome, free_wait_s, goals)),
    )


def _failures(outcome: Outcome, free_wait_s: float, goals: Goals) -> list[str]:
    failures = []
    if outcome.unfinished:
        failures.append(f"{outcome.unfinished} of {outcome.jobs} jobs never finish")
    allowed = outcome.with_deadline * goals.missed_percent / 100.0
    if outcome.missed > allowed:
        percent = 100.0 * outcome.missed / outcome.with_deadline
        failures.append(f"{_count(outcome.missed, 'deadline')} missed ({percent:.3g} %)")
    if free_wait_s > goals.p95_wait_s:
        failures.append(f"p95 wait {free_wait_s:.0f} s over {goals.p95_wait_s:.0f} s")
    return failures


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _spend(result: Result) -> float:
    # Without prices the machine hours decide.
    return result.cost or result.gpu_hours


def recommend(results: Sequence[Result], goals: Goals) -> Recommendation:
    """The cheapest that holds the goals; else the one that fails them least, and says how."""
    good = [r for r in results if r.advisable]
    if not good:
        best = min(
            results,
            key=lambda r: (
                bool(r.policy.caveat),
                r.outcome.unfinished,
                r.outcome.missed,
                max(r.free_wait_s, goals.p95_wait_s),
                _spend(r),
            ),
        )
        lacks = "; ".join(best.failures) or best.policy.caveat
        return Recommendation(
            best,
            False,
            f"none holds the goals; {best.label} comes nearest ({lacks}). "
            "Raise max replicas, shorten the cold start, or keep a minimum",
        )
    # On equal spending, less waiting decides.
    best = min(good, key=lambda r: (_spend(r), percentile(r.sorted_waits, 95.0)))
    reason = _among(best, good, results, goals)
    cheaper = [r.label for r in results if not r.advisable and _spend(r) < _spend(best)]
    if cheaper:
        reason += f". Cheaper but not advised: {', '.join(cheaper)}"
    return Recommendation(best, True, reason)


def _among(best: Result, good: Sequence[Result], results: Sequence[Result], goals: Goals) -> str:
    held = []
    if best.outcome.with_deadline < best.outcome.jobs:
        held.append(f"p95 wait within {goals.p95_wait_s:.0f} s")
    if best.outcome.with_deadline and goals.missed_percent:
        held.append(f"at most {goals.missed_percent:g} % of deadlines missed")
    elif best.outcome.with_deadline:
        held.append("no deadline missed")
    holding = " and ".join(held)
    if len(good) == 1:
        return f"the only one of {len(results)} with {holding}"
    second = min((r for r in good if r is not best), key=_spend)
    saved = 100.0 * (1.0 - _spend(best) / _spend(second)) if _spend(second) else 0.0
    versus = f"{saved:.1f} % below {second.label}" if saved >= 0.05 else f"as {second.label}"
    return f"the cheapest of {len(good)} with {holding} ({versus})"
