"""What the paged and the shared-prefix attention kernels have in common.

The online softmax over one range of keys, the log-sum-exp merge of two results, the search for the
sequence that a program works on, the number of splits, and the tile sizes. All logarithms that
leave these functions are natural.

A range is read in tiles of BLOCK_N keys. A key that a row may not see adds exactly nothing to that
row (its weight is 0 and the running maximum does not move), so a row's bits depend only on where
the tiles and splits begin, never on which rows or keys lie beside it.
Source of the online softmax: Milakov and Gimelshein, 2018; of the tiling: Dao et al., 2022.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels import device

HEAD_DIMS = (16, 256)
"""Smallest and largest head dimension that the attention kernels take."""

MAX_GROUP = 16
"""Largest number of query heads that share one KV head."""

MIN_SPLIT = 256
"""Fewest keys worth a program of their own when the number of splits is free."""

FIXED_SPLIT = 512
"""Keys in a split in deterministic mode, whatever the batch."""


class Tile(NamedTuple):
    """Rows (query tokens times heads of a group) and keys of one tile, and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tile(head_dim: int, dtype: torch.dtype, where: torch.device, rows: int) -> Tile:
    """A tile for `rows` rows that read much more than they compute."""
    block_m = max(16, triton.next_power_of_2(rows))
    if dtype == torch.float32 or device.capability(where) < (8, 0):
        return _scalar_tile(head_dim)._replace(block_m=block_m)
    return Tile(block_m, 32 if head_dim > 128 else 64, 4, 2 if head_dim > 128 else 3)


def prefill_tile(head_dim: int, dtype: torch.dtype, where: torch.device) -> Tile:
    """A tile with enough rows to keep the tensor cores busy."""
    if dtype == torch.float32 or device.capability(where) < (8, 0):
        return _scalar_tile(head_dim)
    return Tile(64, 32, 8, 2) if head_dim > 128 else Tile(128, 64, 8, 2)


def deterministic_tile(head_dim: int, dtype: torch.dtype, where: torch.device) -> Tile:
    """The one tile of deterministic mode: the same for a prefill chunk, a decode and a prefix."""
    if dtype == torch.float32 or device.capability(where) < (8, 0):
        return _scalar_tile(head_dim)
    return Tile(64, 32 if head_dim > 128 else 64, 8, 2)


def _scalar_tile(head_dim: int) -> Tile:
    """For `tl.dot` without tensor cores (float32; Triton has none for 7.5): it lives in registers.

    A tile of 64 x 32 at head_dim 128 spills 5,000 bytes a thread on 7.5, this one none.
    """
    return Tile(16, 32 if head_dim <= 64 else 16, 4, 1)


def free_splits(where: torch.device, programs: int, max_keys: int) -> int:
    """Splits that fill the device about four times over, when `programs` would not alone."""
    wanted = triton.cdiv(4 * device.multiprocessors(where), max(programs, 1))
    return int(max(1, min(wanted, triton.cdiv(max_keys, MIN_SPLIT), 64)))


def check_heads(q_heads: int, kv_heads: int, head_dim: int) -> int:
    """The number of query heads for one KV head; ValueError where the kernels do not go."""
    if kv_heads == 0 or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GROUP:
        raise ValueError(
            f"{q_heads} query heads over {kv_heads} KV heads: the quotient must be a whole number "
            f"from 1 to {MAX_GROUP}"
        )
    if not HEAD_DIMS[0] <= head_dim <= HEAD_DIMS[1]:
        raise ValueError(f"head_dim {head_dim} is not within {HEAD_DIMS[0]} to {HEAD_DIMS[1]}")
    return q_heads // kv_heads


