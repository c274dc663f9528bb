"""A linear layer whose rows do not depend on the batch: for deterministic mode.

    y = x W^T + b

Layouts
    x     [rows, K], last contiguous
    w     [N, K], last contiguous (as torch keeps a linear layer's weight)
    bias  [N] or None
    y     [rows, N], x's dtype, contiguous

A library picks its tile, its split of K and so its order of additions by the number of rows. Here
the tile depends on the weight and the device alone, K is summed in one program from first to last,
and a row's place in the tile does not enter its sum: the same row gives the same bits in any batch.
Source of the idea: He, "Defeating nondeterminism in LLM inference", Thinking Machines Lab, 2025.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels import device
from headrace.kernels.matmul_core import GROUP_M, block_of_program, result_of


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def batch_invariant_matmul_reference(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [rows, N]."""
    y = x.float() @ w.float().t()
    return y if bias is None else y + bias.float()


def batch_invariant_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `out` [rows, N] (allocated when None). Raises ValueError on another layout."""
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} must be [rows, K] and [N, K]")
    if x.stride(1) != 1 or w.stride(1) != 1 or x.dtype != w.dtype:
        raise ValueError("x and w must be contiguous in the last dimension and of one dtype")
    rows, k = x.shape
    n = w.shape[0]
    out = result_of(out, bias, (rows, n), x.dtype, x.device)
    if rows == 0 or n == 0:
        return out
    tile = _choose_tile(n, x.dtype, x.device)
    grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n),)
    _matmul_kernel[grid](
        x,
        w,
        w if bias is None else bias,
        out,
        x.stride(0),
        w.stride(0),
        out.stride(0),
        rows,
        n,
        K=k,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=GROUP_M,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _choose_tile(n: int, dtype: torch.dtype, where: torch.device) -> _Tile:
    """By weight and device, never by the number of rows."""
    if dtype == torch.float32 or device.capability(where) < (8, 0):
        return _Tile(16, 64, 32, 4, 1)
    # A narrow weight is cut finer, so that a decode's few rows still reach every multiprocessor.
    if n < 64 * device.multiprocessors(where):
        return _Tile(64, 64, 64, 4, 4)
    return _Tile(128, 128, 64, 8, 3)


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    w_stride,
    out_stride,
    rows,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    block_m, block_n = block_of_program(rows, n, BLOCK_M, BLOCK_N, GROUP_M)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns past the end read the last one; their results are not stored.
    x_rows = x_ptr + tl.minimum(m, rows - 1).to(tl.int64) * x_stride
    w_rows = w_ptr + tl.minimum(columns, n - 1).to(tl.int64) * w_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            x = tl.load(x_rows[:, None] + k[None, :])
            w = tl.load(w_rows[None, :] + k[:, None])
        else:
            x = tl.load(x_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
            w = tl.load(w_rows[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < n, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    tl.store(
        out_ptr + m.to(tl.int64)[:, None] * out_stride + columns[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(m < rows)[:, None] & (columns < n)[None, :],
    )
