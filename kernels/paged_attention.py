"""Attention of queries over a paged KV cache: prefill chunks and decodes in one launch.

For query i of a sequence, at position p_i = seq_len - query_len + i, and key j:

    s_ij = scale * q_i . k_j                       (soft cap c: s <- c tanh(s / c))
    o_i  = sum_j exp(s_ij - lse_i) v_j,            lse_i = log sum_j exp(s_ij)
    over  j <= p_i,  and with a sliding window w,  p_i - j < w

Layouts
    q                [tokens, q_heads, D], strides (any, any, 1)
    k_cache, v_cache [num_blocks, block_size, kv_heads, D], last contiguous, q's dtype
    block_tables     int32 [num_seqs, max_blocks]: key j lies in block_tables[s, j // block_size]
    query_start_loc  int32 [num_seqs + 1]: tokens of sequence s are rows start[s] to start[s + 1]
    seq_lens         int32 [num_seqs], keys of the sequence, this step's tokens included
    out              [tokens, q_heads, D], q's dtype

A sequence without keys (a padding row, seq_len 0) gets zeros. Rows of out that belong to no
sequence are not written.

The query heads of a KV head are packed with the query tokens into the rows of one tile, so that
each key is read once for all of them and the products are matrix products. Sequences of at most
`max_split_query_len` new tokens (decodes) are cut along the keys into splits, whose results a
second kernel folds in order; longer ones (prefill chunks) are cut along the queries. The grid
depends only on the numbers of tokens, sequences, heads and splits, so a captured graph can be
replayed with other lengths. In deterministic mode a split has FIXED_SPLIT keys, one tile serves
every batch, and a prefill chunk folds the same splits in the same order: a token's bits are the
same whatever is computed beside it, and whether it was decoded or recomputed in a chunk.
Source: Kwon et al., "PagedAttention", 2023; Dao, "Flash-Decoding", 2023.
"""

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
    decode_tile,
    deterministic_tile,
    find_sequence,
    fold_weights,
    free_splits,
    prefill_tile,
    split_size,
)


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The formula in float32, one sequence after the other; rows of no sequence are 0."""
    group = q.shape[1] // k_cache.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = query_start_loc.tolist()
    for s, keys in enumerate(seq_lens.tolist()):
        first, last = starts[s], starts[s + 1]
        if first == last or keys == 0:
            continue
        blocks = block_tables[s, : -(-keys // k_cache.shape[1])].long()
        k = k_cache[blocks].flatten(0, 1)[:keys].float().repeat_interleave(group, dim=1)
        v = v_cache[blocks].flatten(0, 1)[:keys].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        j = torch.arange(keys, device=q.device)
        p = torch.arange(keys - (last - first), keys, device=q.device)[:, None]
        hidden = j > p
        if window is not None:
            hidden |= p - j >= window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    max_split_query_len: int = 1,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `out` ([tokens, q_heads, D], allocated when None).

    `max_query_len` and `max_seq_len` bound every sequence of this call and, in a captured graph, of
    every replay; a larger length is computed wrongly. `max_split_query_len` is how many new tokens
    a decode has at most (more than one with speculation). `num_splits` overrides the number chosen
    for the device and is refused in deterministic mode. Raises ValueError on a layout or a size
    that the kernel does not take.
    """
    check_cache(q, k_cache, v_cache, block_tables)
    check_sequences(block_tables, query_start_loc, seq_lens)
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    group = check_heads(q_heads, kv_heads, head_dim)
    if out is None:
        out = torch.empty((tokens, q_heads, head_dim), dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.stride(2) != 1:
        raise ValueError(f"out {tuple(out.shape)} must have q's shape {tuple(q.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} must be at least 1")
    if deterministic and num_splits is not None:
        raise ValueError("deterministic mode fixes the size of a split: leave num_splits to it")
    num_seqs = seq_lens.shape[0]
    if tokens == 0 or num_seqs == 0:
        return out

    tile = choose_tile(q, group, max_query_len, max_split_query_len, deterministic)
    keys = max_seq_len
    if window is not None:
        keys = min(keys, window + max_split_query_len + tile.block_n)
    if deterministic:
        # A window may begin within a split.
        num_splits = triton.cdiv(keys, FIXED_SPLIT) + (1 if window is not None else 0)
    elif num_splits is None:
        num_splits = free_splits(q.device, num_seqs * kv_heads, keys)
    direct = num_splits == 1
    shape = (1,) if direct else (num_seqs, max_split_query_len, q_heads, num_splits, head_dim)
    partial_out = torch.empty(shape, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(shape[:-1] or (1,), dtype=torch.float32, device=q.device)
    launch_paged(
        q, k_cache, v_cache, block_tables, query_start_loc, seq_lens, None,
        out, partial_out, partial_lse, tile=tile, prefix_splits=0, num_splits=num_splits,
        direct=direct, max_query_len=max_query_len, max_split_query_len=max_split_query_len,
        scale=scale, window=window, softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    if not direct:
        launch_fold(
            query_start_loc, seq_lens, None, out, partial_out, partial_lse, tile=tile,
            prefix_splits=0, num_splits=num_splits, max_split_query_len=max_split_query_len,
            window=window, deterministic=deterministic,
        )  # fmt: skip
    return out


def check_sequences(
    block_tables: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """ValueError unless the per-sequence tensors are contiguous int32 and of one length."""
    num_seqs = block_tables.shape[0]
    if seq_lens.shape != (num_seqs,) or query_start_loc.shape != (num_seqs + 1,):
        raise ValueError(
            f"block_tables {tuple(block_tables.shape)}, seq_lens {tuple(seq_lens.shape)} and "
            f"query_start_loc {tuple(query_start_loc.shape)} must be for n, n and n + 1"
        )
    for name, tensor in (("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32; got {tensor.dtype}")


def choose_tile(
    q: torch.Tensor, group: int, max_query_len: int, max_split_query_len: int, deterministic: bool
) -> Tile:
    """The tile of a launch; ValueError when a decode's rows do not fit one."""
    rows = group * max_split_query_len
    if rows > 128:
        raise ValueError(
            f"max_split_query_len {max_split_query_len} times {group} heads of a group is more "
            "than the 128 rows of a tile"
        )
    if deterministic:
        tile = deterministic_tile(q.shape[2], q.dtype, q.device)
    elif max_query_len <= max_split_query_len:
        tile = decode_tile(q.shape[2], q.dtype, q.device, rows)
    else:
        tile = prefill_tile(q.shape[2], q.dtype, q.device)
    if rows > tile.block_m:
        tile = tile._replace(block_m=triton.next_power_of_2(rows))
    return tile


def launch_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    tile: Tile,
    prefix_splits: int,
    num_splits: int,
    direct: bool,
    max_query_len: int,
    max_split_query_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    deterministic: bool,
) -> None:
    """Launch the attention itself; decodes leave out the first `prefix_lens` keys."""
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    num_seqs = seq_lens.shape[0]
    group = q_heads // kv_heads
    has_long = max_query_len > max_split_query_len
    programs = num_seqs * num_splits
    if has_long:
        programs += tokens // (tile.block_m // group) + num_seqs
    _paged_attention_kernel[(programs, kv_heads)](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        seq_lens if prefix_lens is None else prefix_lens,
        out,
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
        out.stride(0),
        out.stride(1),
        num_seqs,
        num_splits,
        prefix_splits,
        scale,
        softcap or 0.0,
        Q_HEADS=q_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CACHE_BLOCK=k_cache.shape[1],
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        SPLIT=FIXED_SPLIT if deterministic else 0,
        FEWEST=MIN_SPLIT,
        MAX_SPLIT_QUERY=max_split_query_len,
        DIRECT=direct,
        HAS_LONG=has_long,
        HAS_PREFIX=prefix_lens is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def launch_fold(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    tile: Tile,
    prefix_splits: int,
    num_splits: int,
    max_split_query_len: int,
    window: int | None,
    deterministic: bool,
) -> None:
    """Launch the fold of the splits of every decode into `out`."""
    num_seqs, q_heads, head_dim = seq_lens.shape[0], out.shape[1], out.shape[2]
    _fold_kernel[(num_seqs * max_split_query_len, q_heads)](
        query_start_loc,
        seq_lens,
        seq_lens if prefix_lens is None else prefix_lens,
        out,
        partial_out,
        partial_lse,
        out.stride(0),
        out.stride(1),
        num_splits,
        prefix_splits,
        Q_HEADS=q_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_N=tile.block_n,
        WINDOW=window or 0,
        SPLIT=FIXED_SPLIT if deterministic else 0,
        FEWEST=MIN_SPLIT,
        MAX_SPLIT_QUERY=max_split_query_len,
        HAS_PREFIX=prefix_lens is not None,
        num_warps=1,
    )


@triton.jit
def _split_bounds(
    seq_len,
    query_len,
    prefix_len,
    num_splits,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    FEWEST: tl.constexpr,
):
    """(first key read, where split 0 begins, keys in a split) of a decode's own part."""
    low = prefix_len
    if WINDOW > 0:
        oldest = tl.maximum(seq_len - query_len - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        low = tl.maximum(low, oldest)
    size = split_size(seq_len - low, num_splits, SPLIT, FEWEST, BLOCK_N)
    origin = low
    if SPLIT > 0:
        origin = low // SPLIT * SPLIT
    return low, origin, size


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "prefix_splits"])
def _paged_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    starts_ptr,
    seq_lens_ptr,
    prefix_lens_ptr,
    out_ptr,
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
    out_stride_t,
    out_stride_h,
    num_seqs,
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
    DIRECT: tl.constexpr,
    HAS_LONG: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Programs 0 to num_seqs * num_splits - 1 are the splits of decodes, the rest blocks of
    # queries of prefill chunks; a program whose sequence is of the other kind has nothing to do.
    seq = program // num_splits
    split = program % num_splits
    first = split * 0
    if HAS_LONG:
        for_decode = program < num_seqs * num_splits
        if not for_decode:
            block = program - num_seqs * num_splits
            seq, first_block = find_sequence(starts_ptr, block, num_seqs, BLOCK_Q)
            first = (block - first_block) * BLOCK_Q
    else:
        for_decode = True
    start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - start
    if for_decode != (query_len <= MAX_SPLIT_QUERY):
        return
    if first >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + seq)
    rows = tl.arange(0, BLOCK_M)
    token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = (rows < BLOCK_Q * GROUP) & (token < query_len)
    positions = seq_len - query_len + token
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    # A head's row in q, out and the partial results.
    at = (start + token).to(tl.int64)
    q = tl.load(
        q_ptr + (at * q_stride_t + head * q_stride_h)[:, None] + d[None, :], mask=mask, other=0.0
    )

    if for_decode:
        prefix_len = 0
        if HAS_PREFIX:
            prefix_len = tl.load(prefix_lens_ptr + seq)
            if SPLIT > 0:
                prefix_len = prefix_len // SPLIT * SPLIT
        low, origin, size = _split_bounds(
            seq_len, query_len, prefix_len, num_splits, BLOCK_N, WINDOW, SPLIT, FEWEST
        )
        high = seq_len
        if not DIRECT:
            if origin + split * size >= seq_len:
                return
            low = tl.maximum(low, origin + split * size)
            high = tl.minimum(seq_len, origin + (split + 1) * size)
    else:
        low = 0
        if WINDOW > 0:
            low = tl.maximum(seq_len - query_len + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(seq_len, seq_len - query_len + first + BLOCK_Q)

    table_ptr = tables_ptr + seq.to(tl.int64) * tables_stride
    k_ptr = k_cache_ptr + kv_head * k_stride_h
    v_ptr = v_cache_ptr + kv_head * v_stride_h
    if SPLIT > 0:
        # The same operations in the same order as a decode's splits and their fold.
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for part in range(low // SPLIT, (high + SPLIT - 1) // SPLIT):
            part_out, part_lse = attend_range(
                q, positions, tl.maximum(low, part * SPLIT), tl.minimum(high, (part + 1) * SPLIT),
                table_ptr, k_ptr, v_ptr, k_stride_b, k_stride_s, v_stride_b, v_stride_s,
                scale, softcap, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CACHE_BLOCK, WINDOW, SOFTCAP,
            )  # fmt: skip
            m, a, b = fold_weights(m, part_lse)
            out = tl.fma(out, a[:, None], part_out * b[:, None])
            weight = tl.fma(weight, a, b)
        empty = weight == 0.0
        out = out / tl.where(empty, 1.0, weight)[:, None]
        lse = tl.where(empty, float("-inf"), m + tl.log(weight))
    else:
        out, lse = attend_range(
            q, positions, low, high,
            table_ptr, k_ptr, v_ptr, k_stride_b, k_stride_s, v_stride_b, v_stride_s,
            scale, softcap, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CACHE_BLOCK, WINDOW, SOFTCAP,
        )  # fmt: skip

    if DIRECT or not for_decode:
        tl.store(
            out_ptr + (at * out_stride_t + head * out_stride_h)[:, None] + d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        slots = prefix_splits + num_splits
        cell = ((seq * MAX_SPLIT_QUERY + token).to(tl.int64) * Q_HEADS + head) * slots
        cell += prefix_splits + split
        tl.store(partial_out_ptr + cell[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
        tl.store(partial_lse_ptr + cell, lse, mask=live)


@triton.jit(do_not_specialize=["num_splits", "prefix_splits"])
def _fold_kernel(
    starts_ptr,
    seq_lens_ptr,
    prefix_lens_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    out_stride_t,
    out_stride_h,
    num_splits,
    prefix_splits,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    FEWEST: tl.constexpr,
    MAX_SPLIT_QUERY: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
):
    seq = tl.program_id(0) // MAX_SPLIT_QUERY
    token = tl.program_id(0) % MAX_SPLIT_QUERY
    head = tl.program_id(1)
    start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - start
    if query_len > MAX_SPLIT_QUERY:
        return
    if token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    d = tl.arange(0, BLOCK_D)
    live = d < HEAD_DIM
    cell = (tl.program_id(0).to(tl.int64) * Q_HEADS + head) * (prefix_splits + num_splits)

    m = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    out = tl.zeros([BLOCK_D], tl.float32)
    prefix_len = 0
    if HAS_PREFIX:
        prefix_len = tl.load(prefix_lens_ptr + seq)
        if SPLIT > 0:
            prefix_len = prefix_len // SPLIT * SPLIT
        size = split_size(prefix_len, prefix_splits, SPLIT, FEWEST, BLOCK_N)
        for split in range((prefix_len + size - 1) // size):
            lse = tl.load(partial_lse_ptr + cell + split + tl.arange(0, 1))
            part = tl.load(partial_out_ptr + (cell + split) * HEAD_DIM + d, mask=live, other=0.0)
            m, a, b = fold_weights(m, lse)
            out = tl.fma(out, a, part * b)
            weight = tl.fma(weight, a, b)
    _low, origin, size = _split_bounds(
        seq_len, query_len, prefix_len, num_splits, BLOCK_N, WINDOW, SPLIT, FEWEST
    )
    for split in range((seq_len - origin + size - 1) // size):
        at = cell + prefix_splits + split
        lse = tl.load(partial_lse_ptr + at + tl.arange(0, 1))
        part = tl.load(partial_out_ptr + at * HEAD_DIM + d, mask=live, other=0.0)
        m, a, b = fold_weights(m, lse)
        out = tl.fma(out, a, part * b)
        weight = tl.fma(weight, a, b)
    out = out / tl.where(weight == 0.0, 1.0, weight)
    tl.store(
        out_ptr + (start + token).to(tl.int64) * out_stride_t + head * out_stride_h + d,
        out.to(out_ptr.dtype.element_ty),
        mask=live,
    )
