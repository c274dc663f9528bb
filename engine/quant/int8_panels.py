"""Int8 weights in panels of 48 columns, multiplied by a compiled kernel: on CPUs with AVX-512 VNNI.

Integers are exact, and scales are applied in the order that oneDNN's way applies them: the result
has the bits of that way, without its pass over the outputs.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.quant.native import kernel, needed
from headrace.engine.quant.panels import PANEL, TILE_ROWS, block_rows

_FOUR = 4


@dataclass(frozen=True, slots=True)
class Int8Panels:
    """`panels` int8 [ceil(out / PANEL), in / 4, PANEL, 4]; `start` int32, what the activations'
    zero point adds, negative; `scales` and `no_bias` (zeros) float32; all three filled up to whole
    panels with zeros. `out_features`: columns that count."""

    panels: Tensor
    start: Tensor
    scales: Tensor
    no_bias: Tensor
    out_features: int


def in_int8_panels(weight: Tensor, scales: Tensor, zero_point: int) -> Int8Panels:
    """weight int8 [out, in], in a multiple of 4; scales float32 [out]."""
    out, size = weight.shape
    rest = -out % PANEL

    def filled(values: Tensor) -> Tensor:
        return torch.cat((values, values.new_zeros(rest, *values.shape[1:])))

    whole = filled(weight)
    panels = whole.view(-1, PANEL, size // _FOUR, _FOUR).transpose(1, 2).contiguous()
    start = -zero_point * whole.sum(dim=1, dtype=torch.int32)
    return Int8Panels(panels, start, filled(scales), torch.zeros(len(whole)), out)


def multiply_int8_panels(
    weights: Int8Panels, bias: Tensor | None, x: Tensor, scales: Tensor
) -> Tensor:
    """x uint8 [rows, in] with one scale a row, times the weights, plus bias: [rows, out]."""
    run = needed("int8_panel_kernels", "multiply_int8_panels")
    rows, size = x.shape
    out = weights.out_features
    y = torch.empty(rows, out)
    if not rows:
        return y
    added = weights.no_bias
    if bias is not None:
        rest = len(added) - out
        added = torch.cat((bias, bias.new_zeros(rest))) if rest else bias.contiguous()
    threads = torch.get_num_threads()
    scratch = torch.empty(threads * TILE_ROWS * PANEL if out % PANEL else 0)
    run(
        *(x.data_ptr(), weights.panels.data_ptr(), size, out, weights.start.data_ptr()),
        *(weights.scales.data_ptr(), added.data_ptr(), scales.data_ptr(), y.data_ptr()),
        *(rows, block_rows(rows, size, len(weights.panels), threads), scratch.data_ptr()),
    )
    return y


@functools.cache
def multiplies_int8_panels() -> bool:
    """Whether the kernel runs here: numba and AVX-512 with its VNNI instructions."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return {"avx512f", "avx512_vnni"} <= flags and (
        kernel("int8_panel_kernels", "multiply_int8_panels") is not None
    )
