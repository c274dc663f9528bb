"""The serving loop: admit what the feeder has ready, step the engine, deliver what ended.

One thread runs it, and the engine in it. It knows neither Redis nor HTTP: jobs come from a Feeder,
results leave through a Courier. When a step raises, `Recovery` finds the job that is to blame; when
the engine itself is broken, `EngineBroken` ends the worker.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.engine.errors import EngineError, Failure, RequestError
from headrace.engine.stats import StepOutput
from headrace.worker import checkpoint, kill_points
from headrace.worker.courier import Courier
from headrace.worker.drain import Drain
from headrace.worker.feeder import Feeder, Serving
from headrace.worker.flights import Flights
from headrace.worker.inflight import InFlight
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.outcomes import Outcomes
from headrace.worker.pulse import Pulse
from headrace.worker.rates import ServiceRates
from headrace.worker.recovery import Recovery
from headrace.worker.retrying import Connection
from headrace.worker.serving_engine import EngineBroken, ServingEngine
from headrace.worker.source import (
    ClaimedJob,
    JobSource,
    Outcome,
    OutcomeKind,
    Released,
    WorkerRegistry,
)
from headrace.worker.step_metrics import StepMetrics
from headrace.worker.tracing import Tracing

log = logging.getLogger(__name__)

IDLE_WAIT = 0.1
EXPIRY_INTERVAL = 0.25


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`look_ahead`: sequences claimed beyond the engine's slots, so that a slot never waits for the
    queue; None: an eighth of the slots, at least 4. `checkpoint_every`: output tokens between two
    checkpoints of a job; 0: only when draining."""

    look_ahead: int | None = None
    checkpoint_every: int = 256
    flush_count: int = 64
    flush_seconds: float = 0.005
    claim_wait: float = 0.25


