"""The compose file and the image: what they mount exists, what they pass is understood."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from charts import DEPLOY, ROOT, defaults
from tools import tool

from headrace.worker.cli import worker
from headrace.worker.config import DEFAULT_PORT
from headrace.worker.drain import PROFILES
from headrace.worker.exporter import exporter

FOLDER = DEPLOY / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus/prometheus.yaml").read_text())
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
COMMANDS = {"worker": worker, "exporter": exporter}


def arguments(service: str) -> dict[str, Any]:
    command: click.Command = COMMANDS[service]
    name, *given = SERVICES[service]["command"]
    assert name == command.name
    filled = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in given]
    return command.make_context(name, filled).params


def test_what_compose_passes_is_what_the_commands_take() -> None:
    model = arguments("worker")["model"]
    assert arguments("exporter")["queues"] == (model,)
    for service, command in COMMANDS.items():
        known = {parameter.envvar for parameter in command.params}
        for name in SERVICES[service]["environment"]:
            assert name in known or not name.startswith("HEADRACE_")


def test_every_port_is_on_loopback_and_nothing_is_root_twice() -> None:
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
        if name in ("redis", "worker", "exporter"):
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]


def test_every_file_that_is_mounted_exists_and_is_no_link_out_of_the_mount() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if not source.startswith("."):
                assert source in COMPOSE["volumes"]
                continue
            path = FOLDER / source
            assert path.exists(), source
            inside = [path, *path.rglob("*")] if path.is_dir() else [path]
            assert not [p for p in inside if p.is_symlink()]


def test_redis_has_the_settings_of_the_chart() -> None:
    words = SERVICES["redis"]["command"]
    settings = dict(zip(words[1::2], words[2::2], strict=True))
    chart = (DEPLOY / "helm/headrace/templates/redis.yaml").read_text()
    for name, value in settings.items():
        if name != "--maxmemory":
            assert re.search(rf"{name} \"?{value}\"?", chart), name
    assert SERVICES["redis"]["image"] == defaults()["redis"]["image"]


def test_a_stopped_worker_has_time_to_drain() -> None:
    grace = int(SERVICES["worker"]["stop_grace_period"].removesuffix("s"))
    assert grace >= PROFILES["on-demand"] + 10


def test_prometheus_scrapes_the_ports_that_are_served(tmp_path: Path) -> None:
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    (target,) = jobs["headrace-exporter"]["static_configs"][0]["targets"]
    assert target == f"exporter:{arguments('exporter')['port']}"
    (found,) = jobs["headrace-worker"]["dns_sd_configs"]
    assert found["names"] == ["worker"]
    assert found["port"] == arguments("worker")["port"] == DEFAULT_PORT
    (tmp_path / "prometheus.yaml").write_text((FOLDER / "prometheus/prometheus.yaml").read_text())
    rules = DEPLOY / "prometheus" / "headrace.rules.yaml"
    (tmp_path / "headrace.rules.yaml").write_text(rules.read_text())
    done = subprocess.run(
        [tool("promtool"), "check", "config", str(tmp_path / "prometheus.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = FOLDER / "grafana/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())
    assert [s["url"] for s in sources["datasources"]] == ["http://prometheus:9090"]
    boards = yaml.safe_load((provisioning / "dashboards/headrace.yaml").read_text())
    folder = boards["providers"][0]["options"]["path"]
    mounts = dict(v.split(":")[:2][::-1] for v in SERVICES["grafana"]["volumes"])
    assert (FOLDER / mounts[folder] / "headrace-dashboard.json").is_file()
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/headrace-dashboard.json"


@pytest.mark.parametrize("service", sorted(COMMANDS))
def test_the_image_has_the_target_that_is_asked_for(service: str) -> None:
    build = SERVICES[service]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert f" AS {build['target']}" in DOCKERFILE


def test_the_image_copies_all_that_is_installed_and_the_context_lets_it_through() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    rooms = {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"]}
    needed = rooms | {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {"pyproject.toml", "constraints.txt"}
    copied = set()
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        copied |= set(line.split()[:-1])
    assert copied == needed
    let_through = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in let_through if line.startswith("!")} == copied
    extras = re.search(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert extras is not None
    assert set(extras.group(1).split(",")) <= set(project["project"]["optional-dependencies"])


def test_the_images_run_without_root() -> None:
    for target in DOCKERFILE.split("\nFROM ")[2:]:
        assert "USER 10001:10001" in target
    assert defaults()["podSecurityContext"]["runAsUser"] == 10001
