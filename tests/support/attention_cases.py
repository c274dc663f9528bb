"""Paged batches for the attention tests: shuffled blocks, poisoned slots, ragged lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kernel_support import DEVICE, normal, seeded


@dataclass
class PagedBatch:
    """Arguments of the attention launchers; see `headrace.kernels.paged_attention`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    scale: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
        )


def paged_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    shared: Sequence[tuple[Sequence[int], int]] = (),
    seed: int = 0,
) -> PagedBatch:
    """A batch of (query_len, seq_len) sequences.

    Blocks lie shuffled in the pool; every slot that no sequence owns, and the rest of each last
    block, holds NaN; block tables are padded with an id far outside the pool. `shared` lists
    (sequences, prefix_len): these share the blocks of that prefix (whole blocks).
    """
    g = seeded(seed)
    needed = [-(-keys // block_size) for _, keys in lengths]
    num_blocks = sum(needed) + 4
    free = torch.randperm(num_blocks, generator=g).tolist()
    tables = torch.full((len(lengths), max([*needed, 1]) + 2), free.pop(), dtype=torch.int32)
    k = torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"))
    v = k.clone()
    leaders = {}
    for members, prefix in shared:
        for s in members:
            leaders[s] = (members[0], prefix // block_size)
    # Leaders first: the others copy from their tables.
    for s in sorted(range(len(lengths)), key=lambda s: leaders.get(s, (s, 0))[0] != s):
        keys = lengths[s][1]
        for i in range(needed[s]):
            leader, common = leaders.get(s, (s, 0))
            if leader != s and i < common:
                tables[s, i] = tables[leader, i]
                continue
            block = free.pop()
            tables[s, i] = block
            filled = min(block_size, keys - i * block_size)
            k[block, :filled] = torch.randn(filled, kv_heads, head_dim, generator=g)
            v[block, :filled] = torch.randn(filled, kv_heads, head_dim, generator=g)
    starts = torch.tensor([0, *(query for query, _ in lengths)]).cumsum(0)
    tokens = int(starts[-1])
    return PagedBatch(
        q=normal(tokens, q_heads, head_dim, dtype=dtype, generator=g),
        k_cache=k.to(dtype).to(DEVICE),
        v_cache=v.to(dtype).to(DEVICE),
        block_tables=tables.to(DEVICE),
        query_start_loc=starts.to(torch.int32).to(DEVICE),
        seq_lens=torch.tensor([keys for _, keys in lengths], dtype=torch.int32).to(DEVICE),
        max_query_len=max(query for query, _ in lengths),
        max_seq_len=max(keys for _, keys in lengths),
        scale=head_dim**-0.5,
    )
