"""Tiled attention against the full score matrix: time and memory of one prefill over its length.

The engine's own two backends on one layer of the model: the compiled one works through the keys
tile by tile; the plain torch one writes out all heads x length x length scores.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.evaluate.process_memory import peak_memory
from headrace.engine.layers.backend import AttentionMetadata, Backend
from headrace.engine.layers.choose import choose_backend
from headrace.engine.layers.torch_backend import TorchBackend
from headrace.engine.loading.source import open_checkpoint
from headrace.engine.models.config import ModelConfig

LENGTHS = (256, 512, 1024, 2048, 4096)
_BLOCK = 16
_COPIES = 5
"""Score matrices that plain torch holds at a time: scores, masked, exponents and in between."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One layer's attention over a prompt of `length`: seconds, and bytes beyond its inputs."""

    length: int
    tiled_s: float
    full_s: float | None
    tiled_bytes: int | None
    full_bytes: int | None
    largest_difference: float | None


def tiled_backend(model: Path, config: ModelConfig, length: int) -> Backend | None:
    """What the engine would choose; None where that is plain torch (no numba, shapes that do not
    fit): there is nothing to compare then."""
    chosen = EngineConfig(str(model), block_size=_BLOCK)
    backend = choose_backend(chosen, config, length, torch.float32, torch.device("cpu"))
    return None if isinstance(backend, TorchBackend) else backend


@torch.inference_mode()
def measure(
    model: Path, threads: int, lengths: Sequence[int] = LENGTHS, repeats: int = 3
) -> list[Measured]:
    """Medians. `full` is None where its scores would take more than a quarter of free memory."""
    torch.set_num_threads(threads)
    config = open_checkpoint(model).config
    found = []
    for length in lengths:
        if length > config.max_position_embeddings:
            break
        tiled = tiled_backend(model, config, length)
        if tiled is None:
            break
        size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        qkv = torch.randn(length, size, generator=torch.Generator().manual_seed(length))
        tiled_out, tiled_s, tiled_bytes = _attend(tiled, config, qkv, repeats)
        scores = _COPIES * 4 * config.num_heads * length**2
        full_s = full_bytes = difference = None
        if scores < psutil.virtual_memory().available // 4:
            full = TorchBackend(config, length, torch.float32, torch.device("cpu"))
            out, full_s, full_bytes = _attend(full, config, qkv, repeats)
            difference = float((out - tiled_out).abs().max())
        found.append(Measured(length, tiled_s, full_s, tiled_bytes, full_bytes, difference))
    return found


def _attend(
    backend: Backend, config: ModelConfig, qkv: torch.Tensor, repeats: int
) -> tuple[torch.Tensor, float, int | None]:
    length = len(qkv)
    blocks = -(-length // _BLOCK)
    positions = np.arange(length, dtype=np.int64)
    plan = backend.prepare(
        AttentionMetadata(
            block_size=_BLOCK,
            positions=positions,
            slots=positions,
            query_starts=np.array([0, length], dtype=np.int32),
            context_lens=np.array([length], dtype=np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
        )
    )
    (kv,) = backend.allocate_kv(config, blocks + 1, _BLOCK, torch.float32)[:1]
    query = backend.rope_and_store(qkv.clone(), kv, plan, None)
    out = backend.attention(query, kv, plan, None)
    with peak_memory() as peak:
        backend.attention(query, kv, plan, None)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        backend.attention(query, kv, plan, None)
        times.append(time.perf_counter() - started)
    return out, statistics.median(times), peak.extra_bytes
