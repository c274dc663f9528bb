"""What each technique is worth: the engine with it and without it, in turn, in one run.

Off is the engine's own switch where it has one, else another way to drive it: no KV cache is every
sequence added anew for each token, reserving the maximum length is blocks of that length, static
batching is waiting for a whole batch. Outputs are compared, so that nothing is won by doing less.
"""

import gc
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import click

from headrace.engine.engine import Engine
from headrace.engine.evaluate.process_memory import peak_memory
from headrace.worker.bench import attention_scaling, trial
from headrace.worker.bench.subject import Subject
from headrace.worker.bench.trial import Trial, config_for
from headrace.worker.bench.workloads import BenchRequest

REQUESTS = 32
STATIC_BATCH = 8
_NO_CACHE_REQUESTS, _NO_CACHE_TOKENS = 2, 16
_RESERVED = 2048
_FITTING = 8
_CHUNK = 256

TECHNIQUES = (
    *("KV cache", "continuous batching", "prefix cache", "waiting for a prefix in flight"),
    *("shared-prefix attention", "deterministic mode", "paged blocks", "chunked prefill"),
    "tiled attention",
)

Run = Callable[[Engine, Sequence[BenchRequest]], Trial]


@dataclass(frozen=True, slots=True)
class Ablation:
    """`on` and `off`: engine options, with how to drive it where that differs."""

    technique: str
    workload: str
    requests: Sequence[BenchRequest]
    on: Mapping[str, object] = field(default_factory=dict)
    off: Mapping[str, object] = field(default_factory=dict)
    run_on: Run = trial.run
    run_off: Run = trial.run
    most_repeats: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one technique. `gain` above 1: on is better. `equal`: of `requests`, outputs
    that are the same on and off (16-bit types may differ in a close argmax)."""

    technique: str
    workload: str
    measure: str
    on: float | None
    off: float | None
    gain: float | None
    equal: int
    requests: int
    note: str = ""


def ablations(subject: Subject, limit: int | None) -> list[Ablation]:
    """Those that run a workload: the first of the subject's, which by default shares a head."""
    name, requests = next(iter(subject.work.items()))
    requests = requests[: limit or REQUESTS]
    few = [
        BenchRequest(r.id, r.prompt_token_ids, min(r.max_tokens, _NO_CACHE_TOKENS))
        for r in requests[:_NO_CACHE_REQUESTS]
    ]
    plain = {"enable_prefix_caching": False}

    def static(engine: Engine, work: Sequence[BenchRequest]) -> Trial:
        return trial.run(engine, work, group=STATIC_BATCH)

    slots = {"max_num_seqs": STATIC_BATCH}
    return [
        Ablation(
            *("KV cache", name, few, plain, plain),
            run_off=trial.run_without_kv_cache,
            most_repeats=1,
            note="off: every token computes its whole context anew; answers of at most "
            f"{_NO_CACHE_TOKENS} tokens, once",
        ),
        Ablation(
            *("continuous batching", name, requests, slots, slots),
            run_off=static,
            note=f"off: batches of {STATIC_BATCH}, each waits for its longest answer",
        ),
        Ablation("prefix cache", name, requests, off=plain),
        Ablation(
            *("waiting for a prefix in flight", name, requests),
            off={"max_prefix_delay": 0},
            note="all requests arrive at once",
        ),
        Ablation(
            *("shared-prefix attention", name, requests),
            off={"enable_shared_prefix_attention": False},
        ),
        Ablation(
            *("deterministic mode", name, requests),
            on={"deterministic": True},
            off={"deterministic": False},
            note="on: an answer's bits do not depend on the batch; the gain is its price",
        ),
    ]


