"""The Helm chart: what it renders is valid, hardened, and says what the programs understand."""

import copy
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml
from charts import (
    CHART,
    KUBERNETES,
    Manifest,
    Refused,
    Values,
    component,
    defaults,
    keda_queries,
    kind,
    pods,
    render,
)
from pairwise import Row, pairs, pairwise
from tools import tool

from headrace.producer import keys
from headrace.worker.cli import worker as worker_command
from headrace.worker.config import default_served_name
from headrace.worker.exporter import exporter as exporter_command

CRDS = yaml.safe_load((Path(__file__).parents[1] / "data/deploy/crds.yaml").read_text())
QUEUE = "smollm2-135m-instruct"
HPA = "HorizontalPodAutoscaler"

FACTORS = {
    "kubernetes": ["1.27.0", "1.34.0", "1.37.0"],
    "redis": ["bundled", "own", "own password"],
    "scaler": ["keda", "metrics-api", "hpa", "none"],
    "metric": ["jobs", "tokens", "replicas"],
    "capacity": ["both", "on-demand", "spot"],
    "gpu": ["none", "nvidia"],
    "cost": ["off", "on"],
    "budget": ["on", "off"],
    "monitoring": ["off", "on"],
    "network": ["on", "peers", "off"],
    "weights": ["own", "node", "claim"],
    "queues": ["default", "two"],
    "extras": ["none", "all"],
}


def allowed(row: Row) -> bool:
    """The chart refuses to read two queues with one metrics-api trigger."""
    return not (row.get("scaler") == "metrics-api" and row.get("queues") == "two")


def values_of(row: Row) -> Values:
    worker: Values = {"name": "llama", "model": "org/Llama-1B"}
    share = {"both": (0.25, 0.75), "on-demand": (1, 0.5), "spot": (0.5, 1)}[row["capacity"]]
    worker["onDemand"] = {"enabled": row["capacity"] != "spot", "share": share[0]}
    worker["spot"] = {"enabled": row["capacity"] != "on-demand", "share": share[1]}
    if row["gpu"] == "nvidia":
        worker["gpu"] = {"count": 2}
    if row["weights"] == "node":
        worker["weightsCache"] = {"hostPath": "/var/cache/headrace"}
    if row["weights"] == "claim":
        worker["weightsCache"] = {"existingClaim": "weights"}
    if row["queues"] == "two":
        worker["queues"] = ["urgent.v2", "batch"]
    values: Values = {
        "workers": [worker],
        "autoscaling": {"kind": row["scaler"], "metric": row["metric"]},
        "deletionCost": {"enabled": row["cost"] == "on"},
        "podDisruptionBudget": {"enabled": row["budget"] == "on"},
        "networkPolicy": {"enabled": row["network"] != "off"},
    }
    if row["scaler"] == "metrics-api":
        values["autoscaling"] = {
            "kind": "keda",
            "metric": row["metric"],
            "keda": {"trigger": "metrics-api"},
        }
    if row["scaler"] == "hpa":
        values["autoscaling"]["hpa"] = {"scaleToZeroDeclared": row["kubernetes"] < "1.37"}
    if row["network"] == "peers":
        peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        values["networkPolicy"]["metricsFrom"] = [peer]
    if row["redis"] == "own":
        values["redis"] = {"existingSecret": "my-redis"}
    if row["redis"] == "own password":
        values["redis"] = {"passwordSecret": "my-password", "storageClass": "fast"}
    if row["monitoring"] == "on":
        values["monitoring"] = {
            **dict.fromkeys(("serviceMonitor", "podMonitor", "prometheusRule", "dashboard"), True),
            "labels": {"release": "kube-prometheus-stack"},
        }
    if row["extras"] == "all":
        values |= {"preStopSeconds": 10, "imagePullSecrets": [{"name": "registry"}]}
        affinity = {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}
                            ]
                        }
                    ]
                }
            }
        }
        for capacity in ("onDemand", "spot"):
            worker[capacity] |= {
                "nodeSelector": {"headrace/pool": "gpu"},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "affinity": affinity,
            }
        worker["spot"]["notice"] = "aws"
        worker |= {
            "maxModelLen": 1048576,
            "kvCacheMemory": "20G",
            "quantization": "int8",
            "priorityClassName": "batch",
            "extraArgs": ["--look-ahead=4", "--log-format=json"],
            "env": [
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}}
            ],
        }
    return values


ROWS = pairwise(FACTORS, allowed)


