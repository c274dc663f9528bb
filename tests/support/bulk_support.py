"""Running the `headrace` command for real, and reading what it wrote."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

HEADRACE = [sys.executable, "-P", "-m", "headrace.producer.cli"]
ECHO_WORKER = Path(__file__).with_name("echo_worker.py")


def environment(**more: str) -> dict[str, str]:
    """Ours, without HEADRACE_ settings of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return {**kept, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", **more}


def headrace(*arguments: str | Path, **more: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run(
        [*HEADRACE, *map(str, arguments)],
        env=environment(**more),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def start_headrace(*arguments: str | Path, **more: str) -> "subprocess.Popen[str]":
    """Start a command in a process group of its own, as a shell does."""
    return subprocess.Popen(
        [*HEADRACE, *map(str, arguments)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )


@contextmanager
def echo_worker(url: str, queue: str = "echo", **options: float) -> Iterator[int]:
    """A worker that answers with the prompt; its process id."""
    command = [sys.executable, str(ECHO_WORKER), url, queue]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.terminate()
        process.wait(20)


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    """One JSON value a line; bytes and text as they are."""
    with path.open("wb") as file:
        for line in lines:
            if isinstance(line, str):
                line = line.encode()
            file.write(line if isinstance(line, bytes) else json.dumps(line).encode())
            file.write(b"\n")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def custom_ids(path: Path) -> list[Any]:
    return [entry["custom_id"] for entry in read_lines(path)]


def text_of(entry: dict[str, Any]) -> str:
    choice = entry["response"]["body"]["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """The condition's first true value. The limit only ends a test that would hang."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)
    return value
