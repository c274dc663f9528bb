"""Workers for tests: the serving loop in a thread, or the real process under real signals."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tiny

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.producer import codec, schemas
from headrace.worker import wire_request
from headrace.worker.bench.memory import MemorySource
from headrace.worker.drain import Drain
from headrace.worker.feeder import Serving
from headrace.worker.loop import LoopSettings, ServingLoop
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.source import ClaimedJob

MODEL = "tiny"
POOL = 16 << 20


def write_model(folder: Path, **overrides: Any) -> Path:
    """A tiny checkpoint with room for long answers."""
    return tiny.write_checkpoint(folder / MODEL, max_position_embeddings=4096, **overrides)


def load(model: Path, **settings: Any) -> Engine:
    settings.setdefault("kv_cache_memory_bytes", POOL)
    # Two threads on a busy machine wait for each other at every barrier.
    settings.setdefault("num_threads", 1)
    return Engine.load(EngineConfig(str(model), dtype="float32", **settings))


def payload(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


class InThread:
    """A ServingLoop on a MemorySource in a thread of its own."""

    def __init__(
        self,
        engine: Any,
        source: MemorySource,
        *,
        grace: float = 30.0,
        start: bool = True,
        **settings: Any,
    ) -> None:
        settings.setdefault("claim_wait", 0.02)
        self.source = source
        self.metrics = WorkerMetrics(MODEL)
        self.drain = Drain(grace)
        self.error: BaseException | None = None
        self.loop = ServingLoop(
            engine,
            source,
            source,
            Serving(MODEL, frozenset({MODEL}), engine.fingerprint, engine.digest),
            self.metrics,
            self.drain,
            settings=LoopSettings(**settings),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        if start:
            self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def heartbeat(self) -> None:
        """What the keeper does every few seconds."""
        self.loop.lose(self.source.heartbeat())

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(name, labels)
        assert found is not None, name
        return found

    def stop(self, reason: str = "the test") -> None:
        """Drain, and flush."""
        if not self.drain.requested:
            self.drain.request(reason)
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.loop.courier.stop(10) == 0

    def result(self, job_id: str) -> schemas.Result:
        return codec.decode_result(job_id, self.source.results[job_id].result)


@contextlib.contextmanager
def serving(engine: Any, source: MemorySource, **settings: Any) -> Iterator[InThread]:
    server = InThread(engine, source, **settings)
    try:
        yield server
    finally:
        server.stop()


def answer(engine: Engine, fields: dict[str, Any], job_id: str) -> list[Sequence]:
    """The sequences of one request, run alone and uninterrupted."""
    request = schemas.Request.model_validate(fields)
    sequences = wire_request.to_sequences(request, ClaimedJob(job_id, "alone", "q", b""), engine)
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_unfinished:
        engine.step()
    return sequences


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 120.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


class WorkerProcess:
    """`headrace worker` on a tiny model, as an operator starts it."""

    def __init__(
        self,
        redis_url: str,
        model: Path | str,
        log: Path,
        *arguments: str,
        program: list[str] | None = None,
    ) -> None:
        self.log = log
        command = [sys.executable, "-P", *(program or ["-m", "headrace.worker.cli"])]
        command += ["--model", str(model)]
        command += ["--redis-url", redis_url, "--port", "0", "--log-format", "json"]
        command += ["--dtype", "float32", "--kv-cache-memory", str(POOL), "--num-threads", "1"]
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [*command, *arguments], stdout=sink, stderr=sink, env=environment
            )

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(x) for x in self.log.read_text().splitlines() if x.startswith("{")]

    def said(self, pattern: str) -> bool:
        return any(re.search(pattern, line["message"]) for line in self.lines())

    def wait_said(self, pattern: str, timeout: float = 120.0) -> None:
        def heard() -> bool:
            assert self.process.poll() is None or self.said(pattern), self.log.read_text()
            return self.said(pattern)

        wait_until(heard, f"{pattern!r} in {self.log}", timeout)

    def wait_ready(self) -> "WorkerProcess":
        self.wait_said("^ready: ")
        return self

    @property
    def address(self) -> str:
        for line in self.lines():
            found = re.search(r"http://[\d.]+:\d+", line["message"])
            if found:
                return found.group()
        raise AssertionError(f"no address in {self.log}")

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, str]:
        return get(self.address + path, timeout)

    def value(self, name: str, labels: str = "") -> float:
        return sample(self.get("/metrics")[1], name, labels)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_status(self, timeout: float = 60.0) -> int:
        return self.process.wait(timeout)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()


def get(url: str, timeout: float = 10.0) -> tuple[int, str]:
    """Status and body of a URL."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def sample(exposition: str, name: str, labels: str = "") -> float:
    """One sample of a Prometheus exposition; `labels` in braces, in any order."""
    wanted = set(_LABEL.findall(labels))
    for line in exposition.splitlines():
        shown, _, value = line.rpartition(" ")
        if shown.partition("{")[0] == name and set(_LABEL.findall(shown)) == wanted:
            return float(value)
    raise AssertionError(f"no sample {name}{labels}")


_LABEL = re.compile(r'(\w+)="([^"]*)"')
