"""Float32 weights in panels of 48 columns, multiplied by a compiled kernel: on a CPU with AVX-512.

Beside oneDNN's packed matmul, at 8 / 32 / 64 / 128 rows through 30 layers of SmolLM2-135M's gate-up
(1,536 + 1,536 x 576; the weights come from memory), on one core: 45 / 115 / 126 / 113 GFLOP/s
against 26 / 65 / 96 / 100.
A row of the result has the same bits whatever other rows are multiplied with it.
"""

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.quant.native import kernel, needed

PANEL = 48
TILE_ROWS = 8
_SCRATCH_FLOATS = 2 * TILE_ROWS * PANEL
_BLOCK_BYTES = 768 << 10
"""Rows of x that stay in the second-level cache, beside the panel in use and the next one."""


def in_panels(weight: Tensor) -> Tensor:
    """weight [out, in] as [ceil(out / PANEL), in, PANEL], filled up with zeros."""
    rest = -len(weight) % PANEL
    if rest:
        weight = torch.cat((weight, weight.new_zeros(rest, weight.shape[1])))
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def multiply_panels(panels: Tensor, start: Tensor, x: Tensor) -> Tensor:
    """start + x @ weight.T of a weight in panels: start [out], x [rows, in], all float32."""
    run = needed("panel_kernels", "multiply_panels")
    x = x.contiguous()
    rows, size = x.shape
    out = len(start)
    y = torch.empty(rows, out)
    if not rows:
        return y
    threads = torch.get_num_threads()
    scratch = torch.empty(threads * _SCRATCH_FLOATS if out % PANEL else 0)
    run(
        *(x.data_ptr(), panels.data_ptr(), size, out),
        *(start.data_ptr(), 0, y.data_ptr(), rows),
        *(block_rows(rows, 4 * size, len(panels), threads), scratch.data_ptr()),
    )
    return y


@functools.cache
def multiplies_panels() -> bool:
    """Whether the kernel runs here: numba and AVX-512 (its tile takes 28 registers)."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return "avx512f" in flags and kernel("panel_kernels", "multiply_panels") is not None


def block_rows(rows: int, row_bytes: int, num_panels: int, threads: int) -> int:
    """Rows that one piece of work takes: what the cache holds, fewer where there would be less than
    four pieces a thread."""
    fit = max(_BLOCK_BYTES // row_bytes, TILE_ROWS)
    blocks = max(-(-rows // fit), 4 * threads // num_panels)
    return max(1, math.ceil(rows / blocks / TILE_ROWS)) * TILE_ROWS
