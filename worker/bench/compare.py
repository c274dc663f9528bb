"""Run systems side by side on the same token ids, in turn, and take medians.

Each system is a child process that speaks `peers.protocol`. Runs are interleaved (A B C A B C ...)
so that a change of the machine's speed meets all of them. A system that cannot start is reported
with its reason, never dropped.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click
import psutil


@dataclass(frozen=True, slots=True)
class System:
    """`argv` starts the child (the common options are appended); `dtype` as the system names it.

    `model`: its own form of the model, None: that of all. `missing`: why it cannot run here.
    """

    name: str
    dtype: str
    argv: tuple[str, ...]
    settings: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    missing: str = ""

    @classmethod
    def module(cls, name: str, module: str, dtype: str, **settings: str) -> "System":
        """A system that runs in this environment."""
        argv = (sys.executable, "-m", f"headrace.worker.bench.peers.{module}")
        return cls(name, dtype, argv, settings)


@dataclass(slots=True)
class Row:
    """One system on one workload. Times in seconds; `error` says why there are none."""

    system: str
    workload: str
    dtype: str
    version: str = ""
    load_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    peak_rss_bytes: int = 0
    token_ids: list[list[int]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s) if self.times_s else float("nan")

    def summary(self, reference: "Row | None" = None) -> dict[str, Any]:
        """What goes into the JSON file; `exact`: outputs equal to the reference's."""
        exact = None
        if reference is not None and reference.token_ids:
            exact = sum(a == b for a, b in zip(self.token_ids, reference.token_ids, strict=False))
        return {
            "system": self.system,
            "workload": self.workload,
            "dtype": self.dtype,
            "version": self.version,
            "load_s": self.load_s,
            "median_s": self.median_s if self.times_s else None,
            "times_s": self.times_s,
            "first_token_s": statistics.median(self.first_token_s) if self.first_token_s else None,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.output_tokens / self.median_s if self.times_s else None,
            "total_tokens_per_s": (self.prompt_tokens + self.output_tokens) / self.median_s
            if self.times_s
            else None,
            "peak_rss_bytes": self.peak_rss_bytes,
            "exact": exact,
            "details": self.details,
            "error": self.error or None,
        }


class Child:
    """A system's process, loaded and waiting."""

    def __init__(self, system: System, model: str, workload: Path, threads: int, row: Row) -> None:
        self.row = row
        self._process: subprocess.Popen[str] | None = None
        if system.missing:
            row.error = system.missing
            return
        # Imported by the child; what it prints beside the protocol is kept for the error message.
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        argv = [*system.argv, "--model", system.model or model, "--workload", str(workload)]
        argv += ["--dtype", system.dtype, "--threads", str(threads)]
        for name, value in system.settings.items():
            argv += ["--set", f"{name}={value}"]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), **system.env}
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=env,
            text=True,
        )
        ready = self._read()
        if ready is not None:
            row.version = str(ready["version"])
            row.load_s = float(ready["load_seconds"])
        self._halt()

    def warm(self) -> None:
        """Run a few requests, not counted."""
        self._say("warm")

    def run(self) -> None:
        """Run the workload and add it to the row."""
        done = self._say("run")
        if done is None:
            return
        row = self.row
        row.times_s.append(float(done["seconds"]))
        if done["first_token_seconds"] is not None:
            row.first_token_s.append(float(done["first_token_seconds"]))
        row.token_ids = done["token_ids"]
        row.output_tokens = sum(map(len, row.token_ids))
        row.peak_rss_bytes = max(row.peak_rss_bytes, int(done["peak_rss_bytes"]))
        row.details = done["details"]

    def _say(self, word: str) -> dict[str, Any] | None:
        if self.row.error:
            return None
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the child was started without a pipe")
        self._go_on()
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            click.echo(f"  {self.row.system} has ended", err=True)
        done = self._read()
        self._halt()
        return done

    def _halt(self) -> None:
        """It stands still while the others run: an engine that spins when idle takes their core."""
        self._signal(signal.SIGSTOP)

    def _go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """To the process and all that it has started."""
        if self._process is None or self._process.poll() is not None:
            return
        process = psutil.Process(self._process.pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def close(self) -> None:
        if self._process is None:
            return
        self._go_on()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def _read(self) -> dict[str, Any] | None:
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("the child was started without a pipe")
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self._process.wait()
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace").strip().splitlines()[-3:]
        self.row.error = f"exit {self._process.returncode}: " + " | ".join(tail)
        return None


def compare(
    systems: Sequence[System],
    *,
    model: str,
    workload: str,
    workload_path: Path,
    threads: int,
    repeats: int,
) -> list[Row]:
    """Load every system, warm it up with a few requests, then run each `repeats` times in turn.
    Only the one whose turn it is runs; the others stand still (SIGSTOP)."""
    prompt_tokens = sum(
        len(json.loads(line)["prompt_token_ids"]) for line in workload_path.read_text().splitlines()
    )
    rows = [Row(s.name, workload, s.dtype, prompt_tokens=prompt_tokens) for s in systems]
    children = []
    for system, row in zip(systems, rows, strict=True):
        what = f"not run: {system.missing}" if system.missing else "loading"
        click.echo(f"  {system.name} ({system.dtype}): {what}", err=True)
        children.append(Child(system, model, workload_path, threads, row))
    try:
        for child in children:
            child.warm()
        for _ in range(repeats):
            for child in children:
                child.run()
                row = child.row
                last = f"{row.times_s[-1]:.2f} s" if row.times_s else row.error
                click.echo(f"  {workload} {row.system} {row.dtype}: {last}", err=True)
    finally:
        for child in children:
            child.close()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, one row a system."""
    lines = [
        "| system | dtype | workload | median s (n) | output tok/s | total tok/s "
        "| first token s | peak RSS GiB | load s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["error"]:
            lines.append(
                f"| {row['system']} | {row['dtype']} | {row['workload']} | not run: {row['error']} "
                "| | | | | |"
            )
            continue
        first = f"{row['first_token_s']:.2f}" if row["first_token_s"] is not None else ""
        lines.append(
            f"| {row['system']} | {row['dtype']} | {row['workload']} "
            f"| {row['median_s']:.2f} ({len(row['times_s'])}) "
            f"| {row['output_tokens_per_s']:.0f} | {row['total_tokens_per_s']:.0f} | {first} "
            f"| {row['peak_rss_bytes'] / 2**30:.2f} | {row['load_s']:.1f} |"
        )
    return "\n".join(lines)
