"""A linear layer whose weights stay packed in 2 to 8 bits: they are widened where they are used.

    y[m, n] = sum over groups g of scale[g, n] * sum over k in g of x[m, k] * w[n, k]  + bias[n]
    w[n, k] = value(q[n, k]) - zero[g, n]

Layouts
    x        [rows, K], last contiguous
    weights  `PackedWeights`; q's layout is described there
    bias     [N] or None
    y        [rows, N], x's dtype, contiguous

w is exact in every float type (a small integer, a float8, or a code rounded to x's dtype), so the
scale is applied to float32 sums. One row of x is multiplied without tensor cores
(`headrace.kernels.dequantizing_row`). More rows go through `tl.dot` with the weights as its first
operand, which Hopper's tensor cores take from registers. Where few programs would run, K is cut
into splits whose float32 sums a second kernel adds in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels import device
from headrace.kernels.dequantizing_row import launch_rows
from headrace.kernels.matmul_core import GROUP_M, block_of_program, result_of
from headrace.kernels.packed_values import (
    EXPONENT,
    kernel_constants,
    kernel_tensors,
    packed_scales,
    packed_values,
)
from headrace.kernels.packed_weights import BITS, TILE_COLUMNS, PackedWeights, check, dequantize

_STEP = 128
"""Columns in one round of the loop over K; a tile that is wider counts instead."""

_MIN_SPLIT_STEPS = 4
_SUM_BLOCK = 1024


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def dequantizing_matmul_reference(
    x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [rows, N]."""
    y = x.float() @ dequantize(weights).t()
    return y if bias is None else y + bias.float()


