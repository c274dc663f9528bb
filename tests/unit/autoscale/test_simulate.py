"""The simulation against arithmetic, queueing theory and conservation."""

import math
from dataclasses import replace

import pytest

from headrace.worker.autoscale import keda
from headrace.worker.autoscale.behavior import Behavior
from headrace.worker.autoscale.controllers import (
    Controller,
    HpaController,
    KedaController,
    Loop,
    recommended_behavior,
)
from headrace.worker.autoscale.fleet import Fleet, Machine, Worker
from headrace.worker.autoscale.hpa import HpaSpec
from headrace.worker.autoscale.outcome import Outcome, Scenario
from headrace.worker.autoscale.policy import Deadline, Outstanding, ScalingPolicy
from headrace.worker.autoscale.service import ServiceRate
from headrace.worker.autoscale.shapes import Load, make
from headrace.worker.autoscale.simulate import simulate
from headrace.worker.autoscale.trace import Job, Trace, build

# 1 worker second a prompt of 100 tokens, 1 more every 10 output tokens.
RATE = ServiceRate(100.0, 10.0, 4, 10.0)


def fixed(replicas: int, policy: ScalingPolicy) -> Controller:
    return HpaController(HpaSpec(replicas, replicas), policy.target)


def keda_controller(scenario: Scenario, target: float, **given: object) -> Controller:
    options: dict[str, object] = {
        "max_replica_count": scenario.max_replicas,
        "min_replica_count": scenario.min_replicas,
        "polling_interval_s": 15.0,
        "threshold": target,
        **given,
    }
    behavior = recommended_behavior(scenario.machine.cold_start_s)
    return KedaController(keda.ScaledObject(**options), behavior=behavior)  # type: ignore[arg-type]


def run_fixed(trace: Trace, rate: ServiceRate, replicas: int = 1) -> Outcome:
    """A fleet of constant size, there from the start."""
    machine = Machine(rate, cold_start_s=0.0)
    scenario = Scenario(
        trace,
        machine,
        min_replicas=replicas,
        max_replicas=replicas,
        initial_replicas=replicas,
    )
    policy = Outstanding(1.0)
    return simulate(scenario, policy, fixed(replicas, policy))


def test_one_job_from_zero_takes_poll_cold_start_and_service() -> None:
    """Arrives at 20 s; scraped at 22.5; polled at 30; ready at 90; 1 s + 5 s of work: 96."""
    trace = build("one", [Job(20.0, 100, 50)])
    scenario = Scenario(trace, Machine(RATE, cold_start_s=60.0), max_replicas=3)
    out = simulate(scenario, Outstanding(4.0), keda_controller(scenario, 4.0))
    assert (out.waits[0], out.latencies[0]) == (70.0, 76.0)
    assert (out.finished, out.cold_starts, out.peak_replicas) == (1, 1, 1)


def test_a_machine_is_billed_from_its_order_to_its_end() -> None:
    """As above, ordered at 30. The job ends at 96; the poll at 90 was the last to see it, the one
    at 105 reads the 0 of 97.5. 300 s after 90 are over, strictly, at the poll at 405."""
    trace = build("one", [Job(20.0, 100, 50)])
    scenario = Scenario(trace, Machine(RATE, cold_start_s=60.0), max_replicas=3)
    out = simulate(scenario, Outstanding(4.0), keda_controller(scenario, 4.0))
    assert out.machine_s == 405.0 - 30.0
    assert out.useful_work_s == pytest.approx(6.0)


def test_waiting_agrees_with_the_pollaczek_khinchine_formula() -> None:
    """One server, one slot, Poisson arrivals, equal jobs of 1 s, load 0.7: rho / (2 (1 - rho)) =
    1.1667 s. 80,000 jobs bring the error below 5 %."""
    jobs = 80_000
    rate = ServiceRate(1000.0, 10.0, 1)
    trace = make("steady", Load(jobs, jobs / 0.7, 500.0, 5.0, spread=0.0, seed=11))
    out = run_fixed(trace, rate)
    assert sum(out.waits) / jobs == pytest.approx(0.7 / (2 * 0.3), rel=0.05)


def test_a_shared_machine_answers_in_service_over_one_minus_load() -> None:
    """Processor sharing, 1 s of service, load 0.7: 3.33 s in the system, whatever the spread of
    the lengths."""
    jobs = 30_000
    rate = ServiceRate(1000.0, 10.0, 10_000, 10.0)
    trace = make("steady", Load(jobs, jobs / 0.7, 500.0, 5.0, spread=0.5, seed=5))
    work = sum(map(rate.work_s, trace.prompt_tokens, trace.output_tokens)) / jobs
    load = 0.7 * work
    out = run_fixed(trace, rate)
    assert max(out.waits) == 0.0
    assert sum(out.latencies) / jobs == pytest.approx(work / (1.0 - load), rel=0.06)


