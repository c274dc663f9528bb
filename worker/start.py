"""What a worker starts with: its queue, its engine, and the first steps of it.

Each either comes up or says clearly, before anything is claimed, why not. Torch is imported here
and only when the engine is loaded.
"""

import contextlib
import importlib
import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import redis

from headrace.engine.errors import EngineError
from headrace.engine.loading.source import read_ahead, resolve_model
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import FinishReason, Sequence
from headrace.producer import connection, keys, redis_info
from headrace.producer.errors import HeadraceError
from headrace.worker.coldstart import ColdStart
from headrace.worker.config import WorkerConfig
from headrace.worker.serving_engine import EngineBroken, ServingEngine
from headrace.worker.source import ClaimedJob, JobSource, SourceUnavailable, WorkerRegistry

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

EXIT_DRAINED, EXIT_BROKEN, EXIT_MODEL, EXIT_SOURCE, EXIT_PORT = 0, 1, 3, 4, 5


class StartFailed(Exception):
    """The worker cannot start. `status` is the exit status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Source(JobSource, WorkerRegistry, Protocol):
    """A queue that is also the registry of its workers, and tells of cancelled jobs at once."""

    on_lost: Callable[[list[ClaimedJob]], None] | None


def open_redis(config: WorkerConfig) -> Source:
    """Connect, look at the server, enter RQ's books. Raises StartFailed with what to do."""
    # RQ's classes are heavy; here they load beside torch instead of before it.
    from headrace.worker.lease import RedisSource
    from headrace.worker.lease_settings import LeaseSettings

    _check_names(config)
    where = connection.redacted(config.redis_url)
    settings = LeaseSettings(
        lease=config.lease_seconds,
        max_attempts=config.max_attempts,
        max_crashes=config.max_crashes,
    )
    try:
        client = connection.connect(config.redis_url)
        facts = _answer(lambda: redis_info.inspect_server(client, prefix=keys.PREFIX), config)
        source = RedisSource.from_url(
            config.redis_url, config.served_queues, name=config.name, settings=settings
        )
        if facts.usable:
            _answer(source.start, config)
    except (HeadraceError, redis.exceptions.RedisError, SourceUnavailable, OSError) as error:
        raise StartFailed(
            EXIT_SOURCE,
            f"cannot use Redis at {where}: {error}. Start it, or give another --redis-url",
        ) from error
    if not facts.usable:
        problems = "; ".join(facts.problems)
        raise StartFailed(EXIT_SOURCE, f"cannot use Redis at {where}: {problems}")
    for warning in facts.warnings:
        log.warning("Redis at %s: %s", where, warning)
    with contextlib.suppress(redis.exceptions.RedisError):
        client.close()
    return source


def _check_names(config: WorkerConfig) -> None:
    """What becomes part of Redis' keys; a wrong name is none of Redis' faults."""
    try:
        for queue in config.served_queues:
            keys.check_queue(queue)
    except HeadraceError as error:
        message = f"{error}; choose one with --queue or --served-model-name"
        raise StartFailed(EXIT_SOURCE, message) from None
    if config.name and not _NAME.fullmatch(config.name):
        raise StartFailed(
            EXIT_SOURCE, f"--name {config.name!r:.80} must be 1 to 128 of A-Z a-z 0-9 _ . -"
        )


def _answer(call: Callable[[], Any], config: WorkerConfig) -> Any:
    """`call()`, tried for `connect_timeout` seconds while nothing answers."""
    end = time.monotonic() + config.connect_timeout
    while True:
        try:
            return call()
        except (redis.exceptions.RedisError, SourceUnavailable, OSError) as error:
            transient = isinstance(error, SourceUnavailable | OSError) or connection.is_transient(
                error
            )
            if not transient or time.monotonic() >= end:
                raise
            time.sleep(0.25)


def load_engine(config: WorkerConfig, cold_start: ColdStart) -> ServingEngine:
    """Import, fetch, load: our own engine. Raises CheckpointError or EngineError.

    The model is fetched, and the system asked to read it ahead, while torch is imported and the
    kernels are brought from the cache or, on a new node, compiled.
    """
    with ThreadPoolExecutor(1, "download") as beside:
        fetched = beside.submit(_fetch, config.engine.model, cold_start)
        _import_engine(cold_start)
        with cold_start.phase("compile"):
            _load_kernels(config)
        fetched.result()
    from headrace.engine.engine import Engine

    began = time.perf_counter()
    engine = Engine.load(config.engine)
    runner: Any = engine.runner
    seconds, quantize = time.perf_counter() - began, runner.load_seconds.quantize
    cold_start.record("load", seconds - quantize)
    cold_start.record("quantize", quantize)
    return engine


def _fetch(model: str, cold_start: ColdStart) -> None:
    with cold_start.phase("download"):
        read_ahead(resolve_model(model))


def _import_engine(cold_start: ColdStart) -> None:
    """What Engine.load would import, so that its time is told apart from the weights'."""
    try:
        for module in ("engine", "runner", "tokenizer"):
            importlib.import_module(f"headrace.engine.{module}")
    except ModuleNotFoundError as error:
        raise EngineError(
            f"the engine needs the package {error.name}: pip install 'headrace[worker]'"
        ) from error
    cold_start.record("import", cold_start.since_start())


def _load_kernels(config: WorkerConfig) -> None:
    """The CPU's, of which choosing a backend would find them missing later and say so; the GPU's
    depend on the model and come with the warm-up."""
    from headrace.engine.machine import choose_device

    if "HEADRACE_BACKEND" in os.environ or choose_device(config.engine.device).type != "cpu":
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("headrace.engine.layers.cpu_backend")


def warm_up(engine: Any) -> None:
    """Run every kind of step once (prefill, decode, greedy and drawn samples), so that what is
    compiled or allocated on first use is there before the first claim. Raises EngineBroken.

    Two prompts of 8: more rows than kernels for a few rows take, and a step of each kind.
    """
    length = max(1, min(8, engine.limits.max_model_len - 3))
    kinds = (
        SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, seed=0, ignore_eos=True),
    )
    sequences = [
        Sequence(f"warm-up-{index}", [0] * length, params, salt=b"warm-up")
        for index, params in enumerate(kinds)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_unfinished:
        engine.step()
    for sequence in sequences:
        if sequence.finish_reason is FinishReason.FAILED:
            reason = sequence.failure.message if sequence.failure else "no reason given"
            raise EngineBroken(f"the warm-up failed: {reason}")
