"""KEDA's loop, fallback and formulas where the upstream cases have no example."""

import pytest

from headrace.worker.autoscale import keda
from headrace.worker.autoscale.adapter import Requirement, SelectorError, label_matchers
from headrace.worker.autoscale.keda_formula import composite_milli, evaluate

NOW = 5_000.0


def turn(obj: keda.ScaledObject, replicas: int, *, active: bool, **given: object) -> keda.Poll:
    known: dict[str, object] = {"error": False, "last_active": None, "created": 0.0, **given}
    return keda.poll(obj, now=NOW, replicas=replicas, active=active, **known)  # type: ignore[arg-type]


def test_activation_goes_to_one_and_not_to_what_the_queue_needs() -> None:
    assert turn(keda.ScaledObject(), 0, active=True) == keda.Poll(1, True, touched=True)


@pytest.mark.parametrize(("ago", "expected"), [(299.0, 7), (300.0, 7), (300.5, 0)])
def test_cooldown_must_be_past_strictly_and_then_zero_comes_in_one_step(
    ago: float, expected: int
) -> None:
    poll = turn(keda.ScaledObject(), 7, active=False, last_active=NOW - ago)
    assert poll.replicas == expected


def test_an_unreadable_metric_never_scales_to_zero() -> None:
    poll = turn(keda.ScaledObject(), 7, active=False, error=True, last_active=0.0)
    assert poll == keda.Poll(7, False)


def test_a_minimum_of_one_is_never_left_for_zero() -> None:
    obj = keda.ScaledObject(min_replica_count=1)
    assert turn(obj, 1, active=False, last_active=0.0).replicas == 1


def test_initial_cooldown_counts_only_until_the_first_activity() -> None:
    obj = keda.ScaledObject(initial_cooldown_period_s=600.0)
    assert turn(obj, 3, active=False, created=NOW - 500.0).replicas == 3
    assert turn(obj, 3, active=False, created=NOW - 601.0).replicas == 0


@pytest.mark.parametrize("text", ["true", "True", "yes please"])
def test_any_text_that_is_no_boolean_pauses(text: str) -> None:
    obj = keda.ScaledObject(annotations={keda.PAUSED: text})
    assert turn(obj, 0, active=True).replicas == 0


def test_paused_false_does_not_pause() -> None:
    obj = keda.ScaledObject(annotations={keda.PAUSED: "false"})
    assert turn(obj, 0, active=True).replicas == 1


def test_force_activation_wakes_an_idle_workload() -> None:
    obj = keda.ScaledObject(annotations={keda.FORCE_ACTIVATION: "true"})
    assert turn(obj, 0, active=False).replicas == 1


def test_fallback_that_may_only_raise_keeps_busy_workers() -> None:
    """A static fallback of 2 takes 7 of 9 busy workers down; currentReplicasIfHigher keeps 9."""

    def metric(kind: keda.FallbackBehavior) -> float:
        obj = keda.ScaledObject(threshold=50.0, fallback=keda.Fallback(3, 2, kind))
        health = keda.TriggerHealth(failures=3)
        return keda.measure(obj, health, None, current_replicas=9).value

    assert metric(keda.FallbackBehavior.STATIC) == 100.0
    assert metric(keda.FallbackBehavior.CURRENT_REPLICAS_IF_HIGHER) == 450.0
    assert metric(keda.FallbackBehavior.CURRENT_REPLICAS_IF_LOWER) == 100.0


def test_the_fallback_starts_after_the_threshold_and_not_at_it() -> None:
    obj = keda.ScaledObject(threshold=5.0, fallback=keda.Fallback(3, 2))
    health = keda.TriggerHealth()
    for _ in range(3):
        with pytest.raises(keda.KedaError):
            keda.measure(obj, health, None, current_replicas=1)
    assert keda.measure(obj, health, None, current_replicas=1) == keda.Measured(10.0, True)


