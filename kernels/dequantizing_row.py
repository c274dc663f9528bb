"""One row of x times packed weights, without tensor cores: what a decode of one sequence does.

    y[n] = sum over groups g of scale[g, n] * sum over k in g of x[k] * w[n, k]  + bias[n]

Each weight is used once, so the kernel is bound by reading them, if widening one takes few
instructions: [tiles, N, words] are widened where they were loaded, and no thread asks another
before the last sum. Layouts and the float32 reference: `headrace.kernels.dequantizing_matmul`.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.packed_values import (
    EXPONENT,
    kernel_constants,
    kernel_tensors,
    packed_scales,
    packed_values,
)
from headrace.kernels.packed_weights import BITS, TILE_COLUMNS, PackedWeights


def launch_rows(
    x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """y of `dequantizing_matmul` into `out` [rows, N], a launch for few rows: each is multiplied
    alone."""
    rows, n = out.shape
    block_n, block_t, warps = 16, 8, 4
    _row_kernel[(triton.cdiv(n, block_n), rows)](
        *kernel_tensors(x, weights, bias),
        out,
        EXPONENT,
        x.stride(0),
        out.stride(0),
        n,
        **kernel_constants(weights, bias, TILE_COLUMNS[BITS[weights.kind]]),
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        num_warps=warps,
    )


@triton.jit(do_not_specialize=["exponent"])
def _row_kernel(
    x_ptr, tiles_ptr, scales_ptr, zeros_ptr, table_ptr, starts_ptr, absmax_ptr, tables_ptr,
    bias_ptr, out_ptr, exponent, x_stride, out_stride, n,
    K: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, TILE: tl.constexpr, TILE_WORDS: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One row of x and BLOCK_N rows of weights, BLOCK_T tiles at a time.

    Tiles come after rows, so that the lanes of a warp lie along the tiles and a thread has several
    rows of one tile: a value of x is then widened once for all of them.
    """
    TILES: tl.constexpr = (K + TILE - 1) // TILE
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    SPANS: tl.constexpr = TILE // SPAN
    HELD: tl.constexpr = TILE if GROUPS == 1 else SEGMENT  # columns that share a zero
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    readable = tl.minimum(columns, n - 1)
    at = tl.arange(0, SPAN)
    acc = tl.zeros([BLOCK_N, BLOCK_T, SPAN], tl.float32)
    part = tl.zeros([BLOCK_N, BLOCK_T, SPAN], tl.float32)
    for start in range(0, TILES, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        base = tiles_ptr + (tile.to(tl.int64)[None, :] * n + readable[:, None]) * TILE_WORDS
        if TILES % BLOCK_T == 0:
            words = tl.load(base[:, :, None] + at[None, None, :])
        else:
            inside = (tile < TILES)[None, :, None]
            words = tl.load(base[:, :, None] + at[None, None, :], mask=inside, other=0)
        high = words
        if BITS == 3:
            inside = (tile < TILES)[None, :, None]
            high = tl.load(base[:, :, None] + SPAN + (at % 8)[None, None, :], mask=inside, other=0)
        for span in tl.static_range(SPANS):
            # Every thread reads the 16 columns that its words hold: no exchange between threads.
            k = (tile * TILE + SPAN * span)[None, :, None] + at[None, None, :]
            k = tl.broadcast_to(k, [BLOCK_N, BLOCK_T, SPAN])
            if K % (TILE * BLOCK_T) == 0:
                x = tl.load(x_ptr + row * x_stride + k).to(tl.float32)
            else:
                x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
            if span * SPAN % HELD == 0:
                group = tl.minimum((tile * TILE + SPAN * span) // GROUP, GROUPS - 1)
                zero = tl.zeros([BLOCK_N, BLOCK_T], tl.float32) + MIDDLE
                if HAS_ZEROS:
                    at_zero = group.to(tl.int64)[None, :] * n + readable[:, None]
                    zero = tl.load(zeros_ptr + at_zero).to(tl.float32)
            part += x * packed_values(
                words,
                high,
                at[None, None, :],
                zero[:, :, None],
                table_ptr,
                exponent,
                span,
                KIND,
                BITS,
            )
            if GROUPS > 1 and (span + 1) * SPAN % SEGMENT == 0:
                scale = packed_scales(
                    group[None, :], n, readable[:, None], scales_ptr, starts_ptr, absmax_ptr,
                    tables_ptr, GROUPS, PARTS,
                )  # fmt: skip
                acc += part * scale[:, :, None]
                part = tl.zeros([BLOCK_N, BLOCK_T, SPAN], tl.float32)
    if GROUPS == 1:
        y = tl.sum(tl.sum(part, axis=2), axis=1)
        y *= packed_scales(
            readable * 0, n, readable, scales_ptr, starts_ptr, absmax_ptr, tables_ptr, 1, PARTS
        )
    else:
        y = tl.sum(tl.sum(acc, axis=2), axis=1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + readable).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=columns < n)