def run(
    subject: Subject,
    *,
    limit: int | None,
    repeats: int,
    lengths: Sequence[int] = attention_scaling.LENGTHS,
    only: Collection[str] = TECHNIQUES,
) -> dict[str, Any]:
    """All of it, or `only` some of TECHNIQUES, for the subject's first dtype: `rows` and
    `attention`, as in the JSON file."""
    dtype = subject.dtypes[0]
    rows: list[Row] = []
    for ablation in ablations(subject, limit):
        if ablation.technique not in only:
            continue
        click.echo(f"  {ablation.technique}", err=True)
        rows += _compare(subject, dtype, ablation, repeats)
    if "paged blocks" in only:
        click.echo("  paged blocks", err=True)
        rows += _paging(subject, dtype, limit)
    if "chunked prefill" in only:
        click.echo("  chunked prefill", err=True)
        rows += _chunking(subject, dtype, repeats)
    scaling = []
    if "tiled attention" in only:
        click.echo("  tiled attention", err=True)
        scaling = attention_scaling.measure(subject.path, subject.threads, lengths, repeats)
    return {
        "model": subject.model,
        "dtype": dtype,
        "threads": subject.threads,
        "repeats": repeats,
        "rows": [asdict(row) for row in rows],
        "attention": [asdict(found) for found in scaling],
    }


def _engine(subject: Subject, dtype: str, options: Mapping[str, object]) -> Engine:
    engine = Engine.load(
        config_for(subject.path, dtype, subject.threads, **{**subject.options, **options})
    )
    engine.runner.warm_up()  # type: ignore[attr-defined]
    return engine


def _compare(subject: Subject, dtype: str, ablation: Ablation, repeats: int) -> list[Row]:
    """Both engines loaded, run in turn; medians."""
    on = _engine(subject, dtype, ablation.on)
    off = on if ablation.on == ablation.off else _engine(subject, dtype, ablation.off)
    with_it, without = [], []
    for engine in (on, off):
        trial.run(engine, ablation.requests[:2])
    for _ in range(min(repeats, ablation.most_repeats or repeats)):
        with_it.append(ablation.run_on(on, ablation.requests))
        without.append(ablation.run_off(off, ablation.requests))
    equal = _equal(with_it[0], without[0])
    rows = [
        _row(ablation, "output tokens/s", _rate(with_it), _rate(without), equal, higher=True),
    ]
    if ablation.technique == "continuous batching":
        on_wait = _short_wait(ablation.requests, with_it)
        off_wait = _short_wait(ablation.requests, without)
        measure = "median wait of the short requests s"
        rows.append(_row(ablation, measure, on_wait, off_wait, equal))
    del on, off
    gc.collect()
    return rows


