"""Gated activations of the MLP: one half of each row is activated and multiplies the other half.

    silu_and_mul       y = g * sigmoid(g) * u
    gelu_tanh_and_mul  y = g * (1 + tanh(z)) / 2 * u,    z = sqrt(2 / pi) * (g + 0.044715 * g^3)

Layouts
    x  [rows, 2 * width], g = x[:, :width], u = x[:, width:]; contiguous in the last dimension
    y  [rows, width], contiguous, x's dtype

Both are elementwise in float32; (1 + tanh(z)) / 2 is computed as sigmoid(2z), which is the same.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

import torch
import triton
import triton.language as tl


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * width] -> float32 [rows, width]."""
    gate, up = x.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_tanh_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * width] -> float32 [rows, width]."""
    gate, up = x.float().chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, 2 * width] -> [rows, width] in x's dtype. Raises ValueError on another layout."""
    return _launch(x, out, gelu=False)


def gelu_tanh_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, 2 * width] -> [rows, width] in x's dtype. Raises ValueError on another layout."""
    return _launch(x, out, gelu=True)


def _launch(x: torch.Tensor, out: torch.Tensor | None, gelu: bool) -> torch.Tensor:
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(
            f"x must be [rows, 2 * width], contiguous in the last dimension; got shape "
            f"{tuple(x.shape)} and strides {x.stride()}"
        )
    rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    elif out.shape != (rows, width) or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, {width}]; got {tuple(out.shape)}")
    if rows == 0 or width == 0:
        return out
    block = min(1024, triton.next_power_of_2(width))
    _gated_activation_kernel[(rows, triton.cdiv(width, block))](
        x, out, x.stride(0), out.stride(0), width, BLOCK=block, GELU=gelu, num_warps=4
    )
    return out


@triton.jit
def _gated_activation_kernel(
    x_ptr, out_ptr, x_stride, out_stride, width, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # 2 * sqrt(2 / pi)
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    y = (activated * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, y, mask=mask)
