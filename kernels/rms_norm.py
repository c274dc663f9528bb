"""Root-mean-square normalisation of rows, with or without the residual addition before it.

    h = x + residual                                     (add_rms_norm only, rounded to x's dtype)
    y = h / sqrt(mean(h^2) + eps) * (w + offset)         (offset 1 for Gemma, 0 elsewhere)

Layouts
    x         [rows, hidden] or [tokens, heads, hidden], any strides but 1 in the last dimension
    residual  [rows, hidden], overwritten with h
    weight    [hidden]
    y         x's shape, contiguous

One program normalises one row in float32, so a row's result does not depend on the rows beside it.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

import torch
import triton
import triton.language as tl


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """The formula in float32; returns float32 of x's shape."""
    x = x.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x * scale * (weight.float() + offset)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (y in float32, h in x's dtype); y is the norm of the rounded h."""
    h = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_reference(h, weight, eps, offset), h


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise the last dimension of `x` ([rows, hidden] or [tokens, heads, hidden]).

    Returns `out` (allocated contiguous when None), in x's dtype. Raises ValueError on a shape or
    stride that the kernel does not read.
    """
    return _launch(x, None, weight, eps, offset, out)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add `x` to `residual` in place, then normalise the sum; both are [rows, hidden].

    Returns `out` (allocated contiguous when None), in x's dtype. Raises ValueError on a shape or
    stride that the kernel does not read.
    """
    if residual.shape != x.shape or x.dim() != 2 or residual.dtype != x.dtype:
        raise ValueError(
            f"residual {tuple(residual.shape)} {residual.dtype} must be two-dimensional and match "
            f"x {tuple(x.shape)} {x.dtype}"
        )
    if residual.stride(-1) != 1:
        raise ValueError("residual must be contiguous in its last dimension")
    return _launch(x, residual, weight, eps, offset, out)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    hidden = x.shape[-1]
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(
            f"x must have 2 or 3 dimensions, the last contiguous; got shape {tuple(x.shape)} and "
            f"strides {x.stride()}"
        )
    if weight.shape != (hidden,) or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous [{hidden}]; got {tuple(weight.shape)}")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elif out.shape != x.shape or out.stride(-1) != 1:
        raise ValueError(f"out {tuple(out.shape)} must have x's shape {tuple(x.shape)}")
    rows = x.numel() // hidden if hidden else 0
    if rows == 0:
        return out
    heads = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        out.stride(1) if x.dim() == 3 else 0,
        heads,
        eps,
        offset,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride_t,
    x_stride_h,
    residual_stride_t,
    out_stride_t,
    out_stride_h,
    heads,
    eps,
    offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0)
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    x_row = x_ptr + token * x_stride_t + head * x_stride_h
    h = tl.load(x_row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + token * residual_stride_t
        h += tl.load(residual_row + columns, mask=mask, other=0.0).to(tl.float32)
        # Normalise what the next layer will read, not the unrounded sum.
        rounded = h.to(residual_ptr.dtype.element_ty)
        tl.store(residual_row + columns, rounded, mask=mask)
        h = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + offset
    out_row = out_ptr + token * out_stride_t + head * out_stride_h
    tl.store(out_row + columns, (h * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