def check_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor
) -> None:
    """ValueError unless q and the caches have the layouts that the kernels read."""
    if q.dim() != 3 or q.stride(2) != 1:
        raise ValueError(f"q must be [tokens, heads, head_dim], last contiguous; got {q.shape}")
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[3] != q.shape[2]:
        raise ValueError(
            f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} must be [num_blocks, "
            f"block_size, kv_heads, {q.shape[2]}]"
        )
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("the caches must be contiguous in the last dimension")
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise ValueError(f"caches {k_cache.dtype}, {v_cache.dtype} must have q's dtype {q.dtype}")
    if k_cache.shape[1] & (k_cache.shape[1] - 1):
        raise ValueError(f"block_size {k_cache.shape[1]} must be a power of two")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.stride(1) != 1:
        raise ValueError("block_tables must be int32 [num_seqs, max_blocks], rows contiguous")


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over A and B together, from attention over each: float32, natural log.

    out [..., D], lse [...]; lse is -inf where no key was visible, and the result is 0 there.
        m = max(lse_a, lse_b);  w = exp(lse - m);  out = (w_a out_a + w_b out_b) / (w_a + w_b)
    Associative and exact. Source: Juravsky et al., "Hydragen", 2024.
    """
    m = torch.maximum(lse_a, lse_b)
    m = torch.where(m == float("-inf"), torch.zeros_like(m), m)
    w_a, w_b = (lse_a - m).exp(), (lse_b - m).exp()
    total = w_a + w_b
    out = w_a[..., None] * out_a + w_b[..., None] * out_b
    return out / torch.where(total == 0, 1.0, total)[..., None], m + total.log()


@triton.jit
def attend_range(
    q,
    row_positions,
    low,
    high,
    table_ptr,
    k_ptr,
    v_ptr,
    k_stride_b,
    k_stride_s,
    v_stride_b,
    v_stride_s,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """(out [BLOCK_M, BLOCK_D] normalised, lse [BLOCK_M]) over the keys low <= n < high.

    Row r sees key n when n <= row_positions[r] and, with a window, row_positions[r] - n < WINDOW.
    A row that sees none has out 0 and lse -inf.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    d = tl.arange(0, BLOCK_D)
    live_d = d < HEAD_DIM
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < high
        block = tl.load(table_ptr + n // CACHE_BLOCK, mask=live, other=0).to(tl.int64)
        within = n % CACHE_BLOCK
        k_rows = k_ptr + block * k_stride_b + within * k_stride_s
        k = tl.load(k_rows[None, :] + d[:, None], mask=live_d[:, None] & live[None, :], other=0.0)
        s = tl.dot(q, k, input_precision="ieee")
        if SOFTCAP:
            # tanh(x) = 2 sigmoid(2x) - 1
            s = softcap * (2.0 * tl.sigmoid(2.0 * (s * scale / softcap)) - 1.0) * LOG2E
        else:
            s = s * (scale * LOG2E)
        visible = live[None, :] & (n[None, :] <= row_positions[:, None])
        if WINDOW > 0:
            visible = visible & (row_positions[:, None] - n[None, :] < WINDOW)
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.sum(p, axis=1)
        # A slot that was never written may hold NaN, and 0 * NaN is NaN: read it as 0.
        v_rows = v_ptr + block * v_stride_b + within * v_stride_s
        v = tl.load(v_rows[:, None] + d[None, :], mask=live[:, None] & live_d[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), (m + tl.log2(total)) * LN2)
    return out, lse


@triton.jit
def fold_weights(m, lse):
    """(new maximum, factor of the sum so far, factor of the part with `lse`)."""
    m_new = tl.maximum(m, lse)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, tl.exp(m - m_safe), tl.exp(lse - m_safe)


@triton.jit
def find_sequence(starts_ptr, program, count, BLOCK: tl.constexpr):
    """Sequence whose blocks of rows include `program`, and the first block of that sequence.

    Sequence s owns the programs from starts[s] // BLOCK + s on: at least one more than its blocks
    need, so the grid depends on the totals alone.
    """
    left: tl.int32 = 0
    right = count
    while left < right:
        middle = (left + right) // 2
        if tl.load(starts_ptr + middle) // BLOCK + middle <= program:
            left = middle + 1
        else:
            right = middle
    found = left - 1
    return found, tl.load(starts_ptr + found) // BLOCK + found


@triton.jit
def split_size(keys, num_splits, SPLIT: tl.constexpr, FEWEST: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys in one split: SPLIT when it is fixed, else an even share in whole tiles."""
    if SPLIT > 0:
        size = SPLIT
    else:
        share = (keys + num_splits - 1) // num_splits
        size = tl.maximum((share + BLOCK_N - 1) // BLOCK_N * BLOCK_N, FEWEST)
    return size
