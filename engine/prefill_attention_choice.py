"""Which prompts are attended by torch's own kernels instead of ours: chosen, or measured at start.

Two kinds are timed on the device, on the empty pool: prompts from their first token on, and chunks
with three times as many tokens in the cache before them; each with as many rows as a step's token
budget holds, since ours takes all rows in one launch and torch's one after the other. Knows how to
time two ways, nothing of the engine's steps.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.engine.accelerator import Accelerator
from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.kv.cache import KVCache
from headrace.engine.layers.prompt_attention import MOST_KEYS, NEVER, PromptLengths, divide
from headrace.engine.layers.triton_backend import TritonBackend, TritonPlan
from headrace.engine.models.config import ModelConfig
from headrace.engine.shared_prefix_crossover import crossover

logger = logging.getLogger(__name__)

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
_CONTEXT = 3  # cached tokens before a chunk, in chunks
_OURS, _TORCHS = PromptLengths(), PromptLengths(fresh=2, behind=2)


def prompt_lengths(
    accelerator: Accelerator,
    backend: TritonBackend,
    model: ModelConfig,
    cache: KVCache,
    config: EngineConfig,
    max_model_len: int,
) -> PromptLengths:
    """What `prefill_attention` says. auto: measured on a CUDA device where torch has flash
    attention for the backend's dtype, else ours.

    Raises EngineError where torch's is asked for and cannot be had.
    """
    refused = refusal(model, config)
    if config.prefill_attention == "sdpa":
        if refused is not None:
            raise EngineError(f"prefill_attention sdpa does not go with {refused}; use auto")
        return _TORCHS
    ours = config.prefill_attention == "triton" or refused is not None
    if ours or not has_flash(accelerator, backend):
        return _OURS
    return measured(accelerator, backend, model, cache, config, max_model_len)


def has_flash(accelerator: Accelerator, backend: TritonBackend) -> bool:
    """Whether torch's flash attention runs there. Without it the scores of a chunk would be
    written out: gigabytes that no step has set aside."""
    device = accelerator.device
    return (
        device.type == "cuda"
        and backend.dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def refusal(model: ModelConfig, config: EngineConfig) -> str | None:
    """Why prompts are never torch's, however long; None when they may be."""
    if config.deterministic:
        return "deterministic=True, whose results must not depend on the length of a chunk"
    if any(window is not None for window in model.sliding_windows):
        return "a model that has sliding windows"
    return None


def measured(
    accelerator: Accelerator,
    backend: TritonBackend,
    model: ModelConfig,
    cache: KVCache,
    config: EngineConfig,
    max_model_len: int,
) -> PromptLengths:
    """Times one layer's attention, ours and torch's, at every length that a step may have."""

    def found(context: int) -> int:
        keys = (1 + context) * np.array(LENGTHS)
        longest = min(max_model_len, MOST_KEYS)
        lengths = [
            length
            for length, most in zip(LENGTHS, keys.tolist(), strict=True)
            if length <= config.max_num_batched_tokens and most <= longest
        ]

        def seconds(lengths: PromptLengths) -> Callable[[int], float]:
            def timed(length: int) -> float:
                rows = min(config.max_num_batched_tokens // length, config.max_num_seqs)
                return _seconds(
                    accelerator, backend, model, cache, rows, length, context * length, lengths
                )

            return timed

        return _faster_from(context, lengths, seconds(_OURS), seconds(_TORCHS))

    with torch.inference_mode():
        return PromptLengths(fresh=found(0), behind=found(_CONTEXT))


def _faster_from(
    context: int,
    lengths: Sequence[int],
    ours: Callable[[int], float],
    torchs: Callable[[int], float],
) -> int:
    if not lengths:
        return NEVER
    times = {length: (ours(length), torchs(length)) for length in lengths}
    logger.info(
        "attention of %s, ours and torch's in microseconds: %s",
        f"chunks behind {context} times their tokens" if context else "prompts",
        ", ".join(f"{n}: {a * 1e6:.0f} and {b * 1e6:.0f}" for n, (a, b) in times.items()),
    )
    return crossover(lambda n: times[n][0], lambda n: times[n][1], lengths)


def _seconds(
    accelerator: Accelerator,
    backend: TritonBackend,
    model: ModelConfig,
    cache: KVCache,
    rows: int,
    length: int,
    context: int,
    lengths: PromptLengths,
) -> float:
    """Of one layer's attention over `rows` rows of `length` tokens with `context` before them;
    rows share blocks where the pool has too few."""
    device, kv = accelerator.device, cache.layers[0]
    keys = length + context
    width = -(-keys // cache.block_size)
    tables = (np.arange(rows * width) % cache.num_blocks).reshape(rows, width).astype(np.int32)
    starts = np.arange(0, rows * length + 1, length, dtype=np.int32)
    step = divide(starts, np.full(rows, keys, dtype=np.int32), lengths)
    query = torch.zeros(
        (rows * length, model.num_heads, model.head_dim), dtype=backend.dtype, device=device
    )
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    plan = TritonPlan(
        positions=nothing,
        slots=nothing,
        query_starts=torch.from_numpy(starts).to(device),
        context_lens=torch.from_numpy(step.context_lens).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        max_query_len=step.longest_query,
        max_context_len=step.longest,
        prompts=step.prompts,
    )

    def attend() -> None:
        backend.attention(query, kv, plan, None)

    return accelerator.seconds(attend)
