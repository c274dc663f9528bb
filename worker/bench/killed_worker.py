"""A worker killed (SIGKILL) under long jobs: how soon they run elsewhere, and what going on costs.

Real processes on a private Redis. The other worker is ready beforehand; the time in which nobody
had the jobs is told apart.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from headrace.producer import Client, keys
from headrace.producer.redis_server import PrivateRedis

QUEUE = "safety"
CHECKPOINT_EVERY = 32
PROMPT_TOKENS = 96
_SELDOM = 0.1  # The worker needs every core: who asks more often slows what is measured.


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
