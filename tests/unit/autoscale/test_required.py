"""`replicas_required` against its definition, and what must never happen with it."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.worker.autoscale.required import Capacity, Due, replicas_required


def required(due: list[Due], capacity: Capacity, most: int = 50, margin: float = 0.0):  # type: ignore[no-untyped-def]
    return replicas_required(due, capacity, max_replicas=most, catch_up_s=600.0, margin_s=margin)


def test_the_formula_of_the_design_in_numbers() -> None:
    """1 ready, cold start 100 s, 1000 s of work due in 300 s: 1 + ceil((1000 - 300) / 200) = 5."""
    got = required([Due(300.0, 1000.0)], Capacity(1, (), 100.0))
    assert (got.replicas, got.horizon_s, got.missed_jobs) == (5, 300.0, 0)


def test_the_worst_horizon_decides() -> None:
    """By 200 s: ceil(500 / 100) = 5 new ones; by 1000 s the 1400 s need only 2."""
    got = required([Due(1000.0, 900.0), Due(200.0, 500.0)], Capacity(0, (), 100.0))
    assert (got.replicas, got.horizon_s) == (5, 200.0)


def test_loading_workers_count_so_waiting_does_not_cascade() -> None:
    """The 4 that were asked for are asked for again while they load, not 4 more."""
    work = [Due(400.0, 1200.0)]
    assert required(work, Capacity(0, (), 100.0)).replicas == 4
    loading = Capacity(0, (70.0, 70.0, 70.0, 70.0), 100.0)
    assert required([Due(370.0, 1200.0)], loading).replicas == 4


def test_fewer_are_asked_for_when_fewer_do() -> None:
    assert required([Due(100.0, 250.0)], Capacity(8, (), 60.0)).replicas == 3
    assert required([], Capacity(8, (), 60.0)).replicas == 0


def test_what_no_number_can_reach_is_missed_and_not_infinite() -> None:
    """Due in 50 s, cold start 100 s, nothing there: all 40 jobs are missed, and then caught up:
    ceil(200 / (600 - 100)) = 1 worker."""
    got = required([Due(50.0, 200.0, jobs=40)], Capacity(0, (), 100.0))
    assert (got.replicas, got.missed_jobs, got.missed_work) == (1, 40, 200.0)


def test_a_horizon_just_past_the_cold_start_is_bounded_by_the_maximum() -> None:
    """1 s of time for 600 s of work: 20 workers do 20 s of it, the rest is missed."""
    got = required([Due(101.0, 600.0, jobs=60)], Capacity(0, (), 100.0), most=20)
    assert (got.replicas, got.missed_jobs, got.missed_work) == (20, 58, 580.0)


def test_overdue_work_keeps_a_worker() -> None:
    got = required([Due(-30.0, 5.0, jobs=2)], Capacity(1, (), 100.0))
    assert (got.replicas, got.missed_jobs) == (1, 2)


def test_the_margin_is_taken_off_every_horizon() -> None:
    due = [Due(300.0, 1000.0)]
    assert required(due, Capacity(0, (), 100.0)).replicas == 5
    assert required(due, Capacity(0, (), 100.0), margin=100.0).replicas == 10


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="catch_up_s"):
        replicas_required([], Capacity(0), max_replicas=1, catch_up_s=0.0)


dues = st.lists(
    st.builds(
        Due,
        st.floats(-100.0, 5000.0),
        st.floats(0.1, 3000.0),
        st.integers(1, 50),
    ),
    max_size=8,
)
capacities = st.builds(
    lambda ready, loading, cold: Capacity(ready, tuple(min(x, cold) for x in loading), cold),
    st.integers(0, 6),
    st.lists(st.floats(0.0, 300.0), max_size=4),
    st.floats(0.0, 300.0),
)


def naive_capacity(capacity: Capacity, horizon: float, workers: int) -> float:
    starts = [0.0] * capacity.ready + sorted(capacity.loading_s)
    starts += [capacity.cold_start_s] * max(0, workers - len(starts))
    return sum(max(0.0, horizon - start) for start in starts[:workers])


@given(dues, capacities)
def test_the_answer_is_the_smallest_that_fits_when_nothing_is_missed(
    due: list[Due], capacity: Capacity
) -> None:
    """Searched by brute force over the number of workers, straight from the definition."""
    got = required(due, capacity, most=60)
    assume(not got.missed_work)
    ordered = sorted(due, key=lambda d: d.in_s)
    totals = [(d.in_s, sum(e.work for e in ordered[: i + 1])) for i, d in enumerate(ordered)]

    def fits(workers: int, slack: float) -> bool:
        return all(naive_capacity(capacity, t, workers) + slack >= total for t, total in totals)

    assert fits(got.replicas, 1e-3)
    assert got.replicas == 0 or not fits(got.replicas - 1, -1e-3)


@given(dues, capacities, st.integers(0, 30))
def test_missed_and_reachable_work_add_up_and_the_maximum_holds(
    due: list[Due], capacity: Capacity, most: int
) -> None:
    got = required(due, capacity, most=most)
    assert 0 <= got.replicas <= most
    assert 0 <= got.missed_jobs <= sum(d.jobs for d in due)
    assert -1e-6 <= got.missed_work <= sum(d.work for d in due) + 1e-6
    # With the most workers allowed, in order of deadline, exactly the rest fits.
    done = 0.0
    count = max(most, capacity.ready + len(capacity.loading_s))
    for entry in sorted(due, key=lambda d: d.in_s):
        room = naive_capacity(capacity, entry.in_s, count) - done
        done += min(entry.work, max(0.0, room))
    assert math.isclose(done + got.missed_work, sum(d.work for d in due), abs_tol=1e-3)


@given(dues, capacities)
def test_more_work_never_needs_fewer_workers(due: list[Due], capacity: Capacity) -> None:
    doubled = [Due(d.in_s, 2.0 * d.work, d.jobs) for d in due]
    one, two = required(due, capacity, most=60), required(doubled, capacity, most=60)
    assume(not two.missed_work)
    assert two.replicas >= one.replicas