def dequantizing_matmul(
    x: torch.Tensor,
    weights: PackedWeights,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Returns `out` [rows, N] (allocated when None).

    `batch_invariant`: one tile and no splits whatever the rows, so that a row gets the same bits in
    any batch. Raises ValueError on a layout that the kernels do not read.
    """
    check(weights)
    if x.dim() != 2 or x.shape[1] != weights.columns or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} must be [rows, {weights.columns}], the last dimension contiguous"
        )
    rows, n = x.shape[0], weights.rows
    out = result_of(out, bias, (rows, n), x.dtype, x.device)
    if rows == 0 or n == 0:
        return out
    scalar = x.dtype == torch.float32 or device.capability(x.device) < (8, 0)
    if rows <= (4 if scalar else 1) and not batch_invariant:
        launch_rows(x, weights, bias, out)
    else:
        _launch_dot(x, weights, bias, out, scalar, batch_invariant)
    return out


def _launch_dot(
    x: torch.Tensor,
    weights: PackedWeights,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scalar: bool,
    batch_invariant: bool,
) -> None:
    rows, n = out.shape
    step = max(_STEP, TILE_COLUMNS[BITS[weights.kind]])
    tile = _choose_tile(64 if batch_invariant else rows, step, scalar)
    programs = triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    steps = triton.cdiv(weights.columns, step)
    splits = 1
    if not batch_invariant and rows <= 64:
        wanted = triton.cdiv(4 * device.multiprocessors(x.device), programs)
        splits = max(1, min(wanted, steps // _MIN_SPLIT_STEPS, 16))
    split_steps = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, split_steps)
    target = out
    if splits > 1:
        target = torch.empty((splits, rows, n), dtype=torch.float32, device=x.device)
    _matmul_kernel[(programs, splits)](
        *kernel_tensors(x, weights, bias),
        target,
        EXPONENT,
        x.stride(0),
        target.stride(-2),
        rows,
        n,
        **kernel_constants(weights, bias if splits == 1 else None, step),
        STEP=step,
        SPLIT_STEPS=split_steps,
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP_M=GROUP_M,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _sum_kernel[(triton.cdiv(n, _SUM_BLOCK), rows)](
            target,
            target if bias is None else bias,
            out,
            out.stride(0),
            rows,
            n,
            SPLITS=splits,
            HAS_BIAS=bias is not None,
            BLOCK=_SUM_BLOCK,
            num_warps=4,
        )


def _choose_tile(rows: int, step: int, scalar: bool) -> _Tile:
    if scalar:
        return _Tile(16, 32, 4, 1)
    if rows <= 64:
        return _Tile(max(16, triton.next_power_of_2(rows)), 64, 4, 4)
    # A step of 256 columns in three stages would take more shared memory than there is.
    return _Tile(128, 128, 8, 3 if step == _STEP else 2)


@triton.jit(do_not_specialize=["exponent", "rows"])
def _matmul_kernel(
    x_ptr, tiles_ptr, scales_ptr, zeros_ptr, table_ptr, starts_ptr, absmax_ptr, tables_ptr,
    bias_ptr, out_ptr, exponent, x_stride, out_stride, rows, n,
    K: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, TILE: tl.constexpr, TILE_WORDS: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, SPAN: tl.constexpr,
    STEP: tl.constexpr, SPLIT_STEPS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A block of y, transposed: w is the first operand of the dot."""
    TILES: tl.constexpr = (K + TILE - 1) // TILE
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    SPANS: tl.constexpr = TILE // SPAN
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    block_m, block_n = block_of_program(rows, n, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns past the end read the last one; their results are not stored.
    readable = tl.minimum(columns, n - 1)
    x_rows = x_ptr + tl.minimum(m, rows - 1).to(tl.int64) * x_stride
    at = tl.arange(0, SPAN)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(split * SPLIT_STEPS, tl.minimum((split + 1) * SPLIT_STEPS, STEPS)):
        part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for span in tl.static_range(STEP // SPAN):
            if span % SPANS == 0:
                tile = step * (STEP // TILE) + span // SPANS
                base = tiles_ptr + (tile.to(tl.int64) * n + readable) * TILE_WORDS
                if TILES * TILE % STEP == 0:
                    words = tl.load(base[:, None] + at[None, :])
                else:
                    words = tl.load(base[:, None] + at[None, :], mask=tile < TILES, other=0)
                high = words
                if BITS == 3:
                    high = tl.load(base[:, None] + SPAN + (at % 8)[None, :])
            group = tl.minimum((step * STEP + span * SPAN) // GROUP, GROUPS - 1)
            zero = tl.zeros([BLOCK_N], tl.float32) + MIDDLE
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + group.to(tl.int64) * n + readable).to(tl.float32)
            k = step * STEP + span * SPAN + at
            if K % STEP == 0:
                x = tl.load(x_rows[None, :] + k[:, None])
            else:
                x = tl.load(x_rows[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
            w = packed_values(
                words,
                high,
                at[None, :],
                zero[:, None],
                table_ptr,
                exponent,
                span % SPANS,
                KIND,
                BITS,
            ).to(x.dtype)
            if GROUPS == 1:
                acc = tl.dot(w, x, acc, input_precision="ieee")
            else:
                part = tl.dot(w, x, part, input_precision="ieee")
                if (span + 1) * SPAN % SEGMENT == 0:
                    scale = packed_scales(
                        group, n, readable, scales_ptr, starts_ptr, absmax_ptr, tables_ptr,
                        GROUPS, PARTS,
                    )  # fmt: skip
                    acc += part * scale[:, None]
                    part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GROUPS == 1:
        scale = packed_scales(
            readable * 0, n, readable, scales_ptr, starts_ptr, absmax_ptr, tables_ptr, 1, PARTS
        )
        acc *= scale[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + readable).to(tl.float32)[:, None]
    if SPLITS > 1:
        out_ptr += split.to(tl.int64) * rows * n
    tl.store(
        out_ptr + m.to(tl.int64)[None, :] * out_stride + columns[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(m < rows)[None, :] & (columns < n)[:, None],
    )


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    parts_ptr, bias_ptr, out_ptr, out_stride, rows, n,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < n
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + (row + rows * split) * n + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
