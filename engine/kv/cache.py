"""The KV tensors: how many blocks fit into the memory that is there, and the pool itself.

One block more than the scheduler may use is allocated: the dummy block, which padding points at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.faults import is_out_of_memory
from headrace.engine.layers.backend import Backend, LayerKV
from headrace.engine.models.config import ModelConfig
from headrace.engine.quant.kv import SCALE_BYTES, is_quantized, kv_dtype

_CPU_DEFAULT_BYTES = 4 << 30  # a CPU's memory is everybody's; the flag gives more


@dataclass(frozen=True, slots=True)
class KVCache:
    """`num_blocks` usable ones; `dummy_block` is the id after the last."""

    layers: Sequence[LayerKV]
    num_blocks: int
    block_size: int
    bytes_per_block: int

    @property
    def dummy_block(self) -> int:
        return self.num_blocks

    def longest(self, config: EngineConfig, max_model_len: int) -> int:
        """`max_model_len`, or less if the pool holds less and the operator did not ask for it."""
        capacity = self.num_blocks * self.block_size
        if capacity < max_model_len and config.max_model_len is not None:
            raise EngineError(
                f"the KV cache holds {capacity} tokens, fewer than max_model_len {max_model_len};"
                " raise kv_cache_memory_bytes or lower max_model_len"
            )
        return min(capacity, max_model_len)


def allocate(
    config: EngineConfig,
    model: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    budget: int | None = None,
) -> KVCache:
    """Allocate the pool: `kv_cache_memory_bytes` when given, else `budget`, else the measured share
    of what is free. `dtype`: what the backend computes in; `kv_cache_dtype` may choose a narrower
    one."""
    dtype = kv_dtype(config.kv_cache_dtype, dtype)
    per_token = model.kv_bytes_per_token(dtype.itemsize)
    if is_quantized(dtype):
        per_token += 2 * model.num_layers * model.num_kv_heads * SCALE_BYTES
    per_block = config.block_size * per_token
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = measured_bytes(config.gpu_memory_utilization, device)
    num_blocks = budget // per_block - 1
    if num_blocks < 1:
        raise EngineError(
            f"{budget} bytes hold no KV cache: a block of {config.block_size} tokens takes"
            f" {per_block} bytes and two are needed; raise kv_cache_memory_bytes"
        )
    try:
        layers = backend.allocate_kv(model, num_blocks + 1, config.block_size, dtype)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            f"{budget / 2**30:,.1f} GiB for the KV cache cannot be had; lower kv_cache_memory_bytes"
            f" ({type(error).__name__}: {str(error).splitlines()[0][:160]})"
        ) from error
    return KVCache(layers, num_blocks, config.block_size, per_block)


def measured_bytes(share: float, device: torch.device) -> int:
    """Bytes for the pool: `share` of what is free now that the weights are loaded, on a CPU at most
    4 GiB (memory there is touched, and so taken from others, only as blocks are used)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - (1 - share) * total), 0)
    return min(int(share * available_memory()), _CPU_DEFAULT_BYTES)


def available_memory() -> int:
    """Bytes that this process may still take: the host's, or less under a cgroup's limit."""
    available: int = psutil.virtual_memory().available
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, used = _read_integer(limit_file), _read_integer(used_file)
        if limit is not None and used is not None:
            available = min(available, max(limit - used, 0))
    return available


def _read_integer(path: str) -> int | None:
    try:
        with open(path) as file:  # noqa: PTH123 (pseudo-file)
            return int(file.read())
    except (OSError, ValueError):  # missing, or "max"
        return None
