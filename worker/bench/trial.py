"""One run of requests through an engine in this process, and what every step of it did.

The building block of ablations, the profile and the planner's measurement. Knows no queue.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence as EngineSequence
from headrace.engine.stats import StepStats
from headrace.worker.bench.side_by_side import FLOATS
from headrace.worker.bench.workloads import BenchRequest

_salts = itertools.count(1)


@dataclass(slots=True)
class Trial:
    """`finished_s`: when each request had its answer, seconds from the start, in request order."""

    seconds: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def peak_running(self) -> int:
        return max((step.num_running for step in self.steps), default=0)


def config_for(model: Path, dtype: str, threads: int, **options: object) -> EngineConfig:
    """Settings of the benchmark: 64 sequences, no deduplication, then `options`."""
    float_dtype, quantization = (dtype, None) if dtype in FLOATS else ("auto", dtype)
    settings: dict[str, object] = {
        "dtype": float_dtype,
        "quantization": quantization,
        "num_threads": threads,
        "max_num_seqs": 64,
        "deduplicate": False,
        **options,
    }
    return EngineConfig(str(model), **settings)  # type: ignore[arg-type]


def new_salt() -> bytes:
    """With it the prefix cache finds nothing of an earlier trial."""
    return f"trial-{next(_salts)}".encode()


def sequence(
    request: BenchRequest, salt: bytes, sampling: Mapping[str, object] | None = None
) -> EngineSequence:
    """Of a fixed length, so that every variant does the same work; greedy without `sampling`."""
    chosen: dict[str, object] = {"temperature": 0.0, "seed": request.id, **(sampling or {})}
    length = request.max_tokens
    return EngineSequence(
        request_id=str(request.id),
        prompt_token_ids=request.prompt_token_ids,
        params=SamplingParams(max_tokens=length, ignore_eos=True, **chosen),  # type: ignore[arg-type]
        salt=salt,
    )


def run(engine: Engine, requests: Sequence[BenchRequest], *, group: int | None = None) -> Trial:
    """All requests at once; with `group` so many, and the next when the last of them is done
    (static batches: an answer is given out when its whole batch has ended)."""
    trial, salt = Trial(), new_salt()
    started = time.perf_counter()
    for first in range(0, len(requests), group or len(requests)):
        some = requests[first : first + (group or len(requests))]
        sequences = [sequence(request, salt) for request in some]
        ended: dict[int, float] = {}
        for seq in sequences:
            engine.add(seq)
        while engine.has_unfinished:
            output = engine.step()
            trial.steps.append(output.stats)
            now = time.perf_counter() - started
            ended.update((seq.seq_id, now) for seq in output.finished)
        for seq in sequences:
            if seq.failure is not None:
                raise RuntimeError(f"request {seq.request_id} failed: {seq.failure.message}")
        now = time.perf_counter() - started
        trial.outputs += [list(seq.output_token_ids) for seq in sequences]
        trial.finished_s += [now if group else ended[seq.seq_id] for seq in sequences]
    trial.seconds = time.perf_counter() - started
    return trial


def run_without_kv_cache(engine: Engine, requests: Sequence[BenchRequest]) -> Trial:
    """Every token computes its whole context anew: each sequence is added again, with what it has
    written so far, for one token more. The engine must have no prefix cache."""
    trial = Trial(outputs=[[] for _ in requests], finished_s=[0.0] * len(requests))
    started = time.perf_counter()
    for length in range(1, max(r.max_tokens for r in requests) + 1):
        wave = []
        for index, request in enumerate(requests):
            if request.max_tokens < length:
                continue
            seq = sequence(BenchRequest(request.id, request.prompt_token_ids, length), new_salt())
            seq.output_token_ids = list(trial.outputs[index])
            engine.add(seq)
            wave.append((index, seq))
        while engine.has_unfinished:
            trial.steps.append(engine.step().stats)
        for index, seq in wave:
            trial.outputs[index] = list(seq.output_token_ids)
            trial.finished_s[index] = time.perf_counter() - started
    trial.seconds = time.perf_counter() - started
    return trial
