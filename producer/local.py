"""A worker process of one's own: started, watched, restarted with back-off, ended with us.

Knows the worker by its command line only.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from headrace.producer.child import end_guarded, spawn_guarded
from headrace.producer.errors import HeadraceError

_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
_MAX_BACKOFF = 30.0
_SIGNALLED = 128
DEMO_MODEL = "smollm2-135m-instruct"


class WorkerFailed(HeadraceError):
    """The local worker cannot do the work; the message has the end of its log."""

    code = "worker_failed"


def served_name(model: str) -> str:
    """The name a model is served under unless another is chosen: the last part of its path."""
    name = model.rstrip("/").rsplit("/", 1)[-1]
    if name in ("", ".", "..", "~"):
        name = Path(model).expanduser().resolve().name
    return name.removesuffix(".gguf").lower()


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`arguments` are further options of `headrace worker`."""

    model: str
    served_model_name: str
    arguments: tuple[str, ...] = ()

    def command(self, name: str) -> list[str]:
        worker = [sys.executable, "-P", "-m", "headrace.producer.cli", "worker", "--name", name]
        worker += ["--model", self.model, "--served-model-name", self.served_model_name]
        return [*worker, "--exit-with-parent", *self.arguments]


class LocalWorker:
    """Call `watch` now and then: it restarts a worker that has died.

    A worker that ends by itself before it ever was ready would do so again (a missing model file,
    say): that raises WorkerFailed at once. One that is killed, or dies while it works, is started
    again after 0.5 s, then 1, 2, 4, 8, ... 30 s, at most `max_failures` times without progress.
    Each process has a name of its own; `on_death` gets the name of one that is surely dead.
    `folder`, ours alone, is deleted should this process be killed.
    """

    def __init__(
        self,
        options: WorkerOptions,
        redis_url: str,
        log: Path,
        *,
        folder: Path | None = None,
        max_failures: int = 6,
        name: str = "local",
        on_restart: Callable[[str], None] = lambda _: None,
        on_death: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._base_name = name
        self._starts = 0
        # The URL may hold a password, and arguments show in the list of processes.
        self._environment = {
            **os.environ,
            "HEADRACE_REDIS_URL": redis_url,
            "PYTHONUNBUFFERED": "1",
        }
        self._log = log
        self._folder = folder
        self._max_failures = max_failures
        self._on_restart = on_restart
        self._on_death = on_death
        self._process: Popen[bytes] | None = None
        self._start_at = 0.0
        self._failures = 0
        self._was_ready = False
        self.restarts = 0

    @property
    def name(self) -> str:
        """The name of the process that runs now, or ran last."""
        return f"{self._base_name}-{self._starts}"

    @property
    def was_ready(self) -> bool:
        return self._was_ready

    def progressed(self) -> None:
        """It is ready, or has done a job: earlier failures no longer count."""
        self._was_ready = True
        self._failures = 0

    def watch(self) -> None:
        """Start it when it is due. Raises WorkerFailed when starting again is no use."""
        if self._process is None:
            if time.monotonic() >= self._start_at:
                self._process = self._start()
            return
        code = self._process.poll()
        if code is None:
            return
        end_guarded(self._process, grace=0.0)
        self._process = None
        self._failures += 1
        self._on_death(self.name)
        killed = code >= _SIGNALLED or code < 0
        if not self._was_ready and not killed:
            raise WorkerFailed(f"the worker could not start (status {code}): {self.log_end()}")
        if self._failures > self._max_failures:
            raise WorkerFailed(
                f"the worker ended {self._failures} times without getting anything done"
                f" (status {code}): {self.log_end()}"
            )
        index = self._failures - 1
        delay = _BACKOFF_SECONDS[index] if index < len(_BACKOFF_SECONDS) else _MAX_BACKOFF
        self._start_at = time.monotonic() + delay
        self.restarts += 1
        how = f"was killed by signal {abs(code) % _SIGNALLED}" if killed else f"ended ({code})"
        self._on_restart(f"the worker {how}; starting it again in {delay:g} s")

    def stop(self, grace: float) -> None:
        """End it: SIGTERM, and SIGKILL after `grace` seconds and a little."""
        if self._process is not None:
            end_guarded(self._process, grace=grace)
            self._process = None

    def log_end(self, lines: int = 12) -> str:
        """The last lines of its log."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - 8192))
                text = file.read().decode(errors="replace")
        except OSError:
            text = ""
        return "\n".join(text.strip().splitlines()[-lines:]) or "nothing in its log"

    def _start(self) -> "Popen[bytes]":
        self._starts += 1
        return spawn_guarded(
            self._options.command(self.name),
            remove=str(self._folder) if self._folder is not None else "",
            environment=self._environment,
            output=self._log,
        )
