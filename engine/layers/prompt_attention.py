"""Attention of long prompts by torch's own kernels, one row of a step at a time.

A row with many new tokens is a dense product, which torch's flash attention may compute faster than
a kernel that reads keys block by block: here the row's blocks are copied out of the cache, and
scaled_dot_product_attention does the rest. From how many new tokens on that pays is not known here.
All that is asked of a row is known on the host, so nothing waits for the device.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from headrace.engine.layers.backend import LayerKV
from headrace.engine.models.config import ModelConfig

NEVER = 1 << 30
MOST_KEYS = 16_384
"""Rows with more keys stay where they are: their copies would take memory that no step has."""

# Without cuDNN's, which plans anew for each length it has not seen; prompts have all lengths.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Row `row` of a step, with tokens [start, end), the last of which sees `keys` keys. `causal`
    says the same to torch; it has no elements."""

    row: int
    start: int
    end: int
    keys: int
    causal: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal", causal_lower_right(self.end - self.start, self.keys))


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """New tokens from which on a row is torch's: `fresh` of a prompt from its first token on,
    `behind` of a chunk with cached context before it."""

    fresh: int = NEVER
    behind: int = NEVER

    def __str__(self) -> str:
        kinds = (("prompts", self.fresh), ("chunks behind context", self.behind))
        taken = [f"{kind} of {length}" for kind, length in kinds if length < NEVER]
        return f"torch SDPA for {' and '.join(taken)} tokens or more" if taken else "no torch SDPA"


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows, divided: `prompts` are torch's, all others the paged kernel's. `context_lens`
    int32 [rows] is 0 for a row that the kernel must pass over; `longest_query` and `longest` bound
    the rows that it must not, and are 0 when none is left."""

    prompts: tuple[PromptRow, ...]
    context_lens: NDArray[np.int32]
    longest_query: int
    longest: int


def divide(
    query_starts: NDArray[np.int32], context_lens: NDArray[np.int32], lengths: PromptLengths
) -> StepRows:
    """Give torch the rows with so many new tokens, but never one with a single token."""
    queries = np.diff(query_starts)
    fewest = np.where(queries == context_lens, lengths.fresh, lengths.behind)
    torchs = (queries >= np.maximum(fewest, 2)) & (context_lens <= MOST_KEYS)
    if not torchs.any():
        return StepRows((), context_lens, int(queries.max()), int(context_lens.max()))
    rows = np.flatnonzero(torchs)
    prompts = tuple(
        PromptRow(*row)
        for row in zip(
            rows.tolist(),
            query_starts[rows].tolist(),
            query_starts[rows + 1].tolist(),
            context_lens[rows].tolist(),
            strict=True,
        )
    )
    left = np.where(torchs, np.int32(0), context_lens)
    longest_query = int(np.where(torchs, 0, queries).max())
    return StepRows(prompts, left, longest_query, int(left.max()))


def attend_prompts(
    query: Tensor,
    kv: LayerKV,
    block_tables: Tensor,
    prompts: tuple[PromptRow, ...],
    scale: float,
    out: Tensor,
) -> None:
    """Causal attention of `prompts`, written to their tokens of `out`; the others' stay.

    query, out [tokens, heads, head_dim]; kv [blocks, block_size, kv_heads, head_dim];
    block_tables int32 [rows, width].
    """
    block_size, kv_heads = kv.key.shape[1:3]
    with sdpa_kernel(_KERNELS):
        for prompt in prompts:
            blocks = block_tables[prompt.row, : -(-prompt.keys // block_size)]
            key, value = (
                pool.index_select(0, blocks).flatten(0, 1)[: prompt.keys].transpose(0, 1)[None]
                for pool in (kv.key, kv.value)
            )
            found = scaled_dot_product_attention(
                query[prompt.start : prompt.end].transpose(0, 1)[None],
                key,
                value,
                attn_mask=prompt.causal,
                scale=scale,
                enable_gqa=query.shape[1] != kv_heads,
            )
            out[prompt.start : prompt.end] = found[0].transpose(0, 1)


def copied_bytes(tokens: int, keys: int, config: ModelConfig, dtype: torch.dtype) -> int:
    """Most memory that `attend_prompts` holds for a moment in a step of so many tokens, whose rows
    see up to so many keys: one row's keys and values, and its result beside `out`."""
    keys = min(keys, MOST_KEYS)
    rows = 2 * keys * config.num_kv_heads + min(tokens, keys) * config.num_heads
    return rows * config.head_dim * dtype.itemsize