def validate(manifest: Manifest, version: str) -> None:
    """Against Kubernetes' own schema, strictly; custom resources against ours."""
    crd = CRDS.get(manifest["kind"])
    if crd is None:
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    assert manifest["apiVersion"] == crd["apiVersion"]
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(manifest["spec"], crd["spec"], jsonschema.Draft202012Validator)


def test_lint_finds_nothing() -> None:
    done = subprocess.run(
        [tool("helm"), "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_pair_of_switches_is_in_some_row() -> None:
    covered = set().union(*(pairs(row) for row in ROWS))
    for a in FACTORS:
        for b in FACTORS:
            for x in FACTORS[a]:
                for y in FACTORS[b]:
                    if a < b and allowed({a: x, b: y}):
                        assert frozenset(((a, x), (b, y))) in covered


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "/".join(row.values()).replace(" ", "-"))
def test_every_combination_renders_valid_manifests(row: Row) -> None:
    manifests = render(values_of(row), kubernetes=row["kubernetes"])
    for manifest in manifests:
        validate(manifest, row["kubernetes"])
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    workers = component(manifests, "worker")
    assert len(workers) == (2 if row["capacity"] == "both" else 1)
    scalers = {
        "keda": "ScaledObject",
        "metrics-api": "ScaledObject",
        "hpa": "HorizontalPodAutoscaler",
    }
    for one in ("ScaledObject", "HorizontalPodAutoscaler"):
        expected = len(workers) if scalers.get(row["scaler"]) == one else 0
        assert len(kind(manifests, one)) == expected
    assert len(kind(manifests, "PodDisruptionBudget")) == len(workers) * (row["budget"] == "on")
    for one in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
        assert len(kind(manifests, one)) == (row["monitoring"] == "on")
    assert len(kind(manifests, "StatefulSet")) == (row["redis"] != "own")
    check_hardened(manifests, with_token=row["cost"] == "on")
    check_arguments(manifests)
    check_selectors(manifests)


def check_hardened(manifests: list[Manifest], with_token: bool) -> None:
    for name, pod in pods(manifests):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        mayhave = with_token and "exporter" not in name and "redis" not in name
        assert pod["automountServiceAccountToken"] is mayhave, name
        assert ("serviceAccountName" in pod) is mayhave
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert set(container["resources"]) == {"requests", "limits"}
            for variable in container["env"]:
                if "PASSWORD" in variable["name"]:
                    assert "secretKeyRef" in variable["valueFrom"]
                if variable["name"] == "HEADRACE_REDIS_URL" and "value" in variable:
                    assert "$(REDIS_PASSWORD)@" in variable["value"]
    roles = kind(manifests, "Role")
    assert bool(roles) is with_token
    for role in roles:
        assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]


def check_arguments(manifests: list[Manifest]) -> None:
    """Parsed by the commands themselves; HEADRACE_ variables are ones that they read."""
    for which, command in (("worker", worker_command), ("exporter", exporter_command)):
        known = {p.envvar for p in command.params} | {"HEADRACE_CACHE"}
        for manifest in component(manifests, which):
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            parse(command, container["args"])
            for variable in container["env"]:
                if variable["name"].startswith("HEADRACE_"):
                    assert variable["name"] in known


def parse(command: click.Command, arguments: list[str]) -> dict[str, Any]:
    assert arguments[0] == command.name
    return command.make_context(str(command.name), list(arguments[1:])).params


def check_selectors(manifests: list[Manifest]) -> None:
    """Every Service, budget, monitor and policy selects pods that exist."""
    labels = [
        m["spec"]["template"]["metadata"]["labels"]
        for m in manifests
        if m["kind"] in ("Deployment", "StatefulSet")
    ]
    services = [m["metadata"]["labels"] for m in kind(manifests, "Service")]

    def selects(wanted: dict[str, str], among: list[dict[str, str]]) -> bool:
        return any(wanted.items() <= one.items() for one in among)

    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                assert selects(spec["selector"], labels)
            case "PodDisruptionBudget" | "PodMonitor" | "Deployment" | "StatefulSet":
                assert selects(spec["selector"]["matchLabels"], labels)
            case "ServiceMonitor":
                assert selects(spec["selector"]["matchLabels"], services)
            case "NetworkPolicy":
                assert selects(spec["podSelector"]["matchLabels"], labels)


