"""Rules of the HPA at their edges, where the controllers' own cases have no example."""

import pytest

from headrace.worker.autoscale import behavior as bh
from headrace.worker.autoscale.hpa import HorizontalPodAutoscaler, HpaSpec, ZeroRule, propose
from headrace.worker.autoscale.proposal import (
    INT32_MAX,
    ExternalReading,
    MetricError,
    Scale,
    Tolerance,
    UnreadableReading,
)

NOW = 10_000.0


def at(count: int) -> Scale:
    return Scale(count, count, count)


def depth(jobs: float, target: float = 100.0) -> ExternalReading:
    return ExternalReading((round(jobs * 1000),), round(target * 1000))


@pytest.mark.parametrize(("total", "expected"), [(270, 3), (330, 3), (331, 4), (269, 3), (200, 2)])
def test_tolerance_is_on_the_total_and_both_ends_are_inside(total: int, expected: int) -> None:
    """Target 100 at 3 replicas: 270 to 330 keeps 3; 269 leaves the tolerance but rounds to 3."""
    assert propose(at(3), [depth(total)], Tolerance()) == expected


def test_plus_ten_percent_exactly_does_not_scale() -> None:
    """1.33 compares r <= 1.1; before, abs(1 - 1.1) <= 0.1 was false in doubles."""
    assert propose(at(10), [depth(1100)], Tolerance()) == 10
    assert propose(at(10), [depth(1101)], Tolerance()) == 12


def test_average_value_counts_existing_pods_not_wanted_ones() -> None:
    """Spec 6 while 3 exist, and the metric suits 3: the proposal is 3, not 6."""
    assert propose(Scale(6, 3, 3), [depth(300)], Tolerance()) == 3


def test_with_no_pod_at_all_there_is_no_tolerance() -> None:
    """Spec 2, status 0: the ratio is infinite, so a total of exactly one target gives 1."""
    assert propose(Scale(2, 0, 0), [depth(100)], Tolerance()) == 1


def test_a_negative_total_is_taken_for_an_overflow() -> None:
    assert propose(at(1), [ExternalReading((-1,), 1000)], Tolerance()) == INT32_MAX


def test_no_series_is_an_error_and_not_zero() -> None:
    with pytest.raises(MetricError, match="no metrics"):
        propose(at(4), [ExternalReading((), 1000)], Tolerance())


def test_series_are_added_so_two_exporters_count_a_queue_twice() -> None:
    one = propose(at(1), [ExternalReading((500_000,), 100_000)], Tolerance())
    two = propose(at(1), [ExternalReading((500_000, 500_000), 100_000)], Tolerance())
    assert (one, two) == (5, 10)


def test_a_failed_metric_may_hold_replicas_but_not_remove_them() -> None:
    broken = UnreadableReading("FailedGetExternalMetric")
    assert propose(at(2), [broken, depth(900)], Tolerance()) == 9
    assert propose(at(9), [broken, depth(900)], Tolerance()) == 9
    with pytest.raises(MetricError):
        propose(at(9), [broken, depth(100)], Tolerance())


def test_without_behavior_growth_doubles_with_a_floor_of_four() -> None:
    hpa = HorizontalPodAutoscaler(HpaSpec(max_replicas=100))
    counts = [1]
    for step in range(5):
        counts.append(hpa.sync(NOW + 15 * step, at(counts[-1]), [depth(10_000)]).replicas)
    assert counts == [1, 4, 8, 16, 32, 64]


def test_default_behavior_starts_faster_than_no_behavior() -> None:
    """Pods 4 or 100 percent, whichever is more: 1 -> 5 where the old limit stops at 4."""
    hpa = HorizontalPodAutoscaler(HpaSpec(max_replicas=100, behavior=bh.Behavior()))
    assert hpa.sync(NOW, at(1), [depth(10_000)]).replicas == 5


def test_without_behavior_a_recommendation_of_exactly_the_window_still_counts() -> None:
    log = [bh.Recommendation(9, NOW - 300.0)]
    assert bh.stabilize_legacy(log, 2, NOW, 300.0) == 9
    assert bh.stabilize_legacy([bh.Recommendation(9, NOW - 300.1)], 2, NOW, 300.0) == 2


def test_with_behavior_a_recommendation_of_exactly_the_window_does_not_count() -> None:
    def held(age: float) -> int:
        log = [bh.Recommendation(9, NOW - age)]
        return bh.stabilize(log, spec=9, desired=2, now=NOW, up_window_s=0.0, down_window_s=300.0)

    assert (held(299.9), held(300.0)) == (9, 2)


