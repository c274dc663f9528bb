"""From how many shared tokens on it pays to read a prefix once for a group: measured on the device.

Reading it once spares the other members' reads, and costs a pass over the prefix, partial results,
and a merge for every row of the step. Knows how to time two ways, nothing of the engine's steps.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.engine.accelerator import Accelerator
from headrace.engine.config import EngineConfig
from headrace.engine.kv.cache import KVCache
from headrace.engine.layers.backend import LayerKV
from headrace.engine.layers.prompt_attention import NEVER
from headrace.engine.layers.triton_backend import TritonBackend, TritonPlan
from headrace.engine.models.config import ModelConfig
from headrace.kernels.shared_prefix_attention import PrefixGroups

logger = logging.getLogger(__name__)

LENGTHS = (128, 256, 512, 1024, 2048)
_ROWS = 64
_OWN_BLOCKS = 4  # of each row, behind the prefix


def crossover(
    apart: Callable[[int], float], together: Callable[[int], float], lengths: Sequence[int]
) -> int:
    """The smallest length from which on `together` takes less time than `apart`, NEVER if the
    longest one does not."""
    found = NEVER
    for length in sorted(lengths, reverse=True):
        if together(length) >= apart(length):
            break
        found = length
    return found


def measured_crossover(
    accelerator: Accelerator,
    backend: TritonBackend,
    model: ModelConfig,
    cache: KVCache,
    config: EngineConfig,
) -> int:
    """Times one layer's decode of up to 64 rows that all share a prefix, on the empty pool."""
    rows, size = min(_ROWS, config.max_num_seqs), cache.block_size
    most = (cache.num_blocks - rows * _OWN_BLOCKS) * size
    lengths = [length for length in LENGTHS if length <= most and length % size == 0]
    if rows < 2 or not lengths:
        return backend.shared_tokens
    device, kv = accelerator.device, cache.layers[0]
    query = torch.zeros((rows, model.num_heads, model.head_dim), dtype=backend.dtype, device=device)

    def plan(length: int) -> TritonPlan:
        shared = np.tile(np.arange(length // size), (rows, 1))
        own = length // size + np.arange(rows * _OWN_BLOCKS).reshape(rows, -1)
        tables = np.concatenate((shared, own), axis=1).astype(np.int32)
        keys = tables.shape[1] * size
        return TritonPlan(
            positions=torch.full((rows,), keys - 1, dtype=torch.int64, device=device),
            slots=torch.zeros(rows, dtype=torch.int64, device=device),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
            context_lens=torch.full((rows,), keys, dtype=torch.int32, device=device),
            block_tables=torch.from_numpy(tables).to(device),
            max_query_len=1,
            max_context_len=keys,
        )

    def apart(length: int) -> float:
        step = plan(length)
        return accelerator.seconds(lambda: _attend(backend, query, kv, step))

    def together(length: int) -> float:
        groups = PrefixGroups(
            torch.tensor([0, rows], dtype=torch.int32, device=device),
            torch.arange(rows, dtype=torch.int32, device=device),
            torch.full((rows,), length, dtype=torch.int32, device=device),
            length,
        )
        step = replace(plan(length), groups=groups)
        return accelerator.seconds(lambda: _attend(backend, query, kv, step))

    with torch.inference_mode():
        length = crossover(apart, together, lengths)
    if length == NEVER:
        logger.info("reading shared prefixes once does not pay on this device")
        return NEVER
    # All but one of the rows are spared the prefix.
    return length * (rows - 1) // rows


def _attend(backend: TritonBackend, query: Tensor, kv: LayerKV, plan: TritonPlan) -> None:
    backend.attention(query, kv, plan, None)
