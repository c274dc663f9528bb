"""Makes a DeviceRunner: measures what a step takes of the device's memory and gives the KV pool
what is left. Knows no layer and no kernel.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine.accelerator import Accelerator, Memory
from headrace.engine.config import EngineConfig
from headrace.engine.device_runner import DeviceRunner
from headrace.engine.errors import EngineError
from headrace.engine.graphs import graph_sizes
from headrace.engine.kv.cache import allocate
from headrace.engine.layers.prompt_attention import NEVER, copied_bytes
from headrace.engine.layers.triton_backend import TritonBackend, TritonPlan
from headrace.engine.loading.checkpoint import Checkpoint
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.decoder import Decoder
from headrace.engine.prefill_attention_choice import prompt_lengths, refusal
from headrace.engine.shared_prefix_crossover import measured_crossover

logger = logging.getLogger(__name__)

GRAPH_BYTES = 4 << 20
"""Set aside for each captured graph; what they took in fact is reported when they are captured."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Most memory that a step with prompts, and a decode of all rows, holds for a moment."""

    prompt: int
    decode: int


def pool_bytes(memory: Memory, share: float, step_bytes: int, graph_bytes: int = 0) -> int:
    """Bytes for the KV pool: `share` of the device's memory, less what is in use by anybody (the
    weights are loaded), what the widest step takes for a moment, and what graphs will take."""
    used = memory.total - memory.free
    return max(int(share * memory.total) - used - step_bytes - graph_bytes, 0)


def device_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    decoder: Decoder,
    backend: TritonBackend,
    max_model_len: int,
    accelerator: Accelerator,
) -> DeviceRunner:
    """Measure, allocate the KV pool, capture graphs. `max_model_len` is lowered to what the pool
    holds, as in `build_runner`."""
    model, budget = checkpoint.config, config.kv_cache_memory_bytes
    if budget is None and accelerator.device.type == "cuda":
        widest = step_bytes(config, model, decoder, backend, max_model_len, accelerator)
        graphs = 0
        if not config.enforce_eager:
            # Graphs have memory of their own, which the largest of them fills.
            graphs = 2 * len(graph_sizes(config.max_num_seqs)) * GRAPH_BYTES + widest.decode
        memory = accelerator.memory()
        copies = 0
        if config.prefill_attention != "triton" and refusal(model, config) is None:
            copies = copied_bytes(
                config.max_num_batched_tokens, max_model_len, model, backend.dtype
            )
        step = max(widest.prompt + copies, widest.decode)
        budget = pool_bytes(memory, config.gpu_memory_utilization, step, graphs)
        logger.info(
            "device memory: %.2f of %.2f GiB in use, a step takes up to %.2f, %.2f for graphs,"
            " %.2f for KV",
            *((memory.total - memory.free) / 2**30, memory.total / 2**30),
            *(step / 2**30, graphs / 2**30, budget / 2**30),
        )
    with torch.inference_mode():
        cache = allocate(config, model, backend, backend.dtype, accelerator.device, budget)
    shares = config.enable_shared_prefix_attention and not config.deterministic
    if not shares:
        backend.shared_tokens = NEVER
    elif accelerator.device.type == "cuda":
        backend.shared_tokens = measured_crossover(accelerator, backend, model, cache, config)
    longest = cache.longest(config, max_model_len)
    backend.prompt_lengths = prompt_lengths(accelerator, backend, model, cache, config, longest)
    try:
        runner = DeviceRunner(
            *(config, checkpoint, decoder, backend, cache, longest, backend.dtype, accelerator)
        )
    except torch.OutOfMemoryError as error:
        raise EngineError(
            "the device's memory is full before its CUDA graphs are captured; lower"
            f" gpu_memory_utilization ({config.gpu_memory_utilization:g}) or set enforce_eager"
        ) from error
    logger.info("%s", runner.info)
    return runner


def step_bytes(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    backend: TritonBackend,
    max_model_len: int,
    accelerator: Accelerator,
) -> StepBytes:
    """What a step holds beyond weights and KV pool, by running the widest ones: the whole token
    budget in prompts, and a decode of all rows at the model's full length. All their blocks are one
    and the same."""
    rows = config.max_num_seqs
    tokens = max(config.max_num_batched_tokens, rows)
    with torch.inference_mode():
        kv = backend.allocate_kv(model, 1, config.block_size, backend.dtype)

    @torch.inference_mode()
    def run(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], contexts: int | None) -> None:
        device = accelerator.device
        starts = np.concatenate(([0], np.cumsum(lengths)))
        lens = lengths if contexts is None else np.full(len(lengths), contexts)
        offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        positions = offsets + np.repeat(lens - lengths, lengths)
        width = -(-int(lens.max()) // config.block_size)
        plan = TritonPlan(
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(positions % config.block_size).to(device),
            query_starts=torch.from_numpy(starts.astype(np.int32)).to(device),
            context_lens=torch.from_numpy(lens.astype(np.int32)).to(device),
            block_tables=torch.zeros((len(lengths), width), dtype=torch.int32, device=device),
            max_query_len=int(lengths.max()),
            max_context_len=int(lens.max()),
        )
        token_ids = torch.zeros(int(starts[-1]), dtype=torch.int64, device=device)
        ends = torch.from_numpy(starts[1:] - 1).to(device)
        logits = decoder.raw_logits(decoder.hidden(token_ids, kv, plan, ends))
        logits.to(torch.float32, copy=True)  # as rows with a bias or a penalty need them

    share = np.full(rows, tokens // rows)
    share[: tokens % rows] += 1
    return StepBytes(
        accelerator.peak_bytes(lambda: run(np.minimum(share, max_model_len), None)),
        accelerator.peak_bytes(lambda: run(np.ones(rows, dtype=np.int64), max_model_len)),
    )
