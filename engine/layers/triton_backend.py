"""The backend of Triton kernels: for CUDA devices, and on a CPU under Triton's interpreter.

KV layout [num_blocks, block_size, kv_heads, head_dim], in the activations' dtype. Every tensor of a
plan has a shape that depends only on the numbers of tokens and rows and on the bounds it was given,
so that a captured graph can be replayed with other contents. `deterministic` fixes the size of a
split of the keys and leaves shared prefixes alone: a token's bits are then the same in any batch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.errors import EngineError
from headrace.engine.layers.backend import AttentionMetadata, HeadNorms, LayerKV, SharedPrefix
from headrace.engine.layers.prompt_attention import (
    PromptLengths,
    PromptRow,
    attend_prompts,
    divide,
)
from headrace.engine.layers.rope import rope_table
from headrace.engine.models.config import ModelConfig
from headrace.engine.quant.kv import is_quantized
from headrace.kernels.attention_core import HEAD_DIMS, MAX_GROUP
from headrace.kernels.embedding import embedding
from headrace.kernels.gated_activation import silu_and_mul
from headrace.kernels.paged_attention import paged_attention
from headrace.kernels.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.rotary import rotary_and_store
from headrace.kernels.shared_prefix_attention import PrefixGroups, shared_prefix_attention

SHARED_TOKENS = 256
"""Keys that a step must spare, for each of its rows on average, by reading shared prefixes once: it
costs a pass over the prefixes and one that merges. Until it is measured on the device itself:
published crossovers lie between 128 (half as fast) and 256 shared tokens (twice as fast)."""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step on the device. `positions`, `slots` int64 [tokens]; `query_starts` int32 [rows + 1];
    `context_lens` int32 [rows], 0 for a padding row; `block_tables` int32 [rows, width].

    `max_query_len` and `max_context_len` bound every row of this step (in a captured graph, of
    every replay), but for `prompts`: these rows are torch's own attention's and have a context of 0
    here. A `max_query_len` of 0: there are no others.
    """

    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_context_len: int
    groups: PrefixGroups | None = None
    prompts: tuple[PromptRow, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelEmbedding:
    """Rows of a table looked up by the kernel, in `dtype`."""

    weight: Tensor
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        return embedding(token_ids, self.weight, size=self.weight.shape[0]).to(self.dtype)


class TritonBackend:
    name = "triton"

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        self.dtype = dtype
        self.deterministic = deterministic
        self.shared_tokens = SHARED_TOKENS
        self.prompt_lengths = PromptLengths()
        self._config = config
        self._device = device
        self._scale = config.head_dim**-0.5
        cos, sin = rope_table(config.rope, config.head_dim, max_model_len)
        self._table = torch.cat((cos, sin), dim=-1).to(device).contiguous()

    @staticmethod
    def refusal(config: ModelConfig, block_size: int) -> str | None:
        """Why the kernels do not take these shapes; None when they do."""
        low, high = HEAD_DIMS
        if not low <= config.head_dim <= high:
            return f"head_dim {config.head_dim} is not within {low} to {high}"
        if config.group_size > MAX_GROUP:
            return f"{config.group_size} query heads share a key-value head; at most {MAX_GROUP}"
        if block_size & (block_size - 1):
            return f"block_size {block_size} is not a power of two"
        return None

    def allocate_kv(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> list[LayerKV]:
        if is_quantized(dtype):
            raise EngineError(
                f"kv_cache_dtype {str(dtype).removeprefix('torch.')} is not supported by the Triton"
                " attention kernels; use auto"
            )
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)

        def pool() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        return [LayerKV(pool(), pool()) for _ in range(config.num_layers)]

    def embed(self, weight: Tensor) -> KernelEmbedding:
        """The lookup of a plain embedding table."""
        return KernelEmbedding(weight, self.dtype)

    def prepare(self, metadata: AttentionMetadata) -> TritonPlan:
        """Copies a step's arrays to the device and waits for it; a runner that must not wait
        builds its plan itself."""
        device = self._device
        rows = divide(metadata.query_starts, metadata.context_lens, self.prompt_lengths)
        groups = None
        if not self.deterministic:
            found = prefix_arrays(
                metadata.prefixes, len(rows.context_lens), metadata.block_size, self.shared_tokens
            )
            if found is not None:
                offsets, members, lens = (torch.from_numpy(part).to(device) for part in found[:3])
                groups = PrefixGroups(offsets, members, lens, found[3])
        return TritonPlan(
            positions=torch.from_numpy(metadata.positions).to(device),
            slots=torch.from_numpy(metadata.slots).to(device),
            query_starts=torch.from_numpy(metadata.query_starts).to(device),
            context_lens=torch.from_numpy(rows.context_lens).to(device),
            block_tables=torch.from_numpy(np.ascontiguousarray(metadata.block_tables)).to(device),
            max_query_len=rows.longest_query,
            max_context_len=rows.longest,
            groups=groups,
            prompts=rows.prompts,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(delta, x, weight, eps)

    def rope_and_store(
        self, qkv: Tensor, kv: LayerKV, plan: TritonPlan, norms: HeadNorms | None
    ) -> Tensor:
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        query = heads[:, : config.num_heads]
        key, value = heads[:, config.num_heads :].chunk(2, dim=1)
        rotary_and_store(
            query,
            key,
            value,
            plan.positions,
            self._table,
            kv.key,
            kv.value,
            plan.slots,
            q_weight=None if norms is None else norms.query,
            k_weight=None if norms is None else norms.key,
            eps=config.rms_norm_eps,
        )
        return query

    def attention(self, query: Tensor, kv: LayerKV, plan: TritonPlan, window: int | None) -> Tensor:
        if not plan.max_query_len:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        elif plan.groups is not None and window is None:
            out = shared_prefix_attention(
                *(query, kv.key, kv.value, plan.block_tables, plan.query_starts),
                plan.context_lens,
                plan.groups,
                max_query_len=plan.max_query_len,
                max_seq_len=plan.max_context_len,
                scale=self._scale,
            )
        else:
            out = paged_attention(
                *(query, kv.key, kv.value, plan.block_tables, plan.query_starts),
                plan.context_lens,
                max_query_len=plan.max_query_len,
                max_seq_len=plan.max_context_len,
                scale=self._scale,
                window=window,
                deterministic=self.deterministic,
            )
        if plan.prompts:
            attend_prompts(query, kv, plan.block_tables, plan.prompts, self._scale, out)
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)


PrefixArrays = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]


def prefix_arrays(
    prefixes: Sequence[SharedPrefix], num_rows: int, block_size: int, shared_tokens: int
) -> PrefixArrays | None:
    """(offsets, members, prefix_lens, longest) of `PrefixGroups`; None unless reading the prefixes
    once spares `shared_tokens` keys or more for each of the step's rows."""
    spared = sum((len(prefix.rows) - 1) * prefix.num_blocks for prefix in prefixes) * block_size
    if not prefixes or spared < shared_tokens * num_rows:
        return None
    offsets = np.zeros(len(prefixes) + 1, dtype=np.int32)
    np.cumsum([len(prefix.rows) for prefix in prefixes], out=offsets[1:])
    members = np.concatenate([prefix.rows for prefix in prefixes]).astype(np.int32)
    lens = np.zeros(num_rows, dtype=np.int32)
    for prefix in prefixes:
        lens[prefix.rows] = prefix.num_blocks * block_size
    return offsets, members, lens, int(lens.max())


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
