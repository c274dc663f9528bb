"""Rules, dashboard and queries name metrics that exist, with labels and values that exist."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import CHART, DEPLOY, adapter_rules, keda_queries, kind, render
from prometheus_client import Metric
from promql import grouped_by, selectors
from tools import tool

from headrace.producer.cli import main as headrace
from headrace.worker import metrics

RULES = DEPLOY / "prometheus" / "headrace.rules.yaml"
DASHBOARD = DEPLOY / "grafana" / "headrace-dashboard.json"
TARGET_LABELS = {"instance", "job", "namespace", "pod", "le"}
VALUES = {
    "state": {*metrics.STATES, *metrics.QUEUE_STATES},
    "outcome": set(metrics.OUTCOMES),
    "reason": set(metrics.ATTEMPT_REASONS),
    "phase": set(metrics.PHASES),
    "kind": set(metrics.TOKEN_KINDS),
    "le_seconds": set(metrics.DEADLINE_HORIZONS),
}


def rules() -> list[dict[str, Any]]:
    return [r for group in yaml.safe_load(RULES.read_text())["groups"] for r in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield f"dashboard: {panel['title']}", target["expr"]


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield f"rule: {rule.get('record') or rule['alert']}", rule["expr"]
    yield from dashboard_expressions()
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            inner = re.sub(r"^label_values\((.*), \w+\)$", r"\1", variable["definition"])
            yield f"dashboard variable: {variable['name']}", inner
    for metric in ("jobs", "tokens", "replicas"):
        for queues in ([], ["one", "two"]):
            values = {"autoscaling": {"metric": metric}, "workerDefaults": {"queues": queues}}
            for name, query in keda_queries(render(values)).items():
                yield f"KEDA: {name} on {metric}, {len(queues)} queues", query
    for rule in adapter_rules():
        name = rule["name"]["as"]
        query = rule["metricsQuery"].replace("<<.Series>>", name)
        yield f"adapter: {name}", query.replace("<<.LabelMatchers>>", 'queue="q",namespace="n"')
        yield f"adapter series: {name}", rule["seriesQuery"]


EXPRESSIONS = sorted(set(expressions()))


def families() -> Iterator[Metric]:
    yield from metrics.WorkerMetrics("model").registry.collect()


def labels_of() -> dict[str, set[str]]:
    """Sample name to the labels that it may carry."""
    known: dict[str, set[str]] = {m.name: set(m.labels) for m in metrics.QUEUE_METRICS.values()}
    for family in families():
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
        if family.type == "histogram":
            labels = set().union(*(s.labels for s in family.samples)) - {"le"}
            known |= {family.name + end: labels for end in ("_bucket", "_sum", "_count")}
    for rule in rules():
        if "record" in rule:
            known[rule["record"]] = grouped_by(rule["expr"])
    return known


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[w for w, _ in EXPRESSIONS])
def test_every_metric_and_label_that_is_named_exists(where: str, expression: str) -> None:
    known = labels_of()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    found = list(selectors(expression))
    assert found, f"{where} names no metric"
    for selector in found:
        assert selector.metric in metrics.all_names() | recorded, (where, selector.metric)
        for label, value in selector.matchers:
            assert label in known[selector.metric] | TARGET_LABELS, (where, selector.metric, label)
            if label in VALUES and "$" not in value:
                assert value in VALUES[label], (where, label, value)
    reachable = set().union(*(known[s.metric] for s in found)) | TARGET_LABELS
    assert grouped_by(expression) <= reachable, where


def test_the_reader_of_expressions_sees_what_is_wrong() -> None:
    """The checks above would pass on anything if `selectors` saw nothing."""
    found = list(selectors('sum by (queue) (rate(hedrace_jobs{sate="x}",b=~"y"}[5m])) > on (z) w'))
    assert [(s.metric, s.matchers) for s in found] == [
        ("hedrace_jobs", (("sate", "x}"), ("b", "y"))),
        ("w", ()),
    ]
    assert grouped_by("sum by (a, b) (c) / on (d) e") == {"a", "b", "d"}


def test_every_depth_is_the_maximum_over_exporters_first() -> None:
    """Two exporters tell the same queue twice; a sum over them would double it."""
    depth = {m.name for m in metrics.QUEUE_METRICS.values() if m.name != "rq_jobs"}
    for where, expression in EXPRESSIONS:
        if "series" in where or "variable" in where:
            continue
        for selector in selectors(expression):
            if selector.metric in depth and "absent" not in expression:
                pattern = (
                    rf"max(?: by \([^)]*\))? \((?:rate\()?{selector.metric}|max\({selector.metric}"
                )
                assert re.search(pattern, expression), (where, expression)


def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        [tool("promtool"), "check", "rules", "--lint-fatal", str(RULES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    """As recording rules, with Grafana's variables filled in: the syntax of all of them."""
    filled = {"$__rate_interval": "1m", "$namespace": ".*", "$queue": ".*"}
    written = []
    for index, (_, expression) in enumerate(EXPRESSIONS):
        for name, value in filled.items():
            expression = expression.replace(name, value)
        written.append({"record": f"check:{index}", "expr": expression})
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "check", "rules": written}]}))
    done = subprocess.run(
        [tool("promtool"), "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_behave_as_their_unit_tests_say() -> None:
    tests = Path(__file__).parent / "headrace.rules.test.yaml"
    done = subprocess.run(
        [tool("promtool"), "test", "rules", str(tests)],
        cwd=tests.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_rule_test() -> None:
    tests = (Path(__file__).parent / "headrace.rules.test.yaml").read_text()
    for rule in rules():
        name = rule.get("alert") or rule["record"]
        assert name in tests, f"{name} has no unit test"


def test_alerts_name_commands_that_exist() -> None:
    for rule in rules():
        for text in rule.get("annotations", {}).values():
            for words in re.findall(r"`headrace ([a-z -]+)`", text):
                command = headrace
                for word in words.split():
                    found = command.get_command(None, word)  # type: ignore[attr-defined]
                    assert found is not None, words
                    command = found


def test_the_chart_ships_the_same_rules_and_dashboard() -> None:
    switches = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
    manifests = render({"monitoring": dict.fromkeys(switches, True)})
    (rule,) = kind(manifests, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    (shipped,) = kind(manifests, "ConfigMap")
    assert json.loads(shipped["data"]["headrace.json"]) == dashboard()
    assert shipped["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert RULES.resolve().parent == CHART / "files"


def test_the_dashboard_is_whole() -> None:
    board = dashboard()
    panels = board["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    boxes = [p["gridPos"] for p in panels]
    for index, a in enumerate(boxes):
        assert a["x"] >= 0 and a["x"] + a["w"] <= 24
        for b in boxes[:index]:
            apart_x = a["x"] >= b["x"] + b["w"] or b["x"] >= a["x"] + a["w"]
            apart_y = a["y"] >= b["y"] + b["h"] or b["y"] >= a["y"] + a["h"]
            assert apart_x or apart_y, (a, b)
    text = " ".join(e for _, e in dashboard_expressions())
    for shown in (
        "headrace_queue_jobs",
        "headrace_job_queue_wait_seconds",
        "headrace_queue_deadline_jobs",
        "headrace_engine_generation_tokens_total",
        "headrace_engine_kv_usage_ratio",
        "headrace_engine_prefix_cache_hits_total",
        "headrace_queue_replicas_required",
        "headrace_queue_workers",
    ):
        assert shown in text


def test_the_hpa_asks_for_metrics_that_the_adapter_serves() -> None:
    served = {rule["name"]["as"] for rule in adapter_rules()}
    for metric in ("jobs", "tokens", "replicas"):
        values = {"autoscaling": {"kind": "hpa", "metric": metric}}
        for hpa in kind(render(values, kubernetes="1.37.0"), "HorizontalPodAutoscaler"):
            (asked,) = hpa["spec"]["metrics"]
            assert asked["external"]["metric"]["name"] in served
            assert asked["external"]["target"]["type"] == "AverageValue"
    for rule in adapter_rules():
        assert re.fullmatch(rule["name"]["matches"], rule["name"]["as"])
        # <<.GroupBy>> is empty for external metrics: the label must be written out.
        assert "by (queue)" in rule["metricsQuery"]
        assert "<<.GroupBy>>" not in rule["metricsQuery"]
