"""`headrace run`: a file of prompts through a queue and a worker, in one command.

Brings what is missing: a private Redis, a local worker. Puts together scan, ledger, pump and
worker; decides nothing about a single line.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.producer.bulk.batch_queue import BatchQueue
from headrace.producer.bulk.errors import UnusableInput, UnusableOutput
from headrace.producer.bulk.idset import IdSet
from headrace.producer.bulk.ledger import Ledger, OnBadLine
from headrace.producer.bulk.lines import LineParser
from headrace.producer.bulk.pump import MAX_JOBS, Pump, Totals
from headrace.producer.bulk.reader import (
    MAX_LINE_BYTES,
    ReadOptions,
    Scan,
    open_input,
    read_tasks,
    scan,
    stamp,
)
from headrace.producer.bulk.sidecar import Fingerprint
from headrace.producer.bulk.window import by_prefix
from headrace.producer.bulk.writer import errors_path
from headrace.producer.client import Client
from headrace.producer.connection import redacted
from headrace.producer.errors import RedisUnavailable
from headrace.producer.local import DEMO_MODEL, LocalWorker, WorkerOptions, served_name
from headrace.producer.progress import Progress
from headrace.producer.redis_info import inspect_server
from headrace.producer.redis_server import PrivateRedis

SUCCEEDED, SOME_FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
_REDIS_PAUSE = 0.5
_READY_POLL = 0.25
_PRIVATE_LEASE = 20


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user chose. `model` None: what the service serves, else the demo model.

    `redis_url` None: a private Redis. `local_worker` None: one is started unless a live worker of
    the given Redis serves the model. `defaults`: sampling for lines that do not say.
    `worker_arguments`: further options of `headrace worker`.
    """

    input: Path
    output: Path
    errors: Path | None = None
    model: str | None = None
    served_model_name: str | None = None
    redis_url: str | None = None
    queue: str | None = None
    local_worker: bool | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    on_bad_line: OnBadLine = "quarantine"
    ordered: bool = False
    restart: bool = False
    retry_errors: bool = False
    max_tasks: int | None = None
    max_line_bytes: int = MAX_LINE_BYTES
    max_jobs: int = MAX_JOBS
    worker_arguments: tuple[str, ...] = ()
    worker_log: Path | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """How it went. Lines are counted over all sessions of the run, tokens and time in this one."""

    exit_code: int
    model: str
    output: Path
    errors: Path | None
    total: int
    succeeded: int
    failed: int
    skipped: int
    resumed: int
    interrupted: bool
    seconds: float
    totals: Totals
    worker_restarts: int = 0

    @property
    def jobs_per_second(self) -> float:
        return self.totals.jobs / self.seconds if self.seconds > 0 else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        return self.totals.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def total_tokens_per_second(self) -> float:
        tokens = self.totals.prompt_tokens + self.totals.completion_tokens
        return tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Prompt tokens that came from the prefix cache, of all prompt tokens."""
        if not self.totals.prompt_tokens:
            return 0.0
        return self.totals.cached_tokens / self.totals.prompt_tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "model": self.model,
            "output": str(self.output),
            "errors": str(self.errors) if self.errors else None,
            "total": self.total,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "skipped": self.skipped,
            "resumed": self.resumed,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "jobs": self.totals.jobs,
            "jobs_per_second": round(self.jobs_per_second, 3),
            "prompt_tokens": self.totals.prompt_tokens,
            "completion_tokens": self.totals.completion_tokens,
            "output_tokens_per_second": round(self.output_tokens_per_second, 2),
            "total_tokens_per_second": round(self.total_tokens_per_second, 2),
            "prefix_cache_hit_rate": round(self.prefix_cache_hit_rate, 4),
            "worker_restarts": self.worker_restarts,
        }


def run(options: RunOptions) -> Summary:
    """Do the whole file, or what earlier sessions left of it.

    Raises UnusableInput and UnusableOutput before anything was started, RedisUnavailable when
    there is no Redis to begin with, WorkerFailed when the local worker cannot work. Ctrl-C and
    SIGTERM end it in order, with `interrupted` set; the same command goes on.
    """
    errors = options.errors or errors_path(options.output)
    _check_paths(options, errors)
    read = ReadOptions(options.max_line_bytes, options.max_tasks)
    with contextlib.ExitStack() as stack:
        served = _Served.look(options, stack)
        found = scan(options.input, served.parser(options), read)
        _refuse_bad_lines(options, found)
        fingerprint = Fingerprint(found.sha256, served.identity, dict(options.defaults))
        stop = stack.enter_context(_StopOnSignal())
        ledger = stack.enter_context(
            Ledger(
                options.output,
                errors,
                fingerprint,
                restart=options.restart,
                retry_errors=options.retry_errors,
                ordered=options.ordered,
            )
        )
        file = stack.enter_context(open_input(options.input))
        if stamp(file) != found.stamp:
            raise UnusableInput("unreadable", f"{options.input} changed while it was read")
        ids = stack.enter_context(IdSet())
        items = read_tasks(file, served.parser(options), ids, read)
        work = by_prefix(ledger.work(items, options.on_bad_line))
        session = _Session(options, served, ledger, found, stop)
        session.go(work)
        if not stop.requested and stamp(file) != found.stamp:
            raise UnusableInput(
                "unreadable",
                f"{options.input} changed while it ran: what is in {options.output} may not fit it",
            )
    return session.summary(errors)


def _check_paths(options: RunOptions, errors: Path) -> None:
    inputs = options.input.resolve()
    if inputs in (options.output.resolve(), errors.resolve()):
        raise UnusableOutput("same_file", "the input cannot be written over: choose another OUT")
    if not options.output.parent.is_dir():
        raise UnusableOutput("unwritable", f"there is no folder {options.output.parent}")


def _refuse_bad_lines(options: RunOptions, found: Scan) -> None:
    if found.bad and options.on_bad_line == "fail":
        first = found.examples[0]
        raise UnusableInput(
            first.code,
            f"{found.bad_lines} bad lines, and --on-bad-line is fail; the first is line"
            f" {first.line}: {first.message}",
            first.line,
        )


class _Served:
    """Which model answers, known before anything is started."""

    def __init__(
        self, name: str, identity: str, queue: str, local: str | None, client: Client | None
    ) -> None:
        self.name = name
        self.identity = identity
        self.queue = queue
        self.local = local
        self.client = client

    @classmethod
    def look(cls, options: RunOptions, stack: contextlib.ExitStack) -> "_Served":
        if options.redis_url is None:
            return cls._own(options, None)
        client = stack.enter_context(contextlib.closing(Client(options.redis_url, retry_for=2.0)))
        client.ping()
        facts = inspect_server(client.redis)
        if facts.problems:
            raise RedisUnavailable(f"{redacted(options.redis_url)}: {'; '.join(facts.problems)}")
        for warning in facts.warnings:
            print(f"warning: {redacted(options.redis_url)}: {warning}", file=sys.stderr)
        models = {worker.model: worker.queues for worker in client.workers() if worker.model}
        wanted = options.served_model_name or (served_name(options.model) if options.model else "")
        if not wanted and len(models) == 1:
            wanted = next(iter(models))
        if options.local_worker or (options.local_worker is None and wanted not in models):
            return cls._own(options, client)
        if not wanted:
            raise RedisUnavailable(
                "no live worker says what it serves: start one, or give --model or --local-worker"
            )
        queues = models.get(wanted, ())
        queue = options.queue or (wanted if wanted in queues or not queues else queues[0])
        return cls(wanted, wanted, queue, None, client)

    @classmethod
    def _own(cls, options: RunOptions, client: Client | None) -> "_Served":
        model = options.model or DEMO_MODEL
        name = options.served_model_name or served_name(model)
        path = Path(model).expanduser()
        identity = str(path.resolve()) if path.exists() else model
        return cls(name, identity, options.queue or name, model, client)

    def parser(self, options: RunOptions) -> LineParser:
        return LineParser(defaults=options.defaults, expected_model=self.name)


class _StopOnSignal:
    """The first Ctrl-C or SIGTERM asks for an orderly end, the second Ctrl-C ends at once."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.requested = False
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> "_StopOnSignal":
        with contextlib.suppress(ValueError):  # not the main thread: the caller's signals stay
            for number in self._SIGNALS:
                self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


