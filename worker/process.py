"""One worker process: its threads, its start and its end.

The main thread connects, watches signals and keeps the drain's deadline; it never computes, so it
always answers. The engine thread imports torch and loads the weights beside it, warms up, and then
serves until it is drained. The keeper renews leases, the feeder claims, the courier delivers, the
HTTP thread shows. Nothing is claimed before the engine has warmed up.
"""

import contextlib
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from headrace.engine.errors import CheckpointError, EngineError
from headrace.engine.faults import is_out_of_memory
from headrace.worker import tracing
from headrace.worker.coldstart import ColdStart
from headrace.worker.config import DEFAULT_PORT, WorkerConfig
from headrace.worker.deletion_cost import CannotPatch, DeletionCost, PodApi, cost_of
from headrace.worker.drain import PROFILES, Drain
from headrace.worker.feeder import Serving
from headrace.worker.http import HttpServer, check_route, metrics_route
from headrace.worker.keeper import Keeper
from headrace.worker.loop import ServingLoop
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.notice import NoticeWatch
from headrace.worker.parent import ParentWatch
from headrace.worker.pulse import Pulse
from headrace.worker.retrying import Connection
from headrace.worker.serving_engine import EngineBroken, ServingEngine
from headrace.worker.signals import SignalBox
from headrace.worker.source import ClaimedJob, SourceUnavailable, WorkerFacts, WorkerState
from headrace.worker.start import (
    EXIT_BROKEN,
    EXIT_DRAINED,
    EXIT_MODEL,
    EXIT_PORT,
    EXIT_SOURCE,
    Source,
    StartFailed,
    load_engine,
    open_redis,
    warm_up,
)

log = logging.getLogger(__name__)

URGENT_SECONDS = 2.0
"""How long after a second signal, or the parent's death, the engine thread may still take."""


