"""Attention of decodes that share prefixes: each prefix is read once for its whole group.

A prefix cache saves the prefill and the memory of a common system prompt, not the reads: every
decode still reads the prefix's keys and values once for each sequence. Here the queries of all
members of a group are packed as the rows of one matrix and attend to the prefix together (A); each
sequence attends alone to what follows (S); and the two are folded by their log-sum-exp (natural):

    m = max(lse_A, lse_S);   w = exp(lse - m);   o = (w_A o_A + w_S o_S) / (w_A + w_S)

which is exact. There may be several groups in a batch, and sequences without a group beside them.

Layouts: those of `headrace.kernels.paged_attention`, and
    groups.offsets      int32 [num_groups + 1]: members of group g are members[offsets[g] :
                        offsets[g + 1]]; a group may be empty (padding of a captured graph)
    groups.members      int32 [num_members]: indices of sequences, each in one group at most;
                        what follows offsets[num_groups] is padding
    groups.prefix_lens  int32 [num_seqs]: keys that sequence s shares with its group, 0 for a
                        sequence without one. All members of a group have the same, whole blocks,
                        the same blocks in their tables, and at least that many keys.

A group is shared among decodes (at most `max_split_query_len` new tokens); a member that is in
prefill ignores it, since a prefill chunk already reads the prefix once for many rows. In
deterministic mode a prefix is rounded down to whole splits, and the results have the bits of
`paged_attention` in that mode: sharing then changes the time only.
Source: Juravsky et al., "Hydragen", 2024; Ye et al., "ChunkAttention", 2024; FlashInfer's cascade.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels.attention_core import (
    FIXED_SPLIT,
    MIN_SPLIT,
    Tile,
    attend_range,
    check_cache,
    check_heads,
    find_sequence,
    free_splits,
    merge_states,
    prefill_tile,
    split_size,
)
from headrace.kernels.paged_attention import (
    check_sequences,
    choose_tile,
    launch_fold,
    launch_paged,
    paged_attention_reference,
)


class PrefixGroups(NamedTuple):
    """Which sequences share how many keys; the tensors are described above."""

    offsets: torch.Tensor
    members: torch.Tensor
    prefix_lens: torch.Tensor
    max_prefix_len: int


def shared_prefix_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    groups: PrefixGroups,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The two parts and their merge in float32, one decode (one new token) after the other."""
    out = paged_attention_reference(
        q, k_cache, v_cache, block_tables, query_start_loc, seq_lens,
        scale=scale, window=window, softcap=softcap,
    )  # fmt: skip
    group = q.shape[1] // k_cache.shape[2]
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    prefixes = groups.prefix_lens.tolist()
    for s in groups.members[: int(groups.offsets[-1])].tolist():
        if starts[s + 1] - starts[s] != 1:
            continue
        blocks = block_tables[s, : -(-lens[s] // k_cache.shape[1])].long()
        k = k_cache[blocks].flatten(0, 1)[: lens[s]].float().repeat_interleave(group, dim=1)
        v = v_cache[blocks].flatten(0, 1)[: lens[s]].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", q[starts[s]].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[:, : max(0, lens[s] - window)] = float("-inf")
        parts = []
        for low, high in ((0, prefixes[s]), (prefixes[s], lens[s])):
            part = scores[:, low:high]
            lse = (
                part.logsumexp(dim=-1) if high > low else part.new_full(part.shape[:1], -torch.inf)
            )
            weights = torch.nan_to_num((part - lse[:, None]).exp())
            parts.append((torch.einsum("hk,khd->hd", weights, v[low:high]), lse))
        out[starts[s]], _ = merge_states(*parts[0], *parts[1])
    return out


def shared_prefix_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    groups: PrefixGroups,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    max_split_query_len: int = 1,
    num_splits: int | None = None,
    num_prefix_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `out` ([tokens, q_heads, D], allocated when None).

    The arguments are those of `paged_attention`; `groups.max_prefix_len` bounds every prefix. When
    it pays depends on the device, the group and the prefix: see the bench. Raises ValueError on a
    layout or a size that the kernels do not take.
    """
    check_cache(q, k_cache, v_cache, block_tables)
    check_sequences(block_tables, query_start_loc, seq_lens)
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    group = check_heads(q_heads, kv_heads, head_dim)
    num_seqs = seq_lens.shape[0]
    _check_groups(groups, num_seqs)
    if out is None:
        out = torch.empty((tokens, q_heads, head_dim), dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.stride(2) != 1:
        raise ValueError(f"out {tuple(out.shape)} must have q's shape {tuple(q.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} must be at least 1")
    if deterministic and (num_splits is not None or num_prefix_splits is not None):
        raise ValueError("deterministic mode fixes the size of a split: leave the numbers to it")
    if tokens == 0 or num_seqs == 0:
        return out

    tile = choose_tile(q, group, max_query_len, max_split_query_len, deterministic)
    prefix_tile = tile
    if not deterministic:
        prefix_tile = prefill_tile(head_dim, q.dtype, q.device)._replace(block_n=tile.block_n)
        rows = triton.next_power_of_2(group * max_split_query_len)
        prefix_tile = prefix_tile._replace(block_m=max(prefix_tile.block_m, rows))
    row_blocks = _row_blocks(groups, prefix_tile, group * max_split_query_len)
    if deterministic:
        num_prefix_splits = triton.cdiv(groups.max_prefix_len, FIXED_SPLIT)
        # Another sequence may have no prefix and as many keys as any.
        num_splits = triton.cdiv(max_seq_len, FIXED_SPLIT)
    num_prefix_splits = num_prefix_splits or free_splits(
        q.device, row_blocks * kv_heads, groups.max_prefix_len
    )
    num_splits = num_splits or free_splits(q.device, num_seqs * kv_heads, max_seq_len)
    slots = num_prefix_splits + num_splits
    shape = (num_seqs, max_split_query_len, q_heads, slots)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)

    _shared_prefix_kernel[(row_blocks, kv_heads, num_prefix_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        groups.offsets,
        groups.members,
        groups.prefix_lens,
        partial_out,
        partial_lse,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        block_tables.stride(0),
        groups.offsets.shape[0] - 1,
        num_splits,
        num_prefix_splits,
        scale,
        softcap or 0.0,
        Q_HEADS=q_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=prefix_tile.block_m,
        BLOCK_N=prefix_tile.block_n,
        CACHE_BLOCK=k_cache.shape[1],
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        SPLIT=FIXED_SPLIT if deterministic else 0,
        FEWEST=MIN_SPLIT,
        MAX_SPLIT_QUERY=max_split_query_len,
        num_warps=prefix_tile.num_warps,
        num_stages=prefix_tile.num_stages,
    )
    launch_paged(
        q, k_cache, v_cache, block_tables, query_start_loc, seq_lens, groups.prefix_lens,
        out, partial_out, partial_lse, tile=tile, prefix_splits=num_prefix_splits,
        num_splits=num_splits, direct=False, max_query_len=max_query_len,
        max_split_query_len=max_split_query_len, scale=scale, window=window, softcap=softcap,
        deterministic=deterministic,
    )  # fmt: skip
    launch_fold(
        query_start_loc, seq_lens, groups.prefix_lens, out, partial_out, partial_lse, tile=tile,
        prefix_splits=num_prefix_splits, num_splits=num_splits,
        max_split_query_len=max_split_query_len, window=window, deterministic=deterministic,
    )  # fmt: skip
    return out


def _row_blocks(groups: PrefixGroups, tile: Tile, rows: int) -> int:
    """Programs that hold the rows of all groups, whatever the members are divided into."""
    members = groups.members.shape[0]
    return members // (tile.block_m // rows) + groups.offsets.shape[0] - 1


def _check_groups(groups: PrefixGroups, num_seqs: int) -> None:
    for name in ("offsets", "members", "prefix_lens"):
        tensor = getattr(groups, name)
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"groups.{name} must be contiguous int32 with one dimension")
    if groups.prefix_lens.shape != (num_seqs,):
        raise ValueError(
            f"groups.prefix_lens {tuple(groups.prefix_lens.shape)} must be [{num_seqs}]"
        )
    if groups.offsets.shape[0] < 2 or groups.max_prefix_len < 1:
        raise ValueError("no group shares a key: call paged_attention")


@triton.jit(do_not_specialize=["num_groups", "num_splits", "prefix_splits"])
def _shared_prefix_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    starts_ptr,
    seq_lens_ptr,
    offsets_ptr,
    members_ptr,
    prefix_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    tables_stride,
    num_groups,
    num_splits,
    prefix_splits,
    scale,
    softcap,
    Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    FEWEST: tl.constexpr,
    MAX_SPLIT_QUERY: tl.constexpr,
):
    """One block of a group's rows against one split of its prefix, for one KV head."""
    ROWS: tl.constexpr = GROUP * MAX_SPLIT_QUERY
    MEMBERS: tl.constexpr = BLOCK_M // ROWS
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group, first_block = find_sequence(offsets_ptr, block, num_groups, MEMBERS)
    begin = tl.load(offsets_ptr + group)
    size = tl.load(offsets_ptr + group + 1) - begin
    first = (block - first_block) * MEMBERS
    if first >= size:
        return
    leader = tl.load(members_ptr + begin)
    prefix_len = tl.load(prefix_lens_ptr + leader)
    if SPLIT > 0:
        prefix_len = prefix_len // SPLIT * SPLIT
    keys = split_size(prefix_len, prefix_splits, SPLIT, FEWEST, BLOCK_N)
    low = split * keys
    if low >= prefix_len:
        return
    high = tl.minimum(prefix_len, low + keys)

    rows = tl.arange(0, BLOCK_M)
    member = first + rows // ROWS
    token = rows % ROWS // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = (rows < MEMBERS * ROWS) & (member < size)
    seq = tl.load(members_ptr + begin + member, mask=live, other=0)
    start = tl.load(starts_ptr + seq, mask=live, other=0)
    query_len = tl.load(starts_ptr + seq + 1, mask=live, other=0) - start
    live = live & (query_len <= MAX_SPLIT_QUERY) & (token < query_len)
    positions = tl.load(seq_lens_ptr + seq, mask=live, other=0) - query_len + token
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    at = (start + token).to(tl.int64)
    q = tl.load(
        q_ptr + (at * q_stride_t + head * q_stride_h)[:, None] + d[None, :], mask=mask, other=0.0
    )
    out, lse = attend_range(
        q, positions, low, high,
        tables_ptr + leader.to(tl.int64) * tables_stride,
        k_cache_ptr + kv_head * k_stride_h, v_cache_ptr + kv_head * v_stride_h,
        k_stride_b, k_stride_s, v_stride_b, v_stride_s,
        scale, softcap, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CACHE_BLOCK, WINDOW, SOFTCAP,
    )  # fmt: skip
    cell = ((seq * MAX_SPLIT_QUERY + token).to(tl.int64) * Q_HEADS + head) * (
        prefix_splits + num_splits
    )
    cell += split
    tl.store(partial_out_ptr + cell[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
    tl.store(partial_lse_ptr + cell, lse, mask=live)
