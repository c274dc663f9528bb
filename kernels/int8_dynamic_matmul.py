"""A linear layer in integers: int8 weights with a scale a row, int8 activations with one a token.

    s[m]    = max over k of |x[m, k]| / levels
    a[m, k] = round(x[m, k] / s[m])                      (to nearest, ties to even; within a byte)
    y[m, n] = s[m] * w_scale[n] * sum over k of a[m, k] * w[n, k]  + bias[n]

Layouts
    x        [rows, K], last contiguous
    w        [N, K], int8, last contiguous
    w_scale  [N], float32
    bias     [N] or None
    y        [rows, N], x's dtype, contiguous

Sums are int32 and exact, so a row's result does not depend on the rows beside it. A token with NaN
or infinity gets the scale NaN: its outputs are NaN, those of others are not.
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


def quantize_tokens_reference(
    x: torch.Tensor, levels: float = 127.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 of x's shape and float32 [rows]."""
    x = x.float()
    peak = x.abs().amax(dim=1)
    peak = torch.where(peak.isfinite(), peak, torch.nan)
    inverse = torch.where(peak < 1e-30, 0.0, torch.full_like(peak, levels) / peak).nan_to_num(0.0)
    steps = (x.nan_to_num(0.0, 0.0, 0.0) * inverse[:, None]).round().clamp(-128, 127)
    return steps.to(torch.int8), peak / levels


def int8_dynamic_matmul_reference(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    levels: float = 127.0,
) -> torch.Tensor:
    """float32 [rows, N]; the sums in float64, which holds them exactly."""
    quantized, scales = quantize_tokens_reference(x, levels)
    sums = (quantized.double() @ w.double().t()).float()
    y = sums * (scales[:, None] * w_scale)
    return y if bias is None else y + bias.float()


def quantize_tokens(x: torch.Tensor, levels: float = 127.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(a int8 [rows, K], s float32 [rows]). Raises ValueError on another layout."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must be [rows, K], contiguous in the last dimension")
    rows, k = x.shape
    quantized = torch.empty((rows, k), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(k)
        _quantize_kernel[(rows,)](
            x,
            quantized,
            scales,
            x.stride(0),
            float(levels),
            K=k,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return quantized, scales


def int8_dynamic_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    levels: float = 127.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `out` [rows, N] (allocated when None). Raises ValueError on another layout."""
    quantized, scales = quantize_tokens(x, levels)
    return int8_matmul(quantized, scales, w, w_scale, bias, dtype=x.dtype, out=out)


def int8_matmul(
    quantized: torch.Tensor,
    scales: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The second half, for tokens that are bytes already; `dtype` of the result."""
    rows, k = quantized.shape
    n = w.shape[0]
    if w.dim() != 2 or w.shape[1] != k or w.dtype != torch.int8 or w.stride(1) != 1:
        raise ValueError(f"w {tuple(w.shape)} {w.dtype} must be int8 [N, {k}], last contiguous")
    if w_scale.shape != (n,) or not w_scale.is_contiguous():
        raise ValueError(f"w_scale must be contiguous [{n}]; got {tuple(w_scale.shape)}")
    out = result_of(out, bias, (rows, n), dtype, quantized.device)
    if rows == 0 or n == 0:
        return out
    tile = _choose_tile(rows, quantized.device)
    grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n),)
    _int8_kernel[grid](
        quantized,
        scales,
        w,
        w_scale,
        w_scale if bias is None else bias,
        out,
        quantized.stride(0),
        w.stride(0),
        out.stride(0),
        rows,
        n,
        K=k,
        HAS_BIAS=bias is not None,
        IN_FLOATS=device.capability(quantized.device) < (8, 0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=GROUP_M,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _choose_tile(rows: int, where: torch.device) -> _Tile:
    if device.capability(where) < (8, 0):
        return _Tile(16, 32, 32, 4, 1)
    if rows <= 64:
        return _Tile(max(16, triton.next_power_of_2(rows)), 64, 128, 4, 4)
    return _Tile(128, 128, 128, 8, 3)


@triton.jit
def _quantize_kernel(
    x_ptr, quantized_ptr, scales_ptr, x_stride, levels, K: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    # A maximum skips NaN, so what is not finite is counted beside it.
    finite = tl.abs(x) <= 3.4028234663852886e38
    bad = tl.sum((~finite).to(tl.int32), axis=0) > 0
    peak = tl.max(tl.where(finite, tl.abs(x), 0.0), axis=0)
    usable = (peak >= 1e-30) & (~bad)
    inverse = tl.where(usable, tl.div_rn(levels + 0.0 * peak, tl.where(usable, peak, 1.0)), 0.0)
    steps = tl.where(finite, x, 0.0) * inverse
    # Adding 1.5 * 2^23 rounds to a whole number, ties to even.
    steps = (steps + 12582912.0) - 12582912.0
    steps = tl.minimum(tl.maximum(steps, -128.0), 127.0)
    tl.store(quantized_ptr + row * K + k, steps.to(tl.int8), mask=k < K)
    tl.store(scales_ptr + row, tl.where(bad, float("nan"), tl.div_rn(peak, levels + 0.0 * peak)))


@triton.jit(do_not_specialize=["rows"])
def _int8_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    w_stride,
    out_stride,
    rows,
    n,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_FLOATS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """A block of y, transposed: few tokens are the narrow side of the tile."""
    block_m, block_n = block_of_program(rows, n, BLOCK_M, BLOCK_N, GROUP_M)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns past the end read the last one; their results are not stored.
    readable_m = tl.minimum(m, rows - 1)
    readable_n = tl.minimum(columns, n - 1)
    x_rows = x_ptr + readable_m.to(tl.int64) * x_stride
    w_rows = w_ptr + readable_n.to(tl.int64) * w_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            x = tl.load(x_rows[None, :] + k[:, None])
            w = tl.load(w_rows[:, None] + k[None, :])
        else:
            x = tl.load(x_rows[None, :] + k[:, None], mask=(k < K)[:, None], other=0)
            w = tl.load(w_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0)
        if IN_FLOATS:
            # Triton multiplies no bytes before 8.0; a stretch's sums are exact in float32.
            sums = tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
            acc += sums.to(tl.int32)
        else:
            acc = tl.dot(w, x, acc, out_dtype=tl.int32)
    x_scale = tl.load(x_scale_ptr + readable_m)
    w_scale = tl.load(w_scale_ptr + readable_n)
    y = acc.to(tl.float32) * (x_scale[None, :] * w_scale[:, None])
    if HAS_BIAS:
        y += tl.load(bias_ptr + readable_n).to(tl.float32)[:, None]
    tl.store(
        out_ptr + m.to(tl.int64)[None, :] * out_stride + columns[:, None],
        y.to(out_ptr.dtype.element_ty),
        mask=(m < rows)[None, :] & (columns < n)[:, None],
    )
