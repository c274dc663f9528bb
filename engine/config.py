"""What the operator chose for the engine. Frozen; what the machine answers is kept elsewhere."""

from dataclasses import dataclass, replace
from typing import Literal

from headrace.engine.errors import EngineError

DType = Literal["auto", "float32", "bfloat16", "float16"]
PrefillAttention = Literal["auto", "triton", "sdpa"]


FLOAT_TYPES: dict[str, DType] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
"""Names of float types as a `quantization`: the weights as floats of that type."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings as users of vLLM know them.

    `device`: auto (a CUDA device if there is one), cpu, cuda or cuda:N. On CUDA `enforce_eager`
    captures no graphs, `async_scheduling` launches a step before the tokens of the one before are
    read, and `prefill_attention` says whose kernel attends long prompts: ours (triton), torch's
    (sdpa), or the one that is faster (auto: measured at start). `dtype` auto: on a CPU the
    checkpoint's 16-bit type where the CPU multiplies it natively (avx512_bf16 or AMX), else
    float32; on CUDA its 16-bit type, float16 below compute capability 8.0. `kv_cache_memory_bytes`
    None: measured. On CUDA `gpu_memory_utilization` is the share of the device's memory that
    weights, steps and KV pool take together, on a CPU the pool's share of what is free after the
    weights are loaded. `num_threads` None: from the CPU quota (cgroup), not from the host's cores.
    `kv_cache_dtype` auto: int8 on a CPU with INT8 activations, else float. `max_prefix_delay`: most
    steps a waiting sequence is held back so that it finds a prefix that another one is computing
    now.
    `deterministic`: an answer's bits do not depend on what else is in the batch, on chunks, on the
    prefix cache, on preemption or on a resume.
    """

    model: str
    served_model_name: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_shared_prefix_attention: bool = True
    deduplicate: bool = True
    deterministic: bool = False
    enforce_eager: bool = False
    prefill_attention: PrefillAttention = "auto"
    async_scheduling: bool = True
    tensor_parallel_size: int = 1
    num_threads: int | None = None
    max_prefix_delay: int = 64


def with_float_type(config: EngineConfig) -> EngineConfig:
    """`quantization` bf16 and the like, said as float weights and `dtype`. Raises EngineError when
    `dtype` says something else."""
    dtype = FLOAT_TYPES.get((config.quantization or "").strip().lower())
    if dtype is None:
        return config
    if config.dtype not in ("auto", dtype):
        raise EngineError(f"quantization {config.quantization!r} contradicts dtype {config.dtype}")
    return replace(config, quantization="float", dtype=dtype)