def test_one_good_reading_clears_the_failures() -> None:
    obj = keda.ScaledObject(fallback=keda.Fallback(3, 2))
    health = keda.TriggerHealth(failures=3)
    assert keda.measure(obj, health, 4.0, current_replicas=1) == keda.Measured(4.0)
    assert health.failures == 0


def test_a_fallback_for_a_value_target_is_spread_over_ready_pods() -> None:
    obj = keda.ScaledObject(threshold=10.0, per_pod=False, fallback=keda.Fallback(0, 6))
    got = keda.measure(obj, keda.TriggerHealth(), None, current_replicas=3, ready=3)
    assert got == keda.Measured(20.0, True)
    with pytest.raises(keda.KedaError, match="ready pod"):
        keda.measure(obj, keda.TriggerHealth(), None, current_replicas=3, ready=0)


def test_a_dead_exporter_reads_as_an_empty_queue_unless_told_otherwise() -> None:
    gone = '{"data":{"resultType":"vector","result":[]}}'
    assert keda.prometheus_value(200, gone) == 0.0
    with pytest.raises(keda.KedaError):
        keda.prometheus_value(200, gone, ignore_null=False)


@pytest.mark.parametrize("body", ["not json", "[]", '{"data":{"result":[{"value":[1,"x"]}]}}'])
def test_an_answer_that_is_no_vector_is_an_error(body: str) -> None:
    with pytest.raises(keda.KedaError):
        keda.prometheus_value(200, body)


def test_an_http_error_is_an_error_even_where_null_is_ignored() -> None:
    with pytest.raises(keda.KedaError, match="503"):
        keda.prometheus_value(503, "{}")


@pytest.mark.parametrize(
    ("value", "milli"), [(1.0005, 1000), (2.5, 2500), (0.0004, 0), (float("nan"), 0), (-3.0, 0)]
)
def test_metric_values_have_three_decimals(value: float, milli: int) -> None:
    assert keda.to_milli(value) == milli


def test_trigger_names_are_normalised() -> None:
    assert keda.metric_name(0, "redis-a/b.c:d%(e)") == "s0-redis-a-b-c-d--e-"


@pytest.mark.parametrize("idle", [0, 3])
def test_idle_must_lie_below_the_minimum(idle: int) -> None:
    with pytest.raises(ValueError, match="idle_replica_count"):
        keda.ScaledObject(min_replica_count=0, idle_replica_count=idle)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("a + b * 2", 8.0),
        ("(a + b) * 2", 10.0),
        ("-a ** 2", -4.0),
        ("2 ** 3 ** 1", 8.0),
        ("lost ?? a + b", 5.0),
        ("max(a, b, 7) % 4", 3.0),
        ("ceil(b / a)", 2.0),
        ("round(2.5) - floor(2.5)", 1.0),
        ("lost", None),
    ],
)
def test_formulas_are_evaluated_as_expr_does(formula: str, expected: float | None) -> None:
    assert evaluate(formula, {"a": 2.0, "b": 3.0, "lost": None}) == expected


@pytest.mark.parametrize(
    "formula", ["a +", "a b", "(a", "a / 0", "lost + 1", "c", "a ? b : 1", "ceil(a, b)", ""]
)
def test_a_formula_that_cannot_be_evaluated_is_an_error(formula: str) -> None:
    with pytest.raises(keda.KedaError):
        evaluate(formula, {"a": 2.0, "b": 3.0, "lost": None})


def test_a_nil_composite_takes_the_fallback() -> None:
    assert composite_milli("lost", {"lost": None}, target=4.0, fallback_replicas=3) == 12_000
    with pytest.raises(keda.KedaError, match="nil"):
        composite_milli("lost", {"lost": None}, target=4.0)


def test_the_adapter_refuses_comparisons() -> None:
    selector = [Requirement("queue", "NotIn", ("a", "b")), Requirement("x", "Exists")]
    assert label_matchers(selector) == 'queue!~"a|b",x!=""'
    with pytest.raises(SelectorError, match="Gt"):
        label_matchers([Requirement("depth", "Gt", ("1",))])