def test_the_grace_period_outlasts_the_drain() -> None:
    """preStop + drain + 10 s at the least, or Kubernetes kills a worker that still puts back."""
    manifests = render({"preStopSeconds": 7, "workerDefaults": {"spot": {"drainSeconds": 40}}})
    for manifest in component(manifests, "worker"):
        pod = manifest["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        drain = parse(worker_command, container["args"])["drain_timeout"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
        assert pod["terminationGracePeriodSeconds"] >= 7 + drain + 10
    drains = [
        parse(worker_command, m["spec"]["template"]["spec"]["containers"][0]["args"])
        for m in component(manifests, "worker")
    ]
    assert {(d["drain_profile"], d["drain_timeout"]) for d in drains} == {
        ("on-demand", 120.0),
        ("spot", 40.0),
    }


def test_the_startup_probe_allows_twice_the_cold_start() -> None:
    values = {
        "workerDefaults": {"coldStartSeconds": 900},
        "autoscaling": {"keda": {"cooldownPeriod": 1800}},
    }
    manifests = render(values)
    for manifest in component(manifests, "worker"):
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        probe = container["startupProbe"]
        assert probe["httpGet"]["path"] == "/readyz"
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    for scaled in kind(manifests, "ScaledObject"):
        behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        (policy,) = behavior["scaleUp"]["policies"]
        assert policy == {"type": "Pods", "value": 2, "periodSeconds": 900}
        assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 300
        assert behavior["scaleDown"]["policies"][0] == {
            "type": "Pods",
            "value": 1,
            "periodSeconds": 120,
        }


def test_no_scaler_reads_a_lost_metric_as_an_empty_queue() -> None:
    for scaled in kind(render(), "ScaledObject"):
        (trigger,) = scaled["spec"]["triggers"]
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert scaled["spec"]["fallback"]["behavior"] == "currentReplicasIfHigher"
        assert scaled["spec"]["cooldownPeriod"] >= 2 * 120


def test_the_exporter_knows_every_queue_that_is_scaled_on() -> None:
    """A queue nobody has used yet must read 0: unknown would start workers by the fallback."""
    values = {
        "workers": [
            {"name": "a", "model": "x/Model-A.gguf"},
            {"name": "b", "model": "/models/b/", "queues": ["q.1", "q2"]},
        ]
    }
    manifests = render(values)
    (manifest,) = component(manifests, "exporter")
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    settings = parse(exporter_command, container["args"])
    assert settings["queues"] == ("model-a", "q.1", "q2")
    assert settings["max_replicas"] == 12
    assert settings["cold_start"] == 120.0
    for query in keda_queries(manifests).values():
        (matcher,) = re.findall(r'queue=~?"([^"]*)"', query)
        for queue in matcher.replace("\\\\.", ".").split("|"):
            assert queue in settings["queues"]
            assert keys.check_queue(queue) == queue


def test_the_chart_names_the_served_model_as_the_worker_does() -> None:
    for model in ("org/Name-1B", "/models/Name-1B.gguf", "/models/Folder/", QUEUE, "A.GGUF"):
        manifests = render({"workers": [{"name": "a", "model": model}]})
        for manifest in component(manifests, "worker"):
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            parsed = parse(worker_command, container["args"])
            assert parsed["served_model_name"] == default_served_name(model)
            assert parsed["model"] == model


def test_two_capacity_types_share_the_target() -> None:
    """share 1/4 and 3/4 of 60 jobs a replica: 240 and 80, so that 240 jobs ask for 1 + 3."""
    values = {
        "workerDefaults": {"target": 60, "onDemand": {"share": 0.25}, "spot": {"share": 0.75}}
    }
    thresholds = {
        m["metadata"]["name"]: float(m["spec"]["triggers"][0]["metadata"]["threshold"])
        for m in kind(render(values), "ScaledObject")
    }
    assert thresholds == {
        "prod-headrace-demo-on-demand": 240.0,
        "prod-headrace-demo-spot": 80.0,
    }


REFUSED: list[tuple[Values, str]] = [
    ({"surprise": 1}, "surprise"),
    ({"redis": {"enabled": False}}, "there is no Redis"),
    ({"autoscaling": {"kind": "hpa"}}, "HPAScaleToZero"),
    ({"workerDefaults": {"coldStartSeconds": 200}}, "twice the cold start"),
    ({"workerDefaults": {"spot": {"share": 0.6}}}, "must add up to 1"),
    ({"workerDefaults": {"spot": {"minReplicas": 9}}}, "above maxReplicas"),
    ({"workers": [{"name": "a", "model": "m"}, {"name": "a", "model": "n"}]}, "used twice"),
    ({"workers": [{"name": "a"}]}, "model"),
    ({"workers": [{"name": "Bad_Name", "model": "m"}]}, "name"),
    ({"workers": [{"name": "a", "model": "m", "queues": ["no spaces"]}]}, "queues"),
    (
        {"workerDefaults": {"weightsCache": {"hostPath": "/a", "existingClaim": "b"}}},
        "either a hostPath or",
    ),
    (
        {
            "workerDefaults": {"queues": ["a", "b"]},
            "autoscaling": {"keda": {"trigger": "metrics-api"}},
        },
        "reads one queue",
    ),
    ({"autoscaling": {"behavior": {"scaleUp": {"periodSeconds": 1801}}}}, "periodSeconds"),
    ({"workerDefaults": {"resources": {"limits": {"memory": "4 GB"}}}}, "memory"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_work_is_refused_with_a_reason(values: Values, message: str) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        render(values)


def test_zero_replicas_with_a_plain_hpa_from_1_37() -> None:
    for hpa in kind(render({"autoscaling": {"kind": "hpa"}}, kubernetes="1.37.0"), HPA):
        assert hpa["spec"]["minReplicas"] == 0


def test_an_entry_of_workers_keeps_the_defaults_that_it_does_not_name() -> None:
    """Helm replaces lists whole: without the merge `gpu: {count: 1}` would lose every default."""
    values = {
        "workers": [{"name": "a", "model": "m", "gpu": {"count": 1}, "spot": {"maxReplicas": 3}}]
    }
    manifests = render(values)
    spot = next(m for m in component(manifests, "worker") if m["metadata"]["name"].endswith("spot"))
    (container,) = spot["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 1}
    assert parse(worker_command, container["args"])["drain_timeout"] == 25.0
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spot["spec"][
        "template"
    ]["spec"]["tolerations"]


def objects(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(tree, dict):
        yield path
        for key, value in tree.items():
            yield from objects(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from objects(value, (*path, index))


FREE = {"nodeSelector", "affinity", "podSecurityContext", "seccompProfile", "labels"}


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    validator.check_schema(schema)
    values = defaults()
    assert not list(validator.iter_errors(values))
    for path in objects(values):
        if FREE & {str(part) for part in path}:
            continue
        changed = copy.deepcopy(values)
        place = changed
        for part in path:
            place = place[part]
        place["surprise"] = "x y"
        assert list(validator.iter_errors(changed)), f"a surprise at {path} is accepted"


def test_every_value_is_explained() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    def walk(node: dict[str, Any], path: str) -> Iterator[str]:
        for name, child in node.get("properties", {}).items():
            target = child
            if "$ref" in child:
                target = schema["$defs"][child["$ref"].rpartition("/")[2]]
            if len(target.get("description", "")) < 8:
                yield f"{path}.{name}"
            yield from walk(target, f"{path}.{name}")
            if isinstance(target.get("items"), dict):
                yield from walk(target["items"], f"{path}.{name}[]")

    assert list(walk(schema, "")) == []


def test_karpenter_pools_fit_the_chart() -> None:
    documents = list(
        yaml.safe_load_all((CHART.parents[1] / "karpenter" / "nodepools.yaml").read_text())
    )
    pools = [d for d in documents if d["kind"] == "NodePool"]
    values = {
        "workerDefaults": {
            "gpu": {"count": 1},
            "onDemand": {"nodeSelector": {"headrace/pool": "on-demand"}},
            "spot": {"nodeSelector": {"headrace/pool": "spot"}},
        }
    }
    for manifest in component(render(values), "worker"):
        pod = manifest["spec"]["template"]["spec"]
        (pool,) = [
            p
            for p in pools
            if pod["nodeSelector"].items() <= p["spec"]["template"]["metadata"]["labels"].items()
        ]
        tolerated = {(t["key"], t["effect"]) for t in pod["tolerations"]}
        for taint in pool["spec"]["template"]["spec"]["taints"]:
            assert (taint["key"], taint["effect"]) in tolerated
        assert pool["spec"]["disruption"]["consolidationPolicy"] == "WhenEmpty"


def test_the_default_kubernetes_version_is_one_that_the_chart_accepts() -> None:
    assert render(kubernetes=KUBERNETES)
    with pytest.raises(Refused, match="kubeVersion"):
        render(kubernetes="1.26.0")