class WorkerProcess:
    """`open_source` connects to the queue (raises StartFailed); `load_engine` loads the model.

    `run` returns the exit status; it must be called from the main thread.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        open_source: Callable[[WorkerConfig], Source] = open_redis,
        load_engine: Callable[[WorkerConfig, ColdStart], ServingEngine] = load_engine,
    ) -> None:
        self._config = config
        self._open_source = open_source
        self._load_engine = load_engine
        self._metrics = WorkerMetrics(config.served_model)
        self._cold_start = ColdStart(self._metrics)
        self._drain = Drain(config.grace)
        self._pulse = Pulse(config.hang_timeout)
        self._connection = Connection(self._metrics)
        self._state = WorkerState.LOADING
        self._source: Source | None = None
        self._source_for_engine: Future[Source] = Future()
        self._loop: ServingLoop | None = None
        self._keeper: Keeper | None = None
        self._failure: BaseException | None = None
        self._urgent_since: float | None = None
        self._noticed = False
        self._signals = SignalBox()
        self._tracing: tracing.Tracing = tracing.NoTracing()
        self._parent = ParentWatch() if config.exit_with_parent else None
        self._engine_thread = threading.Thread(target=self._engine_main, name="engine", daemon=True)

    def run(self) -> int:
        self._metrics.set_state(self._state.value)
        self._engine_thread.start()
        # Beside the engine's imports, and before it may serve.
        self._tracing = self._choose_tracing()
        try:
            server = self._start_http()
            self._start_source()
        except StartFailed as error:
            log.error("%s", error)
            self._leave_now(error.status)
        notice = self._watch_notice()
        self._keep_deletion_cost()
        while self._engine_thread.is_alive():
            self._supervise(self._signals.wait(0.2))
        if notice is not None:
            notice.stop()
        status = self._wind_up()
        server.stop()
        return status

    # --- the main thread --------------------------------------------------------------------

    def _choose_tracing(self) -> tracing.Tracing:
        name = self._config.name or f"{socket.gethostname()}-{os.getpid()}"
        return tracing.from_environment(os.environ, self._config.served_model, name)

    def _start_source(self) -> None:
        began = time.perf_counter()
        source = self._open_source(self._config)
        self._cold_start.record("connect", time.perf_counter() - began)
        self._source = source
        source.on_lost = self._lose
        self._keeper = Keeper(
            source,
            source,
            self._metrics,
            self._connection,
            self._pulse,
            facts=self._facts,
            on_lost=self._lose,
            heartbeat_seconds=min(5.0, self._config.lease_seconds / 4),
            reap_seconds=min(7.0, self._config.lease_seconds / 4),
            outage_grace=max(5.0, self._config.lease_seconds / 2),
        )
        self._keeper.start()
        self._source_for_engine.set_result(source)

    def _start_http(self) -> HttpServer:
        config = self._config
        routes = {
            "/metrics": metrics_route(self._metrics.registry),
            "/healthz": check_route(self._sick),
            "/readyz": check_route(self._unready),
        }
        ports = (DEFAULT_PORT, 0) if config.port is None else (config.port,)
        for port in ports:
            try:
                server = HttpServer(config.host, port, routes)
                break
            except (OSError, ValueError) as error:
                if port == ports[-1]:
                    raise StartFailed(
                        EXIT_PORT,
                        f"cannot listen on {config.host}:{port}: {error};"
                        " choose another --port or --host",
                    ) from error
        server.start()
        log.info("metrics and health on http://%s:%d", *server.address)
        return server

    def _watch_notice(self) -> NoticeWatch | None:
        if self._config.spot_notice is None:
            return None

        def noticed() -> None:
            self._noticed = True
            self._signals.wake()

        watch = NoticeWatch(self._config.spot_notice, noticed)
        watch.start()
        return watch

    def _keep_deletion_cost(self) -> None:
        if not self._config.deletion_cost:
            return
        try:
            api = PodApi.from_environment()
        except CannotPatch as error:
            log.warning("--deletion-cost %s", error)
            return
        DeletionCost(api, lambda: cost_of(self._state, self._facts().running)).start()

    def _supervise(self, signals: list[str]) -> None:
        for name in signals:
            self._begin_drain(name)
        if self._noticed:
            self._noticed = False
            if not self._drain.requested:
                self._begin_drain("spot notice", PROFILES["spot"])
        if self._parent is not None and self._parent.gone and not self._drain.urgent:
            self._begin_drain("parent gone", URGENT_SECONDS)
            self._drain.hurry()
        if not self._drain.requested:
            return
        now = time.monotonic()
        if self._drain.urgent and self._urgent_since is None:
            self._urgent_since = now
        overdue = self._urgent_since is not None and now > self._urgent_since + URGENT_SECONDS
        if overdue or now > self._drain.deadline:
            self._put_back_without_engine()

    def _begin_drain(self, reason: str, timeout: float | None = None) -> None:
        self._drain.request(reason, timeout)
        if self._state is WorkerState.DRAINING:
            log.warning("%s again: putting everything back now", reason)
            return
        loading = self._state is WorkerState.LOADING
        self._set_state(WorkerState.DRAINING)
        if loading and self._loop is None:
            log.info("%s while loading: nothing was claimed, leaving", reason)
            self._unregister()
            self._leave_now(EXIT_DRAINED)
        log.info("%s: draining, %.0f s at most", reason, self._drain.timeout)
        if self._loop is not None:
            self._loop.feeder.request_stop()

    def _put_back_without_engine(self) -> None:
        """The engine's step, or a queue that is away, outlasts the deadline: do the rest from here,
        and go."""
        status = EXIT_DRAINED
        if self._loop is not None and self._source is not None:
            try:
                status = self._put_back(self._loop, self._source)
                self._tracing.stop(1.0)
            except Exception:
                log.exception("putting back failed; the leases will lapse")
                status = EXIT_BROKEN
        self._unregister()
        self._leave_now(status)

    def _put_back(self, loop: ServingLoop, source: Source) -> int:
        """What the engine thread still holds, then what the courier does; the exit status."""
        status = EXIT_DRAINED
        if released := loop.progress():
            log.warning("a step outlasts the drain: putting %d jobs back from here", len(released))
            try:
                source.release(released)
            except SourceUnavailable as error:
                log.error("%d jobs not put back, the leases will lapse: %s", len(released), error)
                status = EXIT_SOURCE
        return self._flush(loop, 1.0) or status

    def _flush(self, loop: ServingLoop, patience: float) -> int:
        """The exit status when the courier has ended: EXIT_SOURCE if something was left."""
        left = loop.courier.stop(patience)
        if not left:
            return EXIT_DRAINED
        log.error("the queue did not take %d results or jobs put back; others redo them", left)
        return EXIT_SOURCE

    def _wind_up(self) -> int:
        """After the engine thread: steps 7 and 8 of the drain, or the report of what broke."""
        status = EXIT_DRAINED
        if self._failure is not None:
            status = self._report(self._failure)
        if self._loop is not None:
            patience = 10.0
            if self._drain.requested:
                patience = max(1.0, self._drain.deadline - time.monotonic())
            flushed = self._flush(self._loop, patience)
            status = status or flushed
        self._tracing.stop(2.0)
        if self._keeper is not None:
            self._keeper.stop()
        self._unregister()
        if status == EXIT_DRAINED:
            log.info("drained")
        return status

    def _report(self, failure: BaseException) -> int:
        if isinstance(failure, CheckpointError):
            log.error("the model cannot be used: %s", failure)
            return EXIT_MODEL
        if isinstance(failure, EngineError):
            log.error("the engine cannot be set up: %s", failure)
            return EXIT_MODEL
        if isinstance(failure, EngineBroken):
            log.error("the engine is broken: %s", failure, exc_info=failure)
            return EXIT_BROKEN
        if self._loop is None and is_out_of_memory(failure):
            log.error(
                "memory is too short to load the model (%s); give a smaller --kv-cache-memory,"
                " --max-num-seqs or --max-num-batched-tokens, or a machine with more",
                failure,
            )
            return EXIT_MODEL
        log.error("the worker failed", exc_info=failure)
        return EXIT_BROKEN

    def _unregister(self) -> None:
        if self._source is not None:
            with contextlib.suppress(SourceUnavailable, Exception):
                self._source.unregister()

    def _leave_now(self, status: int) -> None:
        """Without waiting for a thread that loads or computes and can't be stopped."""
        logging.shutdown()
        os._exit(status)

    def _lose(self, jobs: list[ClaimedJob]) -> None:
        if self._loop is not None:
            self._loop.lose(jobs)

    # --- what it says of itself -------------------------------------------------------------

    def _set_state(self, state: WorkerState) -> None:
        self._state = state
        self._metrics.set_state(state.value)
        if self._keeper is not None:
            self._keeper.announce_now()

    def _facts(self) -> WorkerFacts:
        loop = self._loop
        return WorkerFacts(
            model=self._config.served_model,
            state=self._state,
            queues=self._config.served_queues,
            slots=self._config.engine.max_num_seqs,
            running=loop.num_running if loop is not None else 0,
            prefill_tokens_per_second=loop.rates.prefill if loop is not None else 0.0,
            decode_tokens_per_second=loop.rates.decode if loop is not None else 0.0,
            cold_start_seconds=self._cold_start.phases.get("total", 0.0),
            started_at=self._cold_start.started_at,
        )

    def _sick(self) -> str | None:
        stalled = self._pulse.stalled()
        if stalled is not None:
            return f"{stalled} hangs for more than {self._config.hang_timeout:g} s"
        return None if self._engine_thread.is_alive() else "the engine thread has ended"

    def _unready(self) -> str | None:
        return None if self._state is WorkerState.READY else self._state.value

    # --- the engine thread ------------------------------------------------------------------

    def _engine_main(self) -> None:
        try:
            # Imports and weights make hundreds of thousands of objects and no garbage: looking for
            # some would take 0.2 s now, and looking at them again would delay steps later.
            gc.disable()
            engine = self._load_engine(self._config, self._cold_start)
            with self._cold_start.phase("warm_up"):
                warm_up(engine)
            gc.freeze()
            gc.enable()
            self._serve(engine, self._source_for_engine.result())
        except BaseException as error:
            self._failure = error
        finally:
            self._signals.wake()

    def _serve(self, engine: ServingEngine, source: Source) -> None:
        config = self._config
        ready_at = time.monotonic()

        def first_token() -> None:
            self._cold_start.record("first_token", time.monotonic() - ready_at)
            log.info(
                "first token %.2f s after readiness, %.2f s after the start of the process",
                self._cold_start.phases["first_token"],
                self._cold_start.since_start(),
            )

        fingerprint = str(getattr(engine, "fingerprint", ""))
        runner = getattr(engine, "runner", None)
        self._metrics.slots.set(engine.limits.max_num_seqs)
        self._metrics.model_info.labels(
            config.served_model,
            str(getattr(runner, "dtype", config.engine.dtype)),
            config.engine.quantization or "none",
            fingerprint,
        ).set(1)
        phases = self._cold_start.phases
        self._metrics.model_load.set(phases.get("load", 0.0) + phases.get("quantize", 0.0))
        self._loop = ServingLoop(
            engine,
            source,
            source,
            Serving(
                config.served_model,
                frozenset({config.served_model, config.engine.model}),
                fingerprint,
                str(getattr(engine, "digest", "")),
            ),
            self._metrics,
            self._drain,
            pulse=self._pulse,
            connection=self._connection,
            settings=config.loop,
            on_first_token=first_token,
            tracing=self._tracing,
        )
        self._cold_start.record("total", self._cold_start.since_start())
        if not self._drain.requested:
            self._set_state(WorkerState.READY)
        log.info(
            "ready: %s on queues %s; cold start by phase: %s",
            config.served_model,
            ", ".join(config.served_queues),
            self._cold_start,
        )
        self._loop.run()