class _Session:
    """One process' share of a run."""

    def __init__(
        self,
        options: RunOptions,
        served: _Served,
        ledger: Ledger,
        found: Scan,
        stop: _StopOnSignal,
    ) -> None:
        self._options = options
        self._served = served
        self._ledger = ledger
        self._found = found
        self._stop = stop
        self._resumed = ledger.counts.ended
        self._total = found.tasks + (0 if options.on_bad_line == "skip" else found.bad_lines)
        self._totals = Totals()
        self._seconds = 0.0
        self._restarts = 0

    def go(self, work: Iterator[Any]) -> None:
        first = next(work, None)
        if first is None:
            self._ledger.sync()
            return

        def all_work() -> Iterator[Any]:
            yield first
            yield from work

        with contextlib.ExitStack() as stack:
            private, client = self._redis(stack)
            queue = BatchQueue(client, self._ledger.sidecar.job_prefix, self._served.queue)
            pump = Pump(queue, self._ledger, all_work(), max_jobs=self._options.max_jobs)
            progress = Progress(self._total, self._ledger.counts.ended)
            stack.callback(progress.close)
            worker = self._worker(stack, private, queue, progress)
            self._totals = pump.totals
            if self._resumed:
                progress.message(f"going on: {self._resumed} of {self._total} lines have ended")
            try:
                self._loop(pump, private, client, worker, progress)
            finally:
                self._restarts = worker.restarts if worker else 0
                with contextlib.suppress(RedisUnavailable):
                    pump.flush()
                    if private is None and pump.outstanding():
                        queue.withdraw(pump.outstanding())
                progress.update(self._ledger.counts.ended)

    def _redis(self, stack: contextlib.ExitStack) -> tuple[PrivateRedis | None, Client]:
        if self._served.client is not None:
            return None, self._served.client
        private = stack.enter_context(PrivateRedis())
        client = Client(private.url, retry_for=2.0)
        stack.callback(client.close)
        return private, client

    def _worker(
        self,
        stack: contextlib.ExitStack,
        private: PrivateRedis | None,
        queue: BatchQueue,
        progress: Progress,
    ) -> LocalWorker | None:
        if self._served.local is None:
            return None
        if private is not None:
            url, folder = private.url, private.directory
        else:
            assert self._options.redis_url is not None
            url = self._options.redis_url
            folder = Path(tempfile.mkdtemp(prefix="headrace-run-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        arguments = ["--queue", self._served.queue]
        if private is not None:
            # Nobody else's worker waits for these leases; should Redis have lost a result with the
            # last second of its log, the job comes back sooner.
            arguments += ["--lease-seconds", str(_PRIVATE_LEASE)]
        arguments += self._options.worker_arguments
        worker = LocalWorker(
            WorkerOptions(self._served.local, self._served.name, tuple(arguments)),
            url,
            self._options.worker_log or folder / "worker.log",
            folder=folder,
            name=f"run-{self._ledger.sidecar.run_id}-{os.getpid()}",
            on_restart=progress.message,
            on_death=queue.lapse,
        )
        progress.message(f"loading {self._served.local}")
        # On a Redis that goes away with us there is nothing to hand back.
        stack.callback(worker.stop, grace=0.5 if private is not None else 20.0)
        return worker

    def _loop(
        self,
        pump: Pump,
        private: PrivateRedis | None,
        client: Client,
        worker: LocalWorker | None,
        progress: Progress,
    ) -> None:
        # Work begins when the worker is ready; of that we know the time to within a look.
        started = time.monotonic()
        next_look = 0.0
        more = True
        while more and not self._stop.requested:
            if private is not None and private.revive():
                progress.message("the private Redis had died; it runs again")
                pump.submit_again()
            done = pump.totals.jobs
            try:
                if worker is not None:
                    worker.watch()
                if worker is not None and not worker.was_ready and time.monotonic() >= next_look:
                    next_look = time.monotonic() + _READY_POLL
                    if any(one.state == "ready" for one in client.workers()):
                        worker.progressed()
                    else:
                        started = time.monotonic()
                more = pump.turn()
            except RedisUnavailable as error:
                progress.update(self._ledger.counts.ended, f"waiting for Redis: {error}")
                time.sleep(_REDIS_PAUSE)
                continue
            if worker is not None and pump.totals.jobs > done:
                worker.progressed()
            self._seconds = time.monotonic() - started
            progress.update(self._ledger.counts.ended, self._note(pump, worker))

    def _note(self, pump: Pump, worker: LocalWorker | None) -> str:
        if pump.full is not None:
            return pump.full
        if worker is not None and not worker.was_ready:
            return f"loading {self._served.name}"
        if not pump.totals.jobs:
            return ""
        return f"{pump.totals.completion_tokens / max(self._seconds, 1e-9):.0f} tok/s"

    def summary(self, errors: Path) -> Summary:
        counts = self._ledger.counts
        unfinished = counts.ended < self._total
        if self._stop.requested and unfinished:
            exit_code = INTERRUPTED
        elif not self._found.tasks:
            exit_code = UNUSABLE
        else:
            exit_code = SOME_FAILED if counts.failed or unfinished else SUCCEEDED
        return Summary(
            exit_code=exit_code,
            model=self._served.name,
            output=self._options.output,
            errors=errors if errors.exists() else None,
            total=self._total,
            succeeded=counts.succeeded,
            failed=counts.failed,
            skipped=counts.skipped,
            resumed=self._resumed,
            interrupted=exit_code == INTERRUPTED,
            seconds=self._seconds,
            totals=self._totals,
            worker_restarts=self._restarts,
        )