def _paging(subject: Subject, dtype: str, limit: int | None) -> list[Row]:
    """One pool of memory, cut into blocks of 16 tokens or into blocks of the maximum length."""
    name, requests = next(iter(subject.work.items()))
    requests = requests[: limit or REQUESTS]
    needed = max(len(r.prompt_token_ids) + r.max_tokens for r in requests)
    probe = _engine(subject, dtype, {"kv_cache_memory_bytes": 64 << 20})
    runner: Any = probe.runner
    per_token = runner.kv_cache_bytes // ((runner.num_blocks + 1) * runner.block_size)
    longest = max(-(-needed // 16) * 16, min(_RESERVED, probe.limits.max_model_len // 16 * 16))
    del probe, runner
    found = []
    for block in (16, longest):
        options = {
            "block_size": block,
            "max_model_len": longest,
            "kv_cache_memory_bytes": (_FITTING * longest + block) * per_token,
            "enable_prefix_caching": False,
        }
        engine = _engine(subject, dtype, options)
        trial.run(engine, requests[:2])
        found.append(trial.run(engine, requests))
        del engine
        gc.collect()
    paged, reserved = found
    equal = _equal(paged, reserved)
    pool = _FITTING * longest * per_token / 2**20
    about = Ablation(
        *("paged blocks", name, requests),
        note=f"off: {longest} tokens reserved for each; a pool of {pool:.0f} MiB, no prefix cache",
    )
    return [
        _row(
            *(about, "sequences that fit at once"),
            *(float(paged.peak_running), float(reserved.peak_running)),
            equal=equal,
            higher=True,
        ),
        _row(about, "output tokens/s", _rate([paged]), _rate([reserved]), equal, higher=True),
    ]


def _chunking(subject: Subject, dtype: str, repeats: int) -> list[Row]:
    """Short requests decode; one long prompt joins them. How long do they stand still?"""
    name, requests = next(iter(subject.work.items()))
    short = [BenchRequest(r.id, r.prompt_token_ids[-32:], 24) for r in requests[:8]]
    ids = [token for r in requests for token in r.prompt_token_ids]
    engines = []
    for budget in (_CHUNK, 1 << 20):
        options = {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
        engines.append(_engine(subject, dtype, options))
    room = engines[0].limits.max_model_len - 4
    long = BenchRequest(-1, ids[: min(_RESERVED, room)], 4)
    results: list[list[_Interrupted]] = [[], []]
    for _ in range(repeats):
        for engine, found in zip(engines, results, strict=True):
            found.append(_interrupt(engine, short, long))
    on, off = results
    equal = sum(a == b for a, b in zip(on[0].outputs, off[0].outputs, strict=True))
    about = Ablation(
        *("chunked prefill", name, [*short, long]),
        note=f"{len(long.prompt_token_ids)} tokens join 8 that decode; chunks of {_CHUNK}",
    )
    del engines
    gc.collect()

    def middle(runs: list[_Interrupted], name: str) -> float:
        values: list[float] = [getattr(found, name) for found in runs]
        return statistics.median(values)

    rows = [
        _row(about, "longest gap between tokens s", middle(on, "gap"), middle(off, "gap"), equal),
        _row(about, "seconds", middle(on, "seconds"), middle(off, "seconds"), equal),
    ]
    memory = [found[0].extra_bytes for found in results]
    if None not in memory:
        on_mib, off_mib = ((value or 0) / 2**20 for value in memory)
        rows.append(_row(about, "memory beside weights and KV MiB", on_mib, off_mib, equal))
    return rows


@dataclass(frozen=True, slots=True)
class _Interrupted:
    gap: float
    seconds: float
    outputs: list[list[int]]
    extra_bytes: int | None


def _interrupt(engine: Engine, short: Sequence[BenchRequest], long: BenchRequest) -> _Interrupted:
    salt = trial.new_salt()
    sequences = [trial.sequence(request, salt) for request in short]
    for seq in sequences:
        engine.add(seq)
    while any(len(seq.output_token_ids) < 4 for seq in sequences):
        engine.step()
    late = trial.sequence(long, salt)
    started = last = time.perf_counter()
    gap = 0.0
    with peak_memory() as peak:
        engine.add(late)
        while engine.has_unfinished:
            output = engine.step()
            now = time.perf_counter()
            if any(seq is not late for seq in (*output.progressed, *output.finished)):
                gap, last = max(gap, now - last), now
    outputs = [list(seq.output_token_ids) for seq in (*sequences, late)]
    return _Interrupted(gap, time.perf_counter() - started, outputs, peak.extra_bytes)


def _equal(a: Trial, b: Trial) -> int:
    return sum(x == y for x, y in zip(a.outputs, b.outputs, strict=True))


def _rate(trials: Sequence[Trial]) -> float:
    return statistics.median(found.output_tokens / found.seconds for found in trials)


def _short_wait(requests: Sequence[BenchRequest], trials: Sequence[Trial]) -> float:
    """Median seconds until the shortest quarter of the answers were there."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].max_tokens)
    quarter = order[: max(1, len(order) // 4)]
    return statistics.median(found.finished_s[index] for found in trials for index in quarter)


def _row(
    about: Ablation,
    measure: str,
    on: float,
    off: float,
    equal: int,
    *,
    higher: bool = False,
) -> Row:
    better, worse = (on, off) if higher else (off, on)
    gain = better / worse if worse else None
    requests = len(about.requests)
    name = about.technique
    return Row(name, about.workload, measure, on, off, gain, equal, requests, about.note)
