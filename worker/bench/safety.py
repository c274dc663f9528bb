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
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import orjson

from headrace.producer import Client, keys
from headrace.producer.redis_server import PrivateRedis
from headrace.worker.bench import workloads
from headrace.worker.bench.compare import System, compare
from headrace.worker.bench.interrupted_run import measure_interrupted_run
from headrace.worker.bench.machine import describe_cpu

OUT = Path("build/bench/safety.json")
QUEUE = "safety"
CHECKPOINT_EVERY = 32
COST_TARGET = 0.93
RESUME_TARGET = 1.1
ANSWER_TOKENS = 512
PROMPT_TOKENS = 96
_SELDOM = 0.1  # The worker needs every core: who asks more often slows what is measured.
LINES = 256


class Worker:
    """`headrace worker` in a process that may be stopped and killed."""

    def __init__(self, url: str, model: str, log: Path, *arguments: str) -> None:
        command = [sys.executable, "-P", "-m", "headrace.worker.cli", "--model", model]
        command += ["--queue", QUEUE, "--port", "0", "--exit-with-parent", *arguments]
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=sink,
                env={**os.environ, "HEADRACE_REDIS_URL": url, "HEADRACE_LOG_FORMAT": "text"},
            )
        self._log = log

    def wait_ready(self) -> None:
        while "ready: " not in self._log.read_text():
            if self._process.poll() is not None:
                raise RuntimeError(f"the worker ended: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> float:
        """The moment (monotonic) of the signal; the system takes a while to end a large process."""
        killed = time.monotonic()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        return killed


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from kill -9 until another worker has the (last of the) jobs."""

    lease: float
    seconds: float

    @property
    def of_lease(self) -> float:
        return self.seconds / self.lease


@dataclass(frozen=True, slots=True)
class Resume:
    """Seconds: of an uninterrupted run; of one killed half-way, while a worker had it; and while
    none had. `resumed_tokens`: output tokens that were not generated again, of `tokens`."""

    uninterrupted: float
    interrupted: float
    unowned: float
    resumed_tokens: int
    tokens: int

    @property
    def ratio(self) -> float:
        return self.interrupted / self.uninterrupted


class Scene:
    """A private Redis and the workers on it."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        self._model = model
        self._arguments = ("--dtype", dtype, "--num-threads", str(threads))
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-safety-"))
        self._server = PrivateRedis().start()
        self.client = Client(self._server.url, queue=QUEUE)
        self._workers: list[Worker] = []

    def worker(self, lease: float) -> Worker:
        """A worker that is ready."""
        log = self._folder / f"worker-{len(self._workers)}.log"
        worker = Worker(
            self._server.url,
            self._model,
            log,
            *self._arguments,
            *("--lease-seconds", str(lease), "--checkpoint-every", str(CHECKPOINT_EVERY)),
            *("--kv-cache-memory", "512M", "--max-num-seqs", "8"),
        )
        self._workers.append(worker)
        worker.wait_ready()
        return worker

    def submit(self, name: str, tokens: int, jobs: int) -> list[str]:
        ids = [f"{name}-{index}" for index in range(jobs)]
        self.client.submit_many(
            [
                {"prompt": [(7 * index + at) % 400 + 20 for at in range(PROMPT_TOKENS)]}
                for index in range(jobs)
            ],
            job_ids=ids,
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        return ids

    def deliveries(self, ids: Sequence[str]) -> list[int]:
        """How often each job was handed to a worker."""
        replies = [self.client.redis.hget(keys.job(job_id), "fence") for job_id in ids]
        return [int(reply or 0) for reply in replies]

    def wait_delivered(self, ids: Sequence[str], times: int) -> float:
        """The moment (monotonic) at which the last of the jobs was."""
        while min(self.deliveries(ids)) < times:
            time.sleep(0.005)
        return time.monotonic()

    def progress(self, job_id: str) -> int:
        """Output tokens in the job's checkpoint."""
        blob = self.client.redis.hget(keys.job(job_id), "ckpt")
        return sum(answer["at"] for answer in orjson.loads(blob)["a"]) if blob else 0

    def end_workers(self) -> None:
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        self.end_workers()
        self.client.close()
        self._server.stop()


@contextmanager
def scene(model: str, dtype: str, threads: int) -> Iterator[Scene]:
    one = Scene(model, dtype, threads)
    try:
        yield one
    finally:
        one.close()


def measure_recovery(scene: Scene, lease: float, jobs: int = 4) -> Recovery:
    """A worker with `jobs` long jobs is killed; another stands by."""
    first = scene.worker(lease)
    ids = scene.submit(f"recovery-{lease:g}", 4000, jobs)
    scene.wait_delivered(ids, 1)
    scene.worker(lease)
    killed = first.kill()
    seconds = scene.wait_delivered(ids, 2) - killed
    scene.client.cancel_many(ids)
    scene.end_workers()
    return Recovery(lease, seconds)


def measure_resume(scene: Scene, lease: float, answer_tokens: int, jobs: int = 4) -> Resume:
    """The same jobs twice: left alone, then with their worker killed half-way."""
    first = scene.worker(lease)
    warm = scene.submit("warm", 8, jobs)
    for job_id in warm:
        scene.client.result(job_id, 600)
    began = time.monotonic()
    for job_id in scene.submit("whole", answer_tokens, jobs):
        scene.client.result(job_id, 600)
    uninterrupted = time.monotonic() - began
    second = scene.worker(lease)
    second.stop()
    began = time.monotonic()
    ids = scene.submit("cut", answer_tokens, jobs)
    while min(scene.progress(job_id) for job_id in ids) < answer_tokens // 2:
        time.sleep(_SELDOM)
    killed = first.kill()
    second.go_on()
    taken = scene.wait_delivered(ids, 2)
    results = [scene.client.result(job_id, 600) for job_id in ids]
    ended = time.monotonic()
    scene.end_workers()
    return Resume(
        uninterrupted=uninterrupted,
        interrupted=(killed - began) + (ended - taken),
        unowned=taken - killed,
        resumed_tokens=sum(result.usage.resumed_from_tokens for result in results),
        tokens=jobs * answer_tokens,
    )


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
