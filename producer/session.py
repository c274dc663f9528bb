"""One process' share of a run: starts what is missing, keeps the queue fed, counts.

Earlier sessions of the same run are known by the ledger alone.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headrace.producer.bulk.batch_queue import BatchQueue
from headrace.producer.bulk.ledger import Ledger
from headrace.producer.bulk.pump import Pump, Totals
from headrace.producer.bulk.reader import Scan
from headrace.producer.client import Client
from headrace.producer.errors import RedisUnavailable
from headrace.producer.local import LocalWorker, WorkerOptions
from headrace.producer.progress import Progress
from headrace.producer.redis_server import PrivateRedis
from headrace.producer.run_options import RunOptions, Summary
from headrace.producer.served import Served
from headrace.producer.stop_on_signal import StopOnSignal

SUCCEEDED, SOME_FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
_REDIS_PAUSE = 0.5
_READY_POLL = 0.25
_PRIVATE_LEASE = 20


class _Redis(NamedTuple):
    """Where this session's jobs lie. `private` None: in a Redis that stays when we go."""

    url: str
    client: Client
    private: PrivateRedis | None


class Session:
    """One process' share of a run."""

    def __init__(
        self,
        options: RunOptions,
        served: Served,
        ledger: Ledger,
        found: Scan,
        stop: StopOnSignal,
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
            server = self._redis(stack)
            private, client = server.private, server.client
            queue = BatchQueue(client, self._ledger.sidecar.job_prefix, self._served.queue)
            pump = Pump(queue, self._ledger, all_work(), max_jobs=self._options.max_jobs)
            progress = Progress(self._total, self._ledger.counts.ended)
            stack.callback(progress.close)
            worker = self._worker(stack, server, queue, progress)
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

    def _redis(self, stack: contextlib.ExitStack) -> _Redis:
        if self._served.redis is not None:
            return _Redis(self._served.redis.url, self._served.redis.client, None)
        private = stack.enter_context(PrivateRedis())
        client = Client(private.url, retry_for=2.0)
        stack.callback(client.close)
        return _Redis(private.url, client, private)

    def _worker(
        self,
        stack: contextlib.ExitStack,
        server: _Redis,
        queue: BatchQueue,
        progress: Progress,
    ) -> LocalWorker | None:
        if self._served.local is None:
            return None
        private = server.private
        if private is not None:
            folder = private.directory
        else:
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
            server.url,
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
