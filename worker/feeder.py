"""Claims jobs and prepares them, in a thread of its own, so that the engine never waits for the
queue or for a tokenizer. What it has ready lies in a short line; the loop takes from it.

A job that cannot be read or asks for the impossible ends here, with its typed failure. A job for a
model that is not served here, or of a newer schema, goes back uncharged if a live worker could take
it, else it fails too. Nothing here knows Redis.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.errors import Failure, RequestError
from headrace.producer import codec, schemas
from headrace.worker import checkpoint, kill_points, wire_request, wire_result
from headrace.worker.courier import Courier
from headrace.worker.inflight import InFlight
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.pulse import Pulse
from headrace.worker.retrying import Connection
from headrace.worker.serving_engine import JobEngine
from headrace.worker.source import (
    ClaimedJob,
    JobSource,
    Outcome,
    OutcomeKind,
    Released,
    SourceUnavailable,
    WorkerRegistry,
)
from headrace.worker.tags import tags
from headrace.worker.tracing import NoTracing, Tracing

log = logging.getLogger(__name__)

MAX_CLAIM = 128
"""Of one call: 256 would block Redis for 8 ms."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What this worker answers to. `names`: the served name and its other spellings;
    `fingerprint`: what a checkpoint must share; `digest`: what goes with the results."""

    model: str
    names: frozenset[str]
    fingerprint: str
    digest: str = ""

    def serves(self, model: str | None) -> bool:
        return model is None or model == "default" or model in self.names


class Feeder:
    """`room(n)` tells how many more sequences the loop could use now, with `n` of them ready."""

    def __init__(
        self,
        source: JobSource,
        registry: WorkerRegistry,
        engine: JobEngine,
        serving: Serving,
        courier: Courier,
        metrics: WorkerMetrics,
        connection: Connection,
        pulse: Pulse,
        *,
        room: Callable[[int], int],
        claim_wait: float = 0.25,
        tracing: Tracing | None = None,
    ) -> None:
        self._ready: deque[InFlight] = deque()
        self._ready_sequences = 0
        self._source = source
        self._registry = registry
        self._engine = engine
        self._serving = serving
        self._courier = courier
        self._metrics = metrics
        self._connection = connection
        self._pulse = pulse
        self._room = room
        self._claim_wait = claim_wait
        self._tracing = tracing or NoTracing()
        self._stopped = False
        self._changed = threading.Condition()
        self._foreign_wait = 0.0
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[InFlight]:
        """All that is ready, in the order it was claimed."""
        if not self._ready:
            return []
        with self._changed:
            taken = list(self._ready)
            self._ready.clear()
            self._ready_sequences = 0
            return taken

    @property
    def empty(self) -> bool:
        return not self._ready

    def request_stop(self) -> None:
        """Claim no more, without waiting for the call that is under way."""
        self._stopped = True

    def stop(self, timeout: float | None = None) -> list[InFlight]:
        """Claim no more; what was ready and never begun, for the caller to put back."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return self.take()

    def wake(self) -> None:
        """The loop has room again."""
        with self._changed:
            self._changed.notify_all()

    def wait_ready(self, timeout: float) -> None:
        """Wait until something is ready, or `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or self._stopped, timeout)

    def _free(self) -> int:
        return self._room(self._ready_sequences)

    def _run(self) -> None:
        while not self._stopped:
            if self._pulse.stalled() is not None:
                # A hung worker would take the very jobs that its lapsed leases gave back.
                self._sleep(0.5)
                continue
            room = self._free()
            if room <= 0:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._free() > 0, 0.5)
                continue
            claimed = self._claim(min(room, MAX_CLAIM))
            if claimed:
                kill_points.reach("after_claim")
            claimed_at = time.time()
            foreign = 0
            for job in claimed:
                foreign += not self._prepare_one(job, claimed_at)
            self._pause_after_foreign(foreign, len(claimed))

    def _claim(self, count: int) -> list[ClaimedJob]:
        try:
            return self._connection.insist(
                lambda: self._source.claim(count, self._claim_wait),
                give_up=lambda: self._stopped,
                sleep=self._sleep,
            )
        except SourceUnavailable:
            return []
        except Exception:
            log.exception("claiming failed; trying again")
            self._sleep(1.0)
            return []

    def _prepare_one(self, job: ClaimedJob, claimed_at: float) -> bool:
        """Prepare one job or end it. False: it was for another worker and went back."""
        request: schemas.Request | None = None
        self._count(job, claimed_at)
        try:
            with self._pulse.beat("prompt"):
                request = wire_request.parse_request(job.payload)
                if not self._serving.serves(request.model):
                    raise RequestError(
                        "model_not_found",
                        f"no live worker of queue {job.queue!r} serves model "
                        f"{request.model!r}; this one serves {self._serving.model!r}",
                        "model",
                    )
                prepared = self._prepare(job, request, claimed_at)
        except RequestError as error:
            if self._is_foreign(error, job, request):
                self._put_back_foreign(job, request, error)
                return False
            self._reject(job, request, claimed_at, Failure.from_error(error))
        except Exception as error:
            log.exception("preparing a job failed", extra=tags(job, request))
            message = f"the request could not be prepared: {type(error).__name__}"
            self._reject(job, request, claimed_at, Failure("internal_error", message))
        else:
            with self._changed:
                self._ready.append(prepared)
                self._ready_sequences += len(prepared.sequences)
                self._changed.notify_all()
        return True

    def _prepare(self, job: ClaimedJob, request: schemas.Request, claimed_at: float) -> InFlight:
        sequences = wire_request.to_sequences(request, job, self._engine)
        flight = InFlight(job, request, sequences, claimed_at)
        if job.checkpoint:
            restored = checkpoint.restore(job.checkpoint, sequences, self._serving.fingerprint)
            if restored.started_over:
                self._metrics.checkpoints_refused.inc()
                log.warning("starting over: %s", restored.started_over, extra=flight.tags())
            elif restored.tokens:
                flight.resumed_tokens = flight.saved_tokens = restored.tokens
                self._metrics.jobs_resumed.inc()
                self._metrics.resumed_tokens.inc(restored.tokens)
        return flight

    def _is_foreign(
        self, error: RequestError, job: ClaimedJob, request: schemas.Request | None
    ) -> bool:
        if error.code == "model_not_found" and request is not None:
            model, wire = request.model, request.v
        elif error.code == "unsupported_version":
            model, wire = None, wire_request.wire_version(job.payload) or 0
        else:
            return False
        try:
            return self._connection.insist(
                lambda: self._registry.served_elsewhere(model, job.queue, wire),
                give_up=lambda: self._stopped,
                sleep=self._sleep,
            )
        except SourceUnavailable:
            return True

    def _put_back_foreign(
        self, job: ClaimedJob, request: schemas.Request | None, error: RequestError
    ) -> None:
        """At the tail: at the front this worker would only claim it again."""
        log.info("left to another worker: %s", error.code, extra=tags(job, request))
        self._courier.put_back([Released(job, to_front=False)])

    def _pause_after_foreign(self, foreign: int, claimed: int) -> None:
        """A queue with nothing but other workers' jobs must not be spun through."""
        if not foreign:
            if claimed:
                self._foreign_wait = 0.0
            return
        self._foreign_wait = min(1.0, max(0.02, 2 * self._foreign_wait))
        self._sleep(self._foreign_wait)

    def _reject(
        self,
        job: ClaimedJob,
        request: schemas.Request | None,
        claimed_at: float,
        failure: Failure,
    ) -> None:
        log.info("refused: %s", failure.code, extra=tags(job, request, code=failure.code))
        if request is not None:
            self._tracing.refused(job, request, claimed_at, failure)
        result = wire_result.failed_result(failure, job, request, model=self._serving.model)
        self._courier.deliver([Outcome(job, OutcomeKind.FAILED, codec.encode_result(result))])

    def _count(self, job: ClaimedJob, claimed_at: float) -> None:
        if job.fence <= 1:
            reason = "first"
        elif job.crashes:
            reason = "crash"
        elif job.attempts:
            reason = "retry"
        else:
            reason = "released"
        self._metrics.attempts.labels(reason).inc()
        if job.enqueued_at:
            self._metrics.queue_wait.observe(max(0.0, claimed_at - job.enqueued_at))

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)
