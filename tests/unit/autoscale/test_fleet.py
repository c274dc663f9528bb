"""Simulated workers: how a batch shares a machine, who is removed, what is spot."""

import pytest

from headrace.worker.autoscale.fleet import Fleet, Machine, Worker
from headrace.worker.autoscale.service import ServiceRate

RATE = ServiceRate(1000.0, 100.0, 8)


def ready_worker(now: float = 0.0) -> Worker:
    return Worker(0, now, now, spot=False)


def test_a_batch_shares_the_machine_equally() -> None:
    """Jobs of 3 and 5 worker seconds on a machine that one sequence can fill: the first ends after
    2 x 3 s; the second then runs alone for its last 2 s, and ends at 8."""
    worker = ready_worker()
    worker.admit(0, 3.0)
    worker.admit(1, 5.0)
    assert worker.rebalance(max_share=1.0) == 6.0
    worker.advance(6.0)
    assert list(worker.finished()) == [0]
    assert worker.rebalance(max_share=1.0) == pytest.approx(8.0)


def test_one_sequence_uses_no_more_than_its_share() -> None:
    """1 worker second at an eighth of the machine takes 8 s, alone or with seven others."""
    worker = ready_worker()
    worker.admit(0, 1.0)
    assert worker.rebalance(RATE.max_share) == 8.0
    for job in range(1, 8):
        worker.admit(job, 1.0)
    assert worker.rebalance(RATE.max_share) == 8.0


def test_a_late_joiner_slows_the_others_from_then_on() -> None:
    """4 s of work, half done at 2 s; a second job joins: the last 2 s take 4."""
    worker = ready_worker()
    worker.admit(0, 4.0)
    worker.rebalance(1.0)
    worker.advance(2.0)
    worker.admit(1, 100.0)
    assert worker.rebalance(1.0) == pytest.approx(6.0)


def test_what_a_spot_machine_does_after_its_checkpoint_is_not_kept() -> None:
    worker = ready_worker()
    worker.admit(7, 100.0)
    worker.rebalance(1.0)
    worker.advance(10.0)
    worker.checkpoint()
    worker.advance(35.0)
    assert worker.interrupt() == [(7, 10.0, 35.0)]


def fleet_of_three(*, deletion_cost: bool) -> Fleet:
    """Worker 0 is busy with two jobs, 1 with one, 2 still loads."""
    fleet = Fleet(Machine(RATE, cold_start_s=10.0, deletion_cost=deletion_cost), seed=0)
    workers = [fleet.start(0.0), fleet.start(5.0), fleet.start(20.0)]
    for worker, jobs in zip(workers[:2], (2, 1), strict=True):
        fleet.is_ready(worker)
        for job in range(jobs):
            worker.admit(job, 1.0)
    return fleet


def test_loading_pods_go_first_then_those_with_the_least_in_flight() -> None:
    """A ReplicaSet ranks readiness before pod-deletion-cost."""
    victims = fleet_of_three(deletion_cost=True).victims(3)
    assert [worker.id for worker in victims] == [2, 1, 0]


def test_without_a_deletion_cost_the_youngest_goes_however_busy() -> None:
    fleet = fleet_of_three(deletion_cost=False)
    for job in range(5):
        fleet.ready[1].admit(10 + job, 1.0)
    assert [worker.id for worker in fleet.victims(2)] == [2, 1]


def test_nobody_goes_when_nobody_must() -> None:
    assert fleet_of_three(deletion_cost=True).victims(0) == []


def test_a_draining_worker_is_no_replica() -> None:
    fleet = fleet_of_three(deletion_cost=True)
    fleet.drain(fleet.ready[0])
    assert [worker.id for worker in fleet.counted()] == [1, 2]
    assert len(fleet.ready) == 1


@pytest.mark.parametrize(
    ("share", "base", "spot"), [(0.0, 0, 0), (1.0, 0, 10), (0.7, 0, 7), (1.0, 2, 8), (0.5, 4, 3)]
)
def test_the_spot_share_is_kept_above_the_on_demand_base(
    share: float, base: int, spot: int
) -> None:
    fleet = Fleet(Machine(RATE, spot_share=share, on_demand_base=base), seed=0)
    assert sum(fleet.start(0.0).spot for _ in range(10)) == spot


def test_interruptions_come_at_the_given_rate_and_never_on_demand() -> None:
    """2 an hour: the mean of 2000 lives is 1800 s, standard error 2.2 %."""
    machine = Machine(RATE, spot_share=1.0, spot_interruptions_per_hour=2.0)
    fleet = Fleet(machine, seed=1)
    lives = [fleet.interruption(fleet.start(0.0)) for _ in range(2000)]
    assert sum(lives) / len(lives) == pytest.approx(1800.0, rel=0.1)
    assert fleet.interruption(Worker(9999, 0.0, 0.0, spot=False)) == float("inf")


def test_cold_starts_vary_within_the_jitter() -> None:
    fleet = Fleet(Machine(RATE, cold_start_s=100.0, cold_start_jitter=0.2), seed=1)
    times = [fleet.start(0.0).ready_at for _ in range(200)]
    assert 80.0 <= min(times) < 85.0
    assert 115.0 < max(times) <= 120.0
