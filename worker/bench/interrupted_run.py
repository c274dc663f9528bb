"""What a crash half-way adds to `headrace run` on a file: everything killed, or the worker alone.

The command runs as a user types it, with its private Redis and its local worker; the kill is
SIGKILL. What is measured is all the time in which the command ran, its second start included.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson
import psutil

from headrace.worker.bench import workloads

Victim = Literal["everything", "worker"]
VICTIMS: tuple[Victim, ...] = ("everything", "worker")
_POLL = 0.1


@dataclass(frozen=True, slots=True)
class InterruptedRun:
    """Seconds of an uninterrupted run of `lines` lines, and of one of the same file whose `victim`
    was killed when `done` lines were written. `killed` (SIGKILL) processes."""

    victim: Victim
    lines: int
    done: int
    killed: int
    uninterrupted: float
    interrupted: float

    @property
    def ratio(self) -> float:
        return self.interrupted / self.uninterrupted


class RunCommand:
    """`headrace run` on `lines` lines of the `shared` workload, in `folder`."""

    def __init__(self, folder: Path, model: str, dtype: str, threads: int, lines: int) -> None:
        folder.mkdir(parents=True)
        self._lines = lines
        self._out = folder / "out.jsonl"
        source = folder / "in.jsonl"
        texts = workloads.texts("shared", lines)
        source.write_bytes(
            b"".join(
                orjson.dumps({"custom_id": f"line-{at}", "prompt": text, "max_tokens": tokens})
                + b"\n"
                for at, (text, tokens) in enumerate(texts)
            )
        )
        self._command = [sys.executable, "-P", "-m", "headrace.producer.cli", "run", str(source)]
        self._command += ["-o", str(self._out), "--model", model, "--temperature", "0"]
        self._command += ["--ignore-eos", "--worker-log", str(folder / "worker.log")]
        self._command += ["--", "--dtype", dtype, "--num-threads", str(threads), "--port", "0"]

    def done(self) -> int:
        """Lines that are written."""
        return self._out.read_bytes().count(b"\n") if self._out.exists() else 0

    @contextmanager
    def running(self) -> Iterator[psutil.Popen]:
        """Started; awaited when left. Raises RuntimeError with the end of what it said."""
        log = self._out.with_name("run.log")
        with log.open("ab") as sink:
            process = psutil.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
            yield process
            if process.wait() not in (0, -signal.SIGKILL):
                raise RuntimeError(f"headrace run ended: {log.read_text()[-2000:]}")

    def wait_done(self, process: psutil.Popen, lines: int) -> None:
        while self.done() < lines:
            if process.poll() is not None:
                raise RuntimeError("headrace run ended before it was killed: more lines are needed")
            time.sleep(_POLL)

    def check(self) -> None:
        """Raises RuntimeError unless every line is there exactly once."""
        written = sorted(
            orjson.loads(line)["custom_id"] for line in self._out.read_bytes().splitlines()
        )
        if written != sorted(f"line-{at}" for at in range(self._lines)):
            raise RuntimeError(f"{len(written)} lines in {self._out}, or not the right ones")


def measure_interrupted_run(
    folder: Path, model: str, dtype: str, threads: int, lines: int
) -> list[InterruptedRun]:
    """The file once left alone, and once for each victim, killed at half of its lines."""
    whole = RunCommand(folder / "whole", model, dtype, threads, lines)
    began = time.monotonic()
    with whole.running():
        pass
    uninterrupted = time.monotonic() - began
    whole.check()
    results = []
    for victim in VICTIMS:
        cut = RunCommand(folder / victim, model, dtype, threads, lines)
        began = time.monotonic()
        with cut.running() as process:
            cut.wait_done(process, lines // 2)
            done = cut.done()
            killed = _kill(process, victim)
        if victim == "everything":
            with cut.running():
                pass
        interrupted = time.monotonic() - began
        cut.check()
        results.append(InterruptedRun(victim, lines, done, killed, uninterrupted, interrupted))
    return results


def _kill(run: psutil.Popen, victim: Victim) -> int:
    """How many processes were killed."""
    victims = run.children(recursive=True)
    if victim == "worker":
        victims = [process for process in victims if _is_worker(process)]
    else:
        victims.insert(0, run)
    for process in victims:
        os.kill(process.pid, signal.SIGKILL)
    return len(victims)


def _is_worker(process: psutil.Process) -> bool:
    command = process.cmdline()
    return "worker" in command and "--model" in command
