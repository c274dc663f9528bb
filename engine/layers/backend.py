"""What a device must offer beside matmuls: norms, rope with the KV store, paged attention, gating.

The decoder core calls these and knows neither the device nor the layout of the KV cache.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """`rows` (indices into the step's rows, ascending) whose first `num_blocks` blocks are the same
    physical blocks, computed before this step."""

    rows: NDArray[np.int64]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's rows, flattened: row r owns tokens [query_starts[r], query_starts[r + 1]).

    `positions` int64 [tokens]; `slots` int64 [tokens]: block id times block size plus offset, where
    each token's key and value go; `query_starts` int32 [rows + 1]; `context_lens` int32 [rows]:
    tokens that a row's last query sees; `block_tables` int32 [rows, width], padded with the dummy
    block.
    """

    block_size: int
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    prefixes: Sequence[SharedPrefix] = ()


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Qwen3's RMSNorm weights over each head of q and k, [head_dim]."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer; the layout is the backend's own. Where they are held in 8 bits,
    each token's head has a scale, float32."""

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in a CPU's memory whose pages the system hands out when they are first written (torch's
    own zeros write all of them: 6 s for 4 GiB)."""
    size = dtype.itemsize * math.prod(shape)
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)


class Backend(Protocol):
    """`plan` is whatever `prepare` made of a step's metadata; it serves all layers of that step.
    `dtype`: of the activations it computes with."""

    name: str
    dtype: torch.dtype

    def allocate_kv(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> list[LayerKV]:
        """Zeroed blocks of every layer; `dtype` may be int8 or float8_e4m3fn, with scales."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> Any: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x += delta in place, then the norm of x."""
        ...

    def rope_and_store(
        self, qkv: Tensor, kv: LayerKV, plan: Any, norms: HeadNorms | None
    ) -> Tensor:
        """Rotate q and k of qkv [tokens, (heads + 2 kv_heads) * head_dim], store k and v at the
        plan's slots and return what `attention` takes as its query. qkv may be overwritten."""
        ...

    def attention(self, query: Tensor, kv: LayerKV, plan: Any, window: int | None) -> Tensor:
        """Causal softmax attention over the paged context: [tokens, heads * head_dim]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, 2 * intermediate], gate first: [tokens, intermediate]."""
        ...


@runtime_checkable
class EmbedsTokens(Protocol):
    """A backend with a kernel of its own for looking up a plain embedding table."""

    def embed(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Token ids [tokens] to rows [tokens, hidden] of the backend's dtype."""
        ...