def test_old_stabilization_lifts_a_count_that_someone_else_lowered() -> None:
    hpa = HorizontalPodAutoscaler(HpaSpec(max_replicas=20))
    assert hpa.sync(NOW, at(8), [depth(800)]).replicas == 8
    assert hpa.sync(NOW + 15, at(4), [depth(400)]).replicas == 8


def test_scale_down_waits_for_the_window_then_goes_one_pod_each_two_minutes() -> None:
    """8 -> 1 wanted from the start: 300 s of nothing, then 7 steps of 120 s."""
    down = bh.Rules((bh.RatePolicy(bh.PolicyType.PODS, 1, 120.0),), window_s=300.0)
    hpa = HorizontalPodAutoscaler(HpaSpec(max_replicas=20, behavior=bh.Behavior(down=down)))
    count, changes = 8, []
    hpa.sync(0.0, at(8), [depth(800)])
    for step in range(1, 100):
        now = step * 15.0
        new = hpa.sync(now, at(count), [depth(50)]).replicas
        if new != count:
            changes.append((now, new))
        count = new
    assert changes == [(300.0 + 120.0 * i, 7 - i) for i in range(7)]


@pytest.mark.parametrize(
    ("start", "percent", "up", "down"), [(100, 10, 111, 90), (100, 90, 190, 9), (10, 90, 19, 0)]
)
def test_percent_policies_round_as_doubles_do(start: int, percent: int, up: int, down: int) -> None:
    """100 replicas + 10 percent allows 111, for 100 * 1.1 is 110.00000000000001."""
    rules = bh.Rules((bh.RatePolicy(bh.PolicyType.PERCENT, percent, 15.0),))
    assert bh.EventLog().up_limit(start, NOW, rules) == up
    assert bh.EventLog().down_limit(start, NOW, rules) == down


def test_disabled_direction_keeps_the_count() -> None:
    off = bh.Rules(select=bh.SelectPolicy.DISABLED)
    hpa = HorizontalPodAutoscaler(
        HpaSpec(max_replicas=9, behavior=bh.Behavior(up=off)), recommendations=[]
    )
    decision = hpa.sync(NOW, at(3), [depth(900)])
    assert (decision.replicas, decision.limited) == (3, "ScaleUpLimit")


def test_a_tolerance_of_its_own_replaces_the_clusters_for_its_direction() -> None:
    tight = bh.Rules(tolerance=0.01)
    hpa = HorizontalPodAutoscaler(HpaSpec(max_replicas=99, behavior=bh.Behavior(up=tight)))
    assert hpa.sync(NOW, at(10), [depth(1050)]).replicas == 11


def test_out_of_bounds_is_corrected_at_once_and_logs_no_recommendation() -> None:
    hpa = HorizontalPodAutoscaler(
        HpaSpec(max_replicas=5, min_replicas=2, behavior=bh.Behavior()), recommendations=[]
    )
    assert hpa.sync(NOW, at(9), [UnreadableReading("gone")]).replicas == 5
    assert hpa.recommendations == []
    assert [event.change for event in hpa.events.down] == [4]


def test_zero_with_a_minimum_is_off_and_zero_without_follows_the_metric() -> None:
    assert HorizontalPodAutoscaler(HpaSpec(9, 1)).sync(NOW, at(0), [depth(500)]).replicas == 0
    assert HorizontalPodAutoscaler(HpaSpec(9, 0)).sync(NOW, at(0), [depth(300)]).replicas == 3


def test_newer_rule_leaves_a_zero_made_by_hand_but_wakes_from_its_own() -> None:
    spec = HpaSpec(9, 0, zero=ZeroRule.CONDITION, downscale_window_s=0.0)
    by_hand = HorizontalPodAutoscaler(spec)
    assert by_hand.sync(NOW, at(0), [depth(500)]).inactive == "ScalingDisabled"
    own = HorizontalPodAutoscaler(spec, recommendations=[])
    assert own.sync(NOW, at(1), [depth(0)]).replicas == 0
    assert own.sync(NOW + 15, at(0), [depth(300)]).replicas == 3


@pytest.mark.parametrize(("low", "high"), [(3, 2), (-1, 2), (0, 0)])
def test_impossible_bounds_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="min_replicas"):
        HpaSpec(high, low)
