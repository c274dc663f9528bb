"""The engine alone, on random weights: whole jobs, from the first request to the last token."""

import time
from typing import Any

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.loading.random_weights import random_checkpoint
from headrace.engine.runner import build_runner
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence
from headrace.worker.bench.gpu import shapes
from headrace.worker.bench.gpu.device import Device
from headrace.worker.bench.gpu.record import Record
from headrace.worker.bench.gpu.shapes import Work


class IdTokenizer:
    """Token ids and nothing else: a random model writes no text."""

    special_token_ids: dict[str, int] = {}  # noqa: RUF012 (the engine's protocol has an attribute)

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def text_bytes(self, token_id: int) -> bytes:
        return b"x"

    def token_bytes(self, token_id: int) -> bytes | None:
        return b"x"

    def token_text(self, token_id: int) -> str:
        return "x"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError("the benchmark's prompts are token ids")

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        raise NotImplementedError("the benchmark's prompts are token ids")


def make_engine(
    where: Device, values: dict[str, Any], work: Work, *, slots: int, **settings: Any
) -> Engine:
    """An engine for the work, warmed up: on a GPU everything is compiled and captured."""
    options: dict[str, Any] = {
        "device": where.device.type,
        "dtype": where.dtype_name,
        "max_num_seqs": slots,
        "max_num_batched_tokens": 256 if where.tiny else 8192,
        "max_model_len": min(-(-(work.longest + 16) // 16) * 16, values["max_position_embeddings"]),
        "deduplicate": False,
        **settings,
    }
    if where.tiny:
        options |= {"kv_cache_memory_bytes": 8 << 20, "num_threads": 1}
    config = EngineConfig(f"random-{values['model_type']}", **options)
    runner = build_runner(config, random_checkpoint(values, where.device))
    engine = Engine.of(config, runner, IdTokenizer(values["vocab_size"]))
    runner.warm_up()
    complete(engine, work.head(slots, 4), "warm-up")
    return engine


def complete(engine: Engine, work: Work, salt: str) -> float:
    """Seconds for all of it. `salt`: the prefix cache finds nothing of another one's work."""
    sequences = [
        Sequence(
            request_id=str(index),
            prompt_token_ids=list(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True),
            salt=salt.encode(),
        )
        for index, (prompt, most) in enumerate(zip(work.prompts, work.max_tokens, strict=True))
    ]
    started = time.perf_counter()
    for seq in sequences:
        engine.add(seq)
    while engine.has_unfinished:
        engine.step()
    seconds = time.perf_counter() - started
    for seq, most in zip(sequences, work.max_tokens, strict=True):
        if seq.failure is not None:
            raise RuntimeError(f"request {seq.request_id} failed: {seq.failure.message}")
        if len(seq.output_token_ids) != most:
            raise RuntimeError(f"request {seq.request_id}: {len(seq.output_token_ids)} tokens")
    return seconds


def about(engine: Engine) -> dict[str, object]:
    """What it ran with, as it says itself."""
    return {"engine": engine.info, "kv_blocks": engine.limits.num_blocks}


def large(where: Device, record: Record, *, deterministic: bool = False) -> None:
    """256 requests of 1024 in and 1024 out on the shape of Qwen3-8B. Published by SGLang, on one
    H200: Triton 36.91 s, FlashAttention-3 34.70 s, FlashInfer 30.85 s; deterministic 57.25, 44.14
    and 43.99 s. The roofline is 21.7 s."""
    values = shapes.tiny("float32") if where.tiny else shapes.qwen3_8b(where.dtype_name)
    count, length = (4, 24) if where.tiny else (256, 1024)
    work = shapes.fixed(count, length, length, values["vocab_size"])
    settings = {"deterministic": True} if deterministic else {}
    engine = make_engine(where, values, work, slots=count, **settings)
    record.note(**about(engine))
    seconds = complete(engine, work, "measured")
    name = "deterministic" if deterministic else "as usual"
    record.add(
        f"{count} x ({length} in, {length} out), {name}",
        seconds,
        "s",
        at_most=50.0 if deterministic else 40.0,
        output_tokens_per_s=work.output_tokens / seconds,
    )


def large_deterministic(where: Device, record: Record) -> None:
    large(where, record, deterministic=True)


def small_work(where: Device, count: int) -> tuple[dict[str, Any], Work]:
    """The shape of Qwen3-0.6B and lengths uniform from 100 to 1024."""
    if where.tiny:
        values = shapes.tiny("float32")
        return values, shapes.mixed(min(count, 6), 8, 24, values["vocab_size"])
    values = shapes.qwen3_06b(where.dtype_name)
    return values, shapes.mixed(count, 100, 1024, values["vocab_size"])


def small(where: Device, record: Record) -> None:
    """256 sequences on the shape of Qwen3-0.6B. Published on an A800: vLLM 8.6k tokens/s, nano-vllm
    with Triton 10.0k."""
    values, work = small_work(where, 256)
    engine = make_engine(where, values, work, slots=256)
    record.note(**about(engine))
    for turn in range(2):
        seconds = complete(engine, work, f"turn-{turn}")
        record.add(
            f"{len(work.prompts)} sequences, run {turn + 1}",
            work.output_tokens / seconds,
            "output tokens/s",
            at_least=20000.0,
            seconds=seconds,
        )


def prefix(where: Device, record: Record) -> None:
    """One prefix shared by all requests: with shared-prefix attention against the prefix cache
    alone, which saves the prefill but reads the prefix's keys once for each sequence and step."""
    if where.tiny:
        values = shapes.tiny("float32")
        work = shapes.shared(4, 64, 8, 12, values["vocab_size"])
    else:
        values = shapes.qwen3_06b(where.dtype_name)
        work = shapes.shared(256, 2048, 32, 128, values["vocab_size"])
    seconds: dict[bool, float] = {}
    for on in (False, True):
        engine = make_engine(
            where, values, work, slots=len(work.prompts), enable_shared_prefix_attention=on
        )
        record.note(**about(engine))
        seconds[on] = complete(engine, work, "measured")
        name = "shared-prefix attention" if on else "prefix cache alone"
        record.add(name, seconds[on], "s", output_tokens_per_s=work.output_tokens / seconds[on])
        del engine
        where.released()
    record.add(
        "shared-prefix attention against the prefix cache alone",
        seconds[False] / seconds[True],
        "times",
        at_least=2.0,
    )
