"""What the tiled matmuls have in common: how y is checked, and which block of it a program has."""

import torch
import triton
import triton.language as tl

GROUP_M = 8
"""Blocks of rows whose programs run together, so that they read the same part of w."""


def result_of(
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    where: torch.device,
) -> torch.Tensor:
    """`out`, allocated when None. ValueError unless it and `bias` fit y's `shape` [rows, N]."""
    rows, n = shape
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous [{n}]; got {tuple(bias.shape)}")
    if out is None:
        return torch.empty((rows, n), dtype=dtype, device=where)
    if out.shape != (rows, n) or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, {n}]; got {tuple(out.shape)}")
    return out


@triton.jit
def block_of_program(
    rows, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    """(block of rows, block of columns) of this program: GROUP_M of rows before the next column."""
    program = tl.program_id(0)
    blocks_m = (rows + BLOCK_M - 1) // BLOCK_M
    blocks_n = (n + BLOCK_N - 1) // BLOCK_N
    in_group = GROUP_M * blocks_n
    first_m = program // in_group * GROUP_M
    group_m = tl.minimum(blocks_m - first_m, GROUP_M)
    return first_m + program % in_group % group_m, program % in_group // group_m
