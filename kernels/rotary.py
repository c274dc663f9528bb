"""Rotary position embedding of queries and keys, fused with the store into the paged KV cache.

For every pair (a, b) of a head, at position p and frequency f_i:

    a' = a * cos(p f_i) - b * sin(p f_i)
    b' = b * cos(p f_i) + a * sin(p f_i)

The pair is (x[i], x[i + R/2]) ("half-split", as in Hugging Face checkpoints) or (x[2i], x[2i + 1])
("interleaved"), for i < R/2; dimensions from R on pass through (partial rotary, R <= D). Everything
that tells one rope type from another (linear, dynamic, llama3, yarn, longrope, proportional, two
bases, an attention factor) is in the table; the kernel only reads it. With `q_weight` and
`k_weight` each head is first normalised by its root mean square (Qwen3, Gemma 3):

    x <- x / sqrt(mean(x^2) + eps) * (w + offset)

Layouts
    q             [tokens, q_heads, D], strides (any, any, 1); rotated in place
    k, v          [tokens, kv_heads, D], strides (any, any, 1); k rotated in place
    positions     int64 or int32 [tokens]
    table         float32 [max_position, R]: R/2 cosines, then R/2 sines
    k_cache       [num_blocks, block_size, kv_heads, D], also v_cache
    slot_mapping  int64 [tokens]: block * block_size + offset; a padding row names a slot of the
                  reserved dummy block

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

import torch
import triton
import triton.language as tl


def rotary_table(
    inv_freq: torch.Tensor, max_position: int, attention_factor: float = 1.0
) -> torch.Tensor:
    """float32 [max_position, R] table for the inverse frequencies [R/2] of any rope type.

    `attention_factor` multiplies cosines and sines (yarn, longrope). Angles are taken in float64:
    at position 10^5 a float32 angle is off by up to 0.004.
    """
    positions = torch.arange(max_position, dtype=torch.float64, device=inv_freq.device)
    angles = positions[:, None] * inv_freq.double()[None, :]
    table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
    return table.float().contiguous()


def rotary_reference(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    interleaved: bool = False,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> torch.Tensor:
    """Rotate [tokens, heads, D] in float32; returns float32."""
    x = x.float()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    half = table.shape[1] // 2
    cos = table[positions.long(), None, :half]
    sin = table[positions.long(), None, half:]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1)


def store_kv_reference(x: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write x [tokens, kv_heads, D] at its slots of cache [num_blocks, block_size, kv_heads, D]."""
    block_size = cache.shape[1]
    cache[slot_mapping // block_size, slot_mapping % block_size] = x.to(cache.dtype)


def rotary_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> None:
    """Rotate `q` and `k` in place, and store `k` and `v` at `slot_mapping` in the caches.

    Several padding rows may name one slot: what that slot then holds is unspecified. Raises
    ValueError on a shape, stride or dtype that the kernel does not read.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    _check(q, k, v, positions, table, k_cache, v_cache, slot_mapping)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("give q_weight and k_weight both, or neither")
    if q_weight is not None and k_weight is not None:
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if weight.shape != (head_dim,) or not weight.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous [{head_dim}]; got {tuple(weight.shape)}"
                )
    if tokens == 0:
        return
    half = table.shape[1] // 2
    rest = head_dim - 2 * half
    block_heads = min(16 if head_dim <= 128 else 8, triton.next_power_of_2(max(q_heads, kv_heads)))
    grid = (tokens, triton.cdiv(q_heads, block_heads) + triton.cdiv(kv_heads, block_heads))
    _rotary_kernel[grid](
        q,
        k,
        v,
        positions,
        table,
        k_cache,
        v_cache,
        slot_mapping,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        eps,
        offset,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        CACHE_BLOCK=k_cache.shape[1],
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        INTERLEAVED=interleaved,
        NORM=q_weight is not None,
        num_warps=4,
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    tokens, _, head_dim = q.shape
    kv_heads = k.shape[1]
    if k.shape != (tokens, kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [{tokens}, kv_heads, {head_dim}]"
        )
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("q, k and v must be contiguous in the last dimension")
    if k_cache.shape[2:] != (kv_heads, head_dim) or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} must be "
            f"[num_blocks, block_size, {kv_heads}, {head_dim}]"
        )
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("the caches must be contiguous in the last dimension")
    if positions.shape != (tokens,) or slot_mapping.shape != (tokens,):
        raise ValueError(
            f"positions {tuple(positions.shape)} and slot_mapping {tuple(slot_mapping.shape)} "
            f"must be [{tokens}]"
        )
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping must be int64; got {slot_mapping.dtype}")
    if table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError("table must be contiguous float32")
    if table.shape[1] % 2 or not 0 < table.shape[1] <= head_dim:
        raise ValueError(
            f"table must be [max_position, R] with R even and at most {head_dim}; "
            f"got {tuple(table.shape)}"
        )


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    table_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    k_cache_stride_b,
    k_cache_stride_s,
    k_cache_stride_h,
    v_cache_stride_b,
    v_cache_stride_s,
    v_cache_stride_h,
    eps,
    offset,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    i = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    row = table_ptr + position * (2 * HALF)
    cos = tl.load(row + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(row + HALF + i, mask=i < HALF, other=0.0)[None, :]

    if part < q_parts:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        base = q_ptr + token * q_stride_t
        a, b, rest = _rotated(
            base, q_stride_h, heads, Q_HEADS, q_weight_ptr, cos, sin, eps, offset,
            HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED, NORM,
        )  # fmt: skip
        _store_head(
            base, q_stride_h, heads, Q_HEADS, a, b, rest,
            HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED,
        )  # fmt: skip
    else:
        heads = (part - q_parts) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        slot = tl.load(slots_ptr + token)
        block = slot // CACHE_BLOCK
        within = slot % CACHE_BLOCK
        base = k_ptr + token * k_stride_t
        a, b, rest = _rotated(
            base, k_stride_h, heads, KV_HEADS, k_weight_ptr, cos, sin, eps, offset,
            HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED, NORM,
        )  # fmt: skip
        _store_head(
            base, k_stride_h, heads, KV_HEADS, a, b, rest,
            HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED,
        )  # fmt: skip
        _store_head(
            k_cache_ptr + block * k_cache_stride_b + within * k_cache_stride_s,
            k_cache_stride_h, heads, KV_HEADS, a, b, rest,
            HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED,
        )  # fmt: skip
        d = tl.arange(0, BLOCK_DIM)
        mask = (heads < KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
        v = tl.load(
            v_ptr + token * v_stride_t + heads[:, None] * v_stride_h + d[None, :], mask=mask
        )
        v_slot = v_cache_ptr + block * v_cache_stride_b + within * v_cache_stride_s
        tl.store(
            v_slot + heads[:, None] * v_cache_stride_h + d[None, :],
            v.to(v_cache_ptr.dtype.element_ty),
            mask=mask,
        )


@triton.jit
def _rotated(
    base,
    stride_h,
    heads,
    num_heads,
    weight_ptr,
    cos,
    sin,
    eps,
    offset,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Both members of every pair, rotated, and the dimensions that pass through, in float32."""
    i = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        at_a = 2 * i
        at_b = 2 * i + 1
    else:
        at_a = i
        at_b = i + HALF
    r = tl.arange(0, BLOCK_REST) + 2 * HALF
    rows = base + heads[:, None] * stride_h
    live = (heads < num_heads)[:, None]
    pairs = live & (i < HALF)[None, :]
    rests = live & (r < HEAD_DIM)[None, :]
    a = tl.load(rows + at_a[None, :], mask=pairs, other=0.0).to(tl.float32)
    b = tl.load(rows + at_b[None, :], mask=pairs, other=0.0).to(tl.float32)
    rest = tl.load(rows + r[None, :], mask=rests, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        w_a = tl.load(weight_ptr + at_a, mask=i < HALF, other=0.0).to(tl.float32) + offset
        w_b = tl.load(weight_ptr + at_b, mask=i < HALF, other=0.0).to(tl.float32) + offset
        w_r = tl.load(weight_ptr + r, mask=r < HEAD_DIM, other=0.0).to(tl.float32) + offset
        a = a * scale * w_a[None, :]
        b = b * scale * w_b[None, :]
        rest = rest * scale * w_r[None, :]
    # The rotation is in place: no thread may store before all have loaded.
    tl.debug_barrier()
    return a * cos - b * sin, b * cos + a * sin, rest


@triton.jit
def _store_head(
    base,
    stride_h,
    heads,
    num_heads,
    a,
    b,
    rest,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    i = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        at_a = 2 * i
        at_b = 2 * i + 1
    else:
        at_a = i
        at_b = i + HALF
    rows = base + heads[:, None] * stride_h
    live = (heads < num_heads)[:, None]
    pairs = live & (i < HALF)[None, :]
    dtype = base.dtype.element_ty
    tl.store(rows + at_a[None, :], a.to(dtype), mask=pairs)
    tl.store(rows + at_b[None, :], b.to(dtype), mask=pairs)
    if HEAD_DIM > 2 * HALF:
        r = tl.arange(0, BLOCK_REST) + 2 * HALF
        tl.store(rows + r[None, :], rest.to(dtype), mask=live & (r < HEAD_DIM)[None, :])