def spot_scenario(seed: int, **machine: object) -> Scenario:
    trace = make("burst", Load(1500, 7200.0, 400.0, 100.0, deadline_s=1800.0, seed=seed))
    options: dict[str, object] = {
        "cold_start_s": 60.0,
        "cold_start_jitter": 0.3,
        "drain_s": 10.0,
        "spot_share": 1.0,
        "spot_interruptions_per_hour": 6.0,
        **machine,
    }
    return Scenario(trace, Machine(RATE, **options), max_replicas=8, seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("checkpoint", [True, False])
def test_every_job_ends_once_however_often_machines_are_taken_away(
    seed: int, checkpoint: bool
) -> None:
    scenario = spot_scenario(seed, checkpoint=checkpoint)
    out = simulate(scenario, Outstanding(8.0), keda_controller(scenario, 8.0))
    assert out.interruptions > 5
    assert out.requeued > 5
    assert out.finished + out.unfinished == out.jobs == 1500
    assert sum(math.isfinite(latency) for latency in out.latencies) == out.finished
    late = sum(
        latency > due - at
        for latency, at, due in zip(
            out.latencies, scenario.trace.arrival, scenario.trace.deadline, strict=True
        )
    )
    assert out.missed == late
    # No machine did more than it had time for.
    assert out.useful_work_s + out.lost_work_s <= out.machine_s


def test_states_add_up_at_every_scrape() -> None:
    """Pending + running = arrived - ended, at each sample."""
    scenario = spot_scenario(2)
    out = simulate(scenario, Outstanding(8.0), keda_controller(scenario, 8.0))
    arrivals = list(scenario.trace.arrival)
    ends = [a + latency for a, latency in zip(arrivals, out.latencies, strict=True)]
    for sample in out.samples[:: len(out.samples) // 50]:
        there = sum(a <= sample.at for a in arrivals) - sum(e <= sample.at for e in ends)
        assert sample.pending + sample.running == there


def test_a_seed_gives_one_outcome_and_another_seed_another() -> None:
    def key(seed: int) -> tuple[object, ...]:
        scenario = spot_scenario(seed)
        out = simulate(scenario, Outstanding(8.0), keda_controller(scenario, 8.0))
        return list(out.latencies), out.samples, out.machine_s, out.interruptions

    assert key(1) == key(1)
    assert key(1) != key(2)


def drain_once(*, checkpoint: bool) -> Outcome:
    """A job of 1 s + 100 s under a controller that asks for one, for none at 30, for one at 90."""

    class OnOff:
        def loops(self) -> tuple[Loop, ...]:
            return (Loop("script", 15.0, lambda now, scale, _: int(not 30 <= now < 90)),)

    trace = build("one", [Job(0.0, 100, 1000)])
    machine = Machine(RATE, cold_start_s=0.0, drain_s=10.0, checkpoint=checkpoint)
    scenario = Scenario(trace, machine, min_replicas=1, initial_replicas=1)
    return simulate(scenario, Outstanding(1.0), OnOff())


def test_a_checkpoint_keeps_the_tokens_and_costs_only_a_prefill() -> None:
    """Stopped at 30, killed at 40: 40 s served, 1 of prefill, 390 tokens kept. Again at 90: prefill
    of 490 tokens takes 4.9 s, the other 610 take 61 s: ends at 155.9. Lost are both prefills that
    the job would not have needed: 1 s and 3.9 s."""
    out = drain_once(checkpoint=True)
    assert out.resumed_tokens == 390
    assert out.latencies[0] == pytest.approx(155.9)
    assert out.lost_work_s == pytest.approx(1.0 + 3.9)
    assert out.waits[0] == pytest.approx(50.0)
    assert (out.busy_removals, out.requeued) == (1, 1)


def test_a_spot_machine_keeps_what_it_had_at_the_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claimed at 20; notice at 30: 1 s of prefill and 90 tokens are in the checkpoint. Gone at 55:
    the last 25 s are lost. The replacement, ordered at the notice and ready at 50, takes the job at
    55 and needs 1.9 s of prefill and 91 of decoding: 147.9."""

    def first_one_at_30(fleet: Fleet, worker: Worker) -> float:
        return 30.0 if worker.id == 0 else math.inf

    monkeypatch.setattr(Fleet, "interruption", first_one_at_30)
    machine = Machine(RATE, cold_start_s=20.0, spot_share=1.0)
    trace = build("one", [Job(20.0, 100, 1000)])
    scenario = Scenario(trace, machine, min_replicas=1, max_replicas=1, initial_replicas=1)
    policy = Outstanding(1.0)
    out = simulate(scenario, policy, fixed(1, policy))
    assert (out.interruptions, out.requeued, out.cold_starts) == (1, 1, 2)
    assert out.resumed_tokens == 90
    assert out.lost_work_s == pytest.approx(1.0 + 25.0 + 0.9)
    assert 20.0 + out.latencies[0] == pytest.approx(147.9)


def test_without_a_checkpoint_the_job_starts_over() -> None:
    """40 s lost; 101 s from 90 on."""
    out = drain_once(checkpoint=False)
    assert (out.resumed_tokens, out.latencies[0]) == (0, pytest.approx(191.0))
    assert out.lost_work_s == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("policy", "wanted"), [(Outstanding(40.0), 5), (Deadline(50, catch_up_s=600.0), 3)]
)
def test_waiting_for_cold_starts_does_not_cascade(policy: ScalingPolicy, wanted: int) -> None:
    """200 jobs of 11 s at once. 40 a replica: 5 wanted. Due in 1200 s, 300 of them cold start:
    ceil(2200 / 900) = 3. Never more, though the controller asks 20 times before one is ready."""
    trace = build("bulk", [Job(0.0, 100, 100, 1200.0)] * 200)
    scenario = Scenario(trace, Machine(RATE, cold_start_s=300.0), max_replicas=50)
    controller = KedaController(
        keda.ScaledObject(50, 0, polling_interval_s=15.0, threshold=policy.target),
        behavior=Behavior(),
    )
    out = simulate(scenario, policy, controller)
    assert (out.finished, out.peak_replicas, out.cold_starts) == (200, wanted, wanted)


def test_deadline_order_serves_the_urgent_first() -> None:
    """4 at a time, 40 s a batch: 4 jobs that arrive behind 40 others and are due by 101 s end at
    80 when urgent ones go first, and at 440 when not."""
    jobs = [Job(0.0, 100, 90)] * 40 + [Job(1.0, 100, 90, 100.0)] * 4

    def missed(deadline_order: bool) -> int:
        scenario = Scenario(
            build("mixed", list(jobs)),
            Machine(RATE, cold_start_s=0.0),
            min_replicas=1,
            max_replicas=1,
            initial_replicas=1,
            deadline_order=deadline_order,
        )
        policy = Outstanding(1.0)
        return simulate(scenario, policy, fixed(1, policy)).missed

    assert (missed(True), missed(False)) == (0, 4)


def test_expired_jobs_are_not_started() -> None:
    trace = build("late", [Job(0.0, 100, 90, 30.0)] * 40)
    machine = Machine(RATE, cold_start_s=0.0)
    scenario = Scenario(
        trace, machine, min_replicas=1, max_replicas=1, initial_replicas=1, expire_late=True
    )
    policy = Outstanding(1.0)
    out = simulate(scenario, policy, fixed(1, policy))
    assert out.expired > 20
    assert out.finished + out.expired == 40
    assert out.unfinished == 0
    assert out.missed >= out.expired


def outage(*, ignore_null: bool, fallback: keda.Fallback | None) -> Outcome:
    """8 replicas of 4 jobs of 20 minutes each, and the exporter away for 15 of them."""
    trace = build("long", [Job(0.0, 100, 3000)] * 32)
    machine = Machine(RATE, cold_start_s=60.0, drain_s=60.0, checkpoint=False)
    scenario = Scenario(trace, machine, max_replicas=8, outages=((600.0, 900.0),))
    obj = keda.ScaledObject(
        8, 0, polling_interval_s=15.0, threshold=4.0, fallback=fallback, cooldown_period_s=300.0
    )
    controller = KedaController(obj, behavior=Behavior(), ignore_null=ignore_null)
    return simulate(scenario, Outstanding(4.0), controller)


def test_a_dead_exporter_read_as_zero_stops_busy_workers() -> None:
    """KEDA's default, ignoreNullValues true: all 8 are taken down while they work."""
    out = outage(ignore_null=True, fallback=None)
    assert out.busy_removals >= 8
    assert out.requeued == 32


def test_a_static_fallback_scales_busy_workers_down_and_the_recommended_one_does_not() -> None:
    static = outage(ignore_null=False, fallback=keda.Fallback(3, 2))
    higher = outage(
        ignore_null=False,
        fallback=keda.Fallback(3, 2, keda.FallbackBehavior.CURRENT_REPLICAS_IF_HIGHER),
    )
    assert static.busy_removals == 6
    assert (higher.busy_removals, higher.requeued) == (0, 0)


def test_jitter_moves_the_turns_and_nothing_is_lost() -> None:
    scenario = replace(spot_scenario(3), sync_jitter_s=5.0)
    out = simulate(scenario, Outstanding(8.0), keda_controller(scenario, 8.0))
    assert out.finished == 1500


def test_a_plain_hpa_goes_to_zero_and_back_where_that_is_allowed() -> None:
    trace = build("two", [Job(0.0, 100, 100), Job(3000.0, 100, 100)])
    scenario = Scenario(trace, Machine(RATE, cold_start_s=30.0), max_replicas=4)
    out = simulate(scenario, Outstanding(4.0), HpaController(HpaSpec(4, 0), 4.0))
    counts = [sample.replicas for sample in out.samples]
    assert (out.finished, out.cold_starts) == (2, 2)
    assert 0 in counts[counts.index(1) :]
