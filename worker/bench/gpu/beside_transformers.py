"""Transformers' continuous batching and our engine on the same shape and requests, in one run."""

import time
from typing import Any

from headrace.worker.bench.gpu.device import Device
from headrace.worker.bench.gpu.engines import about, complete, make_engine, small_work
from headrace.worker.bench.gpu.record import Record
from headrace.worker.bench.gpu.shapes import Work

CAP = 60.0
"""Seconds after which Transformers is stopped; what it has finished by then counts."""


def run(where: Device, record: Record) -> None:
    values, work = small_work(where, 64)
    engine = make_engine(where, values, work, slots=64)
    record.note(**about(engine))
    ours = work.output_tokens / complete(engine, work, "measured")
    record.add("headrace", ours, "output tokens/s")
    del engine
    where.released()
    tokens, seconds = _transformers(where, values, work)
    if not tokens:
        raise RuntimeError(f"Transformers finished no request in {seconds:.0f} s")
    theirs = tokens / seconds
    record.add(
        "Transformers, continuous batching",
        theirs,
        "output tokens/s",
        seconds=seconds,
        finished_tokens=tokens,
        all_tokens=work.output_tokens,
    )
    record.add("headrace against Transformers", ours / theirs, "times", at_least=1.5)


def _transformers(where: Device, values: dict[str, Any], work: Work) -> tuple[int, float]:
    """Output tokens of the requests that ended, and the seconds until the last of them did."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**{k: v for k, v in values.items() if k != "dtype"})
    with torch.device(where.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=where.dtype, attn_implementation="sdpa"
        )
    model.eval()
    model.generation_config.eos_token_id = None
    lengths = [len(p) + m for p, m in zip(work.prompts, work.max_tokens, strict=True)]
    manager = model.init_continuous_batching(
        transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        transformers.ContinuousBatchingConfig(
            page_size=16,
            num_blocks=sum(-(-length // 16) + 1 for length in lengths),
            max_batch_tokens=256 if where.tiny else 8192,
        ),
    )
    manager.start()
    try:
        # The first request pays for what is loaded or compiled on first use.
        _add(manager, "warm-up", work.prompts[0], 2)
        _next(manager, time.perf_counter() + CAP)
        started = time.perf_counter()
        for index, (prompt, most) in enumerate(zip(work.prompts, work.max_tokens, strict=True)):
            _add(manager, str(index), prompt, most)
        tokens, finished, ended = 0, 0, started
        while finished < len(work.prompts):
            found = _next(manager, started + CAP)
            if found is None:
                break
            tokens, finished, ended = tokens + found, finished + 1, time.perf_counter()
        # A cut run is charged for all of its time.
        if finished < len(work.prompts):
            ended = time.perf_counter()
        return tokens, ended - started
    finally:
        manager.stop(block=True, timeout=10)


def _add(manager: Any, name: str, prompt: list[int], most: int) -> None:
    manager.add_request(list(prompt), request_id=name, max_new_tokens=most, eos_token_id=-1)


def _next(manager: Any, deadline: float) -> int | None:
    """Tokens of the next request that ends; None when `deadline` passes first."""
    while time.perf_counter() < deadline:
        result = manager.get_result(timeout=1.0)
        if result is not None:
            if result.error:
                raise RuntimeError(str(result.error))
            return len(result.generated_tokens)
        if not manager.is_running():
            raise RuntimeError("Transformers' generation thread has ended")
    return None