class ServingLoop:
    """Serves until `drain` is requested and over. `run` is called from one thread, once."""

    def __init__(
        self,
        engine: ServingEngine,
        source: JobSource,
        registry: WorkerRegistry,
        serving: Serving,
        metrics: WorkerMetrics,
        drain: Drain,
        *,
        pulse: Pulse | None = None,
        connection: Connection | None = None,
        settings: LoopSettings = LoopSettings(),
        on_first_token: Callable[[], None] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.pulse = pulse or Pulse(600.0)
        self._engine = engine
        self._source = source
        self._serving = serving
        self._metrics = metrics
        self._drain = drain
        self._settings = settings
        self._on_first_token = on_first_token
        self._slots = engine.limits.max_num_seqs
        ahead = settings.look_ahead
        self._look_ahead = max(4, self._slots // 8) if ahead is None else ahead
        self._flights = Flights(engine)
        self._lost: deque[ClaimedJob] = deque()
        self._lost_unseen: dict[str, float] = {}
        self._next_expiry = 0.0
        self._steps = 0
        self._recovery = Recovery()
        self._outcomes = Outcomes(engine, serving.model, serving.digest, tracing)
        self._measured = StepMetrics(metrics)
        self._unbegun: list[InFlight] = []
        self._dirty = False
        connection = connection or Connection(metrics)
        self.courier = Courier(
            source,
            metrics,
            connection,
            idle=lambda: not self._flights.num_sequences and self.feeder.empty,
            flush_count=settings.flush_count,
            flush_seconds=settings.flush_seconds,
        )
        self.feeder = Feeder(
            source,
            registry,
            engine,
            serving,
            self.courier,
            metrics,
            connection,
            self.pulse,
            room=self._room,
            claim_wait=settings.claim_wait,
            tracing=tracing,
        )

    @property
    def rates(self) -> ServiceRates:
        """How fast the engine has been lately; read by other threads."""
        return self._measured.rates

    @property
    def num_running(self) -> int:
        """Jobs under way; read by other threads."""
        return len(self._flights)

    def lose(self, claimed: Iterable[ClaimedJob]) -> None:
        """Jobs that are no longer ours (from the keeper's thread): abort them."""
        self._lost.extend(claimed)

    def progress(self) -> list[Released]:
        """Every job under way with its checkpoint; may be called from another thread."""
        fingerprint = self._serving.fingerprint
        return [
            Released(flight.job, checkpoint.save(flight.sequences, fingerprint))
            for flight in self._flights
        ]

    def run(self) -> None:
        """Serve until drained. Raises EngineBroken."""
        self.courier.start()
        self.feeder.start()
        try:
            while not self._drain.requested:
                self._turn()
            self._drain_down()
        except EngineBroken:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """The engine is broken. What was in its batch keeps its progress and its lease, which then
        lapses: the queue charges a crash and tries those jobs in small company, so that one that
        breaks engines is found. The rest goes back uncharged."""
        self.courier.save(
            [(item.job, item.checkpoint) for item in self.progress() if item.checkpoint]
        )
        self._put_back(self._unbegun + self.feeder.stop(2 * self._settings.claim_wait + 0.5))

    def _turn(self) -> None:
        self._give_up_lost()
        self._expire()
        self._admit()
        if self._engine.has_unfinished:
            self._step()
        else:
            self._rest()

    def _rest(self) -> None:
        if self._dirty:
            self._dirty = False
            self._measured.idle()
            self._metrics.claimed_jobs.set(len(self._flights))
            try:
                self._engine.check_integrity()
            except Exception as error:
                raise EngineBroken(f"the engine's books do not balance: {error}") from error
        if self.feeder.empty:
            self.feeder.wait_ready(IDLE_WAIT)

    def _room(self, ready: int) -> int:
        return self._slots + self._look_ahead - self._flights.num_sequences - ready

    def _admit(self) -> None:
        ended: list[Outcome] = []
        for flight in self._recovery.next_group():
            self._add(flight, ended)
        if not self._recovery.active:
            for flight in self.feeder.take():
                if self._lost_unseen.pop(flight.job.execution_id, None) is not None:
                    continue
                self._flights.enter(flight)
                self._add(flight, ended)
                kill_points.reach("after_start")
        if ended:
            self.courier.deliver(ended)
        self._metrics.claimed_jobs.set(len(self._flights))

    def _add(self, flight: InFlight, ended: list[Outcome]) -> None:
        """Give a job's open sequences to the engine: all of them, or none and its failure."""
        try:
            self._flights.begin(flight)
        except RequestError as error:
            self._flights.abort(flight)
            ended.append(self._fail(flight, Failure.from_error(error), OutcomeKind.FAILED))
        except Exception as error:
            log.exception("adding a job failed", extra=flight.tags())
            self._flights.abort(flight)
            message = f"the engine could not take the request: {type(error).__name__}: {error}"
            failure = Failure("engine_error", message, retryable=True)
            ended.append(self._fail(flight, failure, OutcomeKind.RETRY))
        else:
            if not flight.unfinished:
                ended.append(self._end(flight))

    def _step(self) -> None:
        self._dirty = True
        started = time.perf_counter()
        try:
            with self.pulse.beat("engine step"):
                output = self._engine.step()
        except Exception as error:
            self._recover(error)
            return
        self._measured.step(output.stats, time.perf_counter() - started)
        kill_points.progressed(
            flight.job.job_id
            for sequence in (*output.progressed, *output.finished)
            if (flight := self._flights.whose(sequence.seq_id)) is not None
        )
        kill_points.reach("mid_generation")
        ended = self._collect(output)
        if self._recovery.active:
            self._recovery.observe({outcome.job.execution_id for outcome in ended})
        if ended:
            self.courier.deliver(ended)
            self.feeder.wake()
        self._save_progress(output)
        if self._on_first_token is not None and (output.finished or output.progressed):
            self._on_first_token()
            self._on_first_token = None

    def _collect(self, output: StepOutput) -> list[Outcome]:
        ended: list[Outcome] = []
        for sequence in output.finished:
            flight = self._flights.ended(sequence.seq_id)
            if flight is None or flight.given_up:
                continue
            self._measured.ended(sequence)
            if flight.failed:
                self._flights.abort(flight)
            # Once, however many of its answers end in this step.
            if flight in self._flights and (flight.failed or not flight.unfinished):
                ended.append(self._end(flight))
        return ended

    def _end(self, flight: InFlight) -> Outcome:
        """The outcome of a job whose sequences have all ended."""
        self._flights.leave(flight)
        return self._outcomes.ended(flight)

    def _fail(self, flight: InFlight, failure: Failure, kind: OutcomeKind) -> Outcome:
        self._flights.leave(flight)
        return self._outcomes.failed(flight, failure, kind)

    def _give_up(self, flight: InFlight) -> None:
        flight.given_up = True
        self._flights.abort(flight)
        self._recovery.forget(flight)
        self._flights.leave(flight)
        self.feeder.wake()

    def _give_up_lost(self) -> None:
        while self._lost:
            job = self._lost.popleft()
            flight = self._flights.find(job)
            if flight is None:
                self._lost_unseen[job.execution_id] = time.monotonic()
                continue
            self._metrics.jobs_lost.inc()
            log.info("given up: cancelled or taken away", extra=flight.tags())
            self._give_up(flight)

    def _expire(self) -> None:
        """An explicit result for what can no longer be in time; its blocks are freed."""
        now = time.time()
        if now < self._next_expiry:
            return
        self._next_expiry = now + EXPIRY_INTERVAL
        self._lost_unseen = {
            name: at for name, at in self._lost_unseen.items() if time.monotonic() - at < 60.0
        }
        late = [
            flight
            for flight in self._flights
            if flight.job.deadline is not None and flight.job.deadline < now
        ]
        for flight in late:
            self._give_up(flight)
            failure = Failure("expired", "the deadline passed while the job was running")
            self.courier.deliver([self._fail(flight, failure, OutcomeKind.EXPIRED)])

    def _save_progress(self, output: StepOutput) -> None:
        every = self._settings.checkpoint_every
        self._steps += 1
        # Looking at every sequence after every step would cost more than it tells.
        if not every or self._steps % max(1, every // 16):
            return
        progress = []
        for sequence in output.progressed:
            flight = self._flights.whose(sequence.seq_id)
            if flight is None or flight.num_output_tokens - flight.saved_tokens < every:
                continue
            flight.saved_tokens = flight.num_output_tokens
            blob = checkpoint.save(flight.sequences, self._serving.fingerprint)
            if blob is not None:
                progress.append((flight.job, blob))
        if progress:
            self.courier.save(progress)

    def _recover(self, error: Exception) -> None:
        """The engine finds by itself which sequence breaks a step of the device, and raises
        EngineError when it is none. Anything else is a fault of its host half with one of them:
        take everything out, and put it back in halves until one job is left."""
        self._metrics.engine_errors.inc()
        self._unbegun = [flight for flight in self._flights if flight.unbegun]
        if isinstance(error, EngineError):
            raise EngineBroken(str(error)) from error
        log.error("a step raised %s; looking for the job", type(error).__name__, exc_info=error)
        running = self._flights.in_engine()
        try:
            for flight in running:
                self._flights.abort(flight)
            self._engine.check_integrity()
            # A step may still be in flight: what it brings is nobody's any more.
            if self._engine.num_unfinished:
                raise EngineBroken("sequences are left that nobody added")
        except Exception as second:
            raise EngineBroken(f"the engine cannot go on after {error!r}: {second!r}") from error
        for flight in running:
            flight.begin_again()
        culprit = self._recovery.split(running)
        ended: list[Outcome] = []
        if culprit is not None:
            running.remove(culprit)
            failure = Failure(
                "engine_error",
                f"the engine raised {type(error).__name__} on this request alone: {error}"[:500],
                retryable=True,
            )
            ended.append(self._fail(culprit, failure, OutcomeKind.RETRY))
        waiting = {id(flight) for flight in self._recovery.waiting}
        for flight in running:
            if id(flight) not in waiting:
                self._add(flight, ended)
        if ended:
            self.courier.deliver(ended)

    def _drain_down(self) -> None:
        """Steps 2 and 4 to 6 of the order in `drain`."""
        self.feeder.request_stop()
        log.info("draining (%s): %d jobs in flight", self._drain.reason, len(self._flights))
        self.courier.save(
            [(item.job, item.checkpoint) for item in self.progress() if item.checkpoint]
        )
        self._put_back([flight for flight in self._flights if flight.unbegun])
        self._put_back(self.feeder.stop(max(0.5, 2 * self._settings.claim_wait)))
        kill_points.reach("drain_begun")
        while len(self._flights) and not self._drain.stop_working:
            self._give_up_lost()
            self._expire()
            self._admit_suspects()
            if self._engine.has_unfinished:
                self._step()
        self._put_back(list(self._flights))
        self._put_back(self.feeder.stop(0.0))

    def _admit_suspects(self) -> None:
        ended: list[Outcome] = []
        for flight in self._recovery.next_group():
            self._add(flight, ended)
        if ended:
            self.courier.deliver(ended)

    def _put_back(self, flights: list[InFlight]) -> None:
        """Uncharged, to the front, with what there is of it."""
        if not flights:
            return
        released = [
            Released(flight.job, checkpoint.save(flight.sequences, self._serving.fingerprint))
            for flight in flights
        ]
        for flight in flights:
            try:
                self._give_up(flight)
            except Exception:
                log.exception("aborting failed", extra=flight.tags())
                self._flights.leave(flight)
        log.info("put %d jobs back", len(released))
        self.courier.put_back(released)
