"""Measures a few steps of known size and keeps them for `headrace plan` on this machine."""

import statistics
import time
from pathlib import Path

from headrace.engine.engine import Engine
from headrace.engine.planner.calibration import Point, default_path, write_measurement
from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.schemes import parse_scheme
from headrace.worker.bench import trial
from headrace.worker.bench.workloads import BenchRequest

BATCHES = (1, 8, 32)
CONTEXT = 128
PREFILL = 512
_STEPS = 8
_SCHEMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def scheme_of(dtype: str) -> str | None:
    """The planner's name for a dtype or quantization of ours; None when it knows none."""
    name = _SCHEMES.get(dtype, dtype)
    try:
        parse_scheme(name)
    except PlanError:
        return None
    return name


def measure(engine: Engine, model: str, scheme: str) -> list[Point]:
    """Decode steps at several batch sizes and prefill steps of one prompt: medians."""
    room = engine.limits.max_model_len - _STEPS - 2
    context, prefill = min(CONTEXT, room), min(PREFILL, room)
    points = []
    for batch in BATCHES:
        if batch <= engine.limits.max_num_seqs:
            seconds = decode_seconds(engine, batch, context)
            points.append(Point("decode", model, scheme, seconds, batch=batch, context=context))
    for tokens in sorted({min(64, prefill), prefill}):
        seconds = statistics.median(_prefill(engine, tokens) for _ in range(3))
        points.append(Point("prefill", model, scheme, seconds, tokens=tokens))
    return points


def keep(points: list[Point], path: Path | None = None) -> Path:
    """Write them where `headrace plan` looks."""
    path = path or default_path()
    write_measurement(path, "cpu", points)
    return path


def _request(index: int, length: int, max_tokens: int) -> BenchRequest:
    """A prompt that shares no block with another's."""
    return BenchRequest(index, [33 + (7 * index + i * i) % 89 for i in range(length)], max_tokens)


def decode_seconds(engine: Engine, batch: int, context: int) -> float:
    """Seconds of a step in which `batch` sequences decode, none else."""
    salt = trial.new_salt()
    for index in range(batch):
        engine.add(trial.sequence(_request(index, context, _STEPS), salt))
    times = []
    while engine.has_unfinished:
        started = time.perf_counter()
        stats = engine.step().stats
        if stats.num_output_tokens == stats.num_scheduled_tokens == batch:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _prefill(engine: Engine, tokens: int) -> float:
    """Seconds in which one prompt of `tokens` is computed."""
    engine.add(trial.sequence(_request(0, tokens, 1), trial.new_salt()))
    started = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - started
