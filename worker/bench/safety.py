"""What safety costs, how soon a killed worker's jobs run elsewhere, and what a resume costs.

Four measurements with real processes, a private Redis and the demo model. Run as
`python -m headrace.worker.bench.safety`; figures go to build/bench/safety.json.

cost      throughput through the queue (leases, heartbeats, a checkpoint every 32 tokens, results in
          groups, append-only file synced every second) over that of the engine alone, in turn
recovery  from kill -9 until another worker has the job, for some lease lengths
resume    wall time of a run killed half-way, less the time in which nobody had it (that is
          `recovery`), over an uninterrupted one of the same jobs
run       all the time of `headrace run` on a file, killed half-way and typed again, and with its
          worker alone killed, over an uninterrupted one (`interrupted_run`)
"""

import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import orjson

from headrace.worker.bench import workloads
from headrace.worker.bench.compare import System, compare
from headrace.worker.bench.interrupted_run import measure_interrupted_run
from headrace.worker.bench.killed_worker import (
    CHECKPOINT_EVERY,
    measure_recovery,
    measure_resume,
    scene,
)
from headrace.worker.bench.machine import describe_cpu

OUT = Path("build/bench/safety.json")
COST_TARGET = 0.93
RESUME_TARGET = 1.1
ANSWER_TOKENS = 512
LINES = 256


def measure_cost(model: str, dtype: str, threads: int, repeats: int) -> dict[str, Any]:
    """Engine alone and through the queue, in turn, on the bench's workload without a prefix."""
    from headrace.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(model))
    requests = workloads.build(
        "unshared", lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    path = OUT.parent / "safety-workload.jsonl"
    workloads.write(requests, path)
    alone, queued = compare(
        [
            System.module("engine alone", "headrace_engine", dtype),
            System.module(
                "through the queue, with all of it",
                "headrace_queue",
                dtype,
                checkpoint_every=str(CHECKPOINT_EVERY),
            ),
        ],
        model=model,
        workload="unshared",
        workload_path=path,
        threads=threads,
        repeats=repeats,
    )
    if alone.error or queued.error:
        raise RuntimeError(alone.error or queued.error)
    ratios = [a / b for a, b in zip(alone.times_s, queued.times_s, strict=True)]
    return {
        "engine_alone_s": alone.times_s,
        "through_queue_s": queued.times_s,
        "output_tokens": alone.output_tokens,
        "ratio": alone.median_s / queued.median_s,
        "ratios": ratios,
        "target": COST_TARGET,
        "checkpoint_every": CHECKPOINT_EVERY,
    }


def report_cost(model: str, dtype: str, threads: int, repeats: int) -> dict[str, Any]:
    cost = measure_cost(model, dtype, threads, repeats)
    click.echo(
        f"cost: {cost['ratio']:.3f} of the engine alone (target {COST_TARGET}); by turn "
        + ", ".join(f"{ratio:.3f}" for ratio in cost["ratios"])
    )
    return cost


def report_recovery(
    model: str, dtype: str, threads: int, leases: Sequence[float]
) -> list[dict[str, Any]]:
    recoveries = []
    for lease in leases:
        with scene(model, dtype, threads) as one:
            recovery = measure_recovery(one, lease)
        recoveries.append({**asdict(recovery), "of_lease": recovery.of_lease})
        click.echo(
            f"recovery: {recovery.seconds:.1f} s from kill -9 to running elsewhere with a lease "
            f"of {lease:g} s ({recovery.of_lease:.2f} of it)"
        )
    return recoveries


def report_resume(
    model: str, dtype: str, threads: int, lease: float, answer_tokens: int, repeats: int
) -> dict[str, Any]:
    resumes = []
    for _ in range(repeats):
        with scene(model, dtype, threads) as one:
            resume = measure_resume(one, lease, answer_tokens)
        resumes.append(resume)
        click.echo(
            f"resume: {resume.interrupted:.2f} s killed half-way against "
            f"{resume.uninterrupted:.2f} s uninterrupted ({resume.ratio:.3f}, target at most "
            f"{RESUME_TARGET}); {resume.resumed_tokens} of {resume.tokens} tokens kept; nobody had "
            f"the jobs for {resume.unowned:.1f} s"
        )
    return {
        "runs": [{**asdict(one), "ratio": one.ratio} for one in resumes],
        "ratio": statistics.median(resume.ratio for resume in resumes),
        "target": RESUME_TARGET,
    }


def report_run(model: str, dtype: str, threads: int, lines: int, repeats: int) -> dict[str, Any]:
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="headrace-safety-") as folder:
            turn = measure_interrupted_run(Path(folder), model, dtype, threads, lines)
        runs.append(turn)
        for one in turn:
            click.echo(
                f"run: {one.interrupted:.2f} s with {one.victim} killed after {one.done} of "
                f"{one.lines} lines against {one.uninterrupted:.2f} s uninterrupted "
                f"({one.ratio:.3f}, target at most {RESUME_TARGET})"
            )
    return {
        "runs": [asdict(one) | {"ratio": one.ratio} for turn in runs for one in turn],
        "ratio": {
            same[0].victim: statistics.median(one.ratio for one in same)
            for same in zip(*runs, strict=True)
        },
        "target": RESUME_TARGET,
    }


PARTS = ("cost", "recovery", "resume", "run")


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--lease", "leases", multiple=True, type=float, default=(10.0, 60.0))
@click.option(
    "--answer-tokens",
    default=ANSWER_TOKENS,
    show_default=True,
    type=click.IntRange(64),
    help="resume: length of the answers that are cut half-way.",
)
@click.option(
    "--lines",
    default=LINES,
    show_default=True,
    type=click.IntRange(8),
    help="run: length of the file, of questions with one system prompt.",
)
@click.option("--threads", default=0, help="0: this process's CPU quota.")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    default=PARTS,
    help="Only these; the file keeps the others' figures.",
)
def main(
    model: str,
    dtype: str,
    repeats: int,
    leases: tuple[float, ...],
    answer_tokens: int,
    lines: int,
    threads: int,
    parts: tuple[str, ...],
) -> None:
    """Measure, print, and write build/bench/safety.json."""
    from headrace.engine.loading.source import resolve_model
    from headrace.engine.machine import available_threads

    threads = threads or available_threads()
    path = str(resolve_model(model))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    report = orjson.loads(OUT.read_bytes()) if OUT.exists() and parts != PARTS else {}
    report |= {
        "cpu": describe_cpu(),
        "python": platform.python_version(),
        "threads": threads,
        "model": model,
        "dtype": dtype,
    }
    if "cost" in parts:
        report["cost"] = report_cost(path, dtype, threads, repeats)
    if "recovery" in parts:
        report["recovery"] = report_recovery(path, dtype, threads, leases)
    if "resume" in parts:
        report["resume"] = report_resume(path, dtype, threads, leases[0], answer_tokens, repeats)
    if "run" in parts:
        report["run"] = report_run(path, dtype, threads, lines, repeats)
    report["load_average"] = os.getloadavg()
    OUT.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    click.echo(f"written to {OUT}; load average while it ran: {os.getloadavg()[1]:.1f}")


if __name__ == "__main__":
    main()
