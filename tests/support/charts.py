"""Renders the chart with the real helm, and reads what comes out."""

import functools
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tools import tool

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "headrace"
NAMESPACE = "batch"
KUBERNETES = "1.34.0"

Values = dict[str, Any]
Manifest = dict[str, Any]


class Refused(Exception):
    """helm did not render: what it said."""


def render(
    values: Values | None = None, *, kubernetes: str = KUBERNETES, release: str = "prod"
) -> list[Manifest]:
    """The manifests of `helm template`. Raises Refused."""
    return json.loads(_render(json.dumps(values or {}), kubernetes, release))


@functools.cache
def _render(values: str, kubernetes: str, release: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(values)
        file.flush()
        command = [tool("helm"), "template", release, str(CHART), "--values", file.name]
        command += ["--namespace", NAMESPACE, "--kube-version", kubernetes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(done.stderr)
    return json.dumps([doc for doc in yaml.safe_load_all(done.stdout) if doc])


def defaults() -> Values:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def kind(manifests: list[Manifest], wanted: str) -> list[Manifest]:
    return [m for m in manifests if m["kind"] == wanted]


def component(manifests: list[Manifest], name: str) -> list[Manifest]:
    """Deployments and StatefulSets of one component."""
    return [
        m
        for m in manifests
        if m["kind"] in ("Deployment", "StatefulSet")
        and m["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == name
    ]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and pod spec of everything that makes pods."""
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def keda_queries(manifests: list[Manifest]) -> dict[str, str]:
    """The PromQL of each ScaledObject's prometheus trigger."""
    return {
        m["metadata"]["name"]: trigger["metadata"]["query"]
        for m in kind(manifests, "ScaledObject")
        for trigger in m["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    }


def adapter_rules() -> list[dict[str, Any]]:
    values = yaml.safe_load((DEPLOY / "prometheus-adapter" / "values.yaml").read_text())
    return values["rules"]["external"]
