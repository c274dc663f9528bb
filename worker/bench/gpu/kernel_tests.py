"""The kernel tests, compiled on the device: a process a file, side by side, before anything is
timed. Needs the repository's `tests/kernels`, not only the installed package."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from headrace.worker.bench.gpu.device import Device
from headrace.worker.bench.gpu.record import Record

_TESTS = Path(__file__).resolve().parents[3] / "tests" / "kernels"
_SECONDS = 130.0


class NotHere(Exception):
    """Why an item cannot be run here."""


def run(where: Device, record: Record) -> None:
    files = sorted(_TESTS.glob("test_*.py"))
    if where.tiny:
        files = [path for path in files if path.stem == "test_embedding"]
    else:
        files = [path for path in files if path.stem != "test_aot"]
    if not files:
        raise NotHere(f"{_TESTS} is not there")
    environment = dict(os.environ)
    if where.device.type != "cuda":
        environment["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    ]
    started = time.perf_counter()
    running = {
        path: subprocess.Popen(
            [*command, str(path)],
            cwd=_TESTS.parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for path in files
    }
    bad = []
    try:
        for path, process in running.items():
            left = _SECONDS - (time.perf_counter() - started)
            try:
                output, _ = process.communicate(timeout=max(left, 0.1))
            except subprocess.TimeoutExpired:
                record.add(f"{path.stem}: cut, not finished", 0, "passed")
                continue
            passed = _count(output, "passed")
            failed = _count(output, "failed") + _count(output, "error")
            record.add(path.stem, passed, "passed", failed=failed)
            if process.returncode:
                bad.append(path.stem)
                record.note(**{f"output of {path.stem}": output[-3000:]})
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
    if bad:
        raise RuntimeError(f"tests failed in {', '.join(bad)}")


def _count(output: str, word: str) -> int:
    found = re.search(rf"(\d+) {word}", output)
    return int(found[1]) if found else 0
