"""A compiled int8 matmul: bytes to float32 in one pass, scales and bias with it.

Weights lie in panels as `quant.panel_kernels` has them, four along the input together:
[ceil(n / PANEL), k / 4, PANEL, 4]. Activations are unsigned with zero point 128; what the zero
point adds is taken off at the start. `quant.int8_panels` packs the weights.
"""

from typing import Any

from numba import carray, njit

from headrace.engine.layers.cpu_simd import claim
from headrace.engine.quant.int8_panel_simd import tiles
from headrace.engine.quant.panel_simd import LINES_PER_K, PANEL
from headrace.engine.quant.simd import floats_at

# No fast math: scales and bias are rounded one after the other.
OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy"}

_few8, _few4, _few2, _few1 = tiles(LINES_PER_K)
_many8, _many4, _many2, _many1 = tiles(1)
_LINE = 64


@njit
def _rows(
    rows: Any, x: Any, xs: Any, panel: Any, k: Any, start: Any, scales: Any, bias: Any,
    row_scales: Any, out: Any, os: Any, ahead: Any,
) -> None:  # fmt: skip
    """One panel for any number of rows, and `ahead` asked for beside it."""
    many = rows >= 8 * LINES_PER_K
    row = 0
    while rows - row >= 8:
        at, to, of = x + row * xs, out + row * os, row_scales + 4 * row
        if many:
            far = ahead
            if row < 8 * LINES_PER_K:
                far = ahead + row // 8 * _LINE * k
            _many8(at, xs, panel, k, start, scales, bias, of, to, os, far)
        else:
            _few8(at, xs, panel, k, start, scales, bias, of, to, os, ahead)
        row += 8
    if rows - row >= 4:
        at, to, of = x + row * xs, out + row * os, row_scales + 4 * row
        if many:
            _many4(at, xs, panel, k, start, scales, bias, of, to, os, ahead)
        else:
            _few4(at, xs, panel, k, start, scales, bias, of, to, os, ahead)
        row += 4
    if rows - row >= 2:
        at, to, of = x + row * xs, out + row * os, row_scales + 4 * row
        if many:
            _many2(at, xs, panel, k, start, scales, bias, of, to, os, ahead)
        else:
            _few2(at, xs, panel, k, start, scales, bias, of, to, os, ahead)
        row += 2
    if rows - row >= 1:
        at, to, of = x + row * xs, out + row * os, row_scales + 4 * row
        if many:
            _many1(at, xs, panel, k, start, scales, bias, of, to, os, ahead)
        else:
            _few1(at, xs, panel, k, start, scales, bias, of, to, os, ahead)


def multiply_int8_panels(args: Any) -> None:
    """args: counter (a thread counter behind it), x (uint8), panels, k, n, start (int32), scales,
    bias, row scales, out, rows, rows of a block, scratch (8 * PANEL floats a thread).

    `start`, `scales` and `bias` are filled up to whole panels. A piece of work is one panel and one
    block of rows; the next one is claimed before the current one is computed, so that its panel can
    be asked for.
    """
    a = carray(args, (13,))
    counter, x, panels, k, n = a[0], a[1], a[2], a[3], a[4]
    start, scales, bias, row_scales = a[5], a[6], a[7], a[8]
    out, rows, block = a[9], a[10], a[11]
    scratch = a[12] + 4 * 8 * PANEL * claim(counter + 8)
    os, ps = 4 * n, 4 * PANEL
    num_panels = (n + PANEL - 1) // PANEL
    work_items = num_panels * ((rows + block - 1) // block)
    steps = k // 4
    size = ps * steps
    work = claim(counter)
    while work < work_items:
        upcoming = claim(counter)
        index, first = work % num_panels, work // num_panels * block
        panel = panels + index * size
        ahead = panels + upcoming % num_panels * size
        count = min(block, rows - first)
        columns = min(PANEL, n - index * PANEL)
        at, p = out + first * os + index * ps, index * ps
        if columns == PANEL:
            _rows(
                count, x + first * k, k, panel, steps, start + p, scales + p, bias + p,
                row_scales + 4 * first, at, os, ahead,
            )  # fmt: skip
        else:
            row = 0
            while row < count:
                some, r0 = min(8, count - row), first + row
                _rows(
                    some, x + r0 * k, k, panel, steps, start + p, scales + p, bias + p,
                    row_scales + 4 * r0, scratch, ps, ahead,
                )  # fmt: skip
                for r in range(some):
                    source = carray(floats_at(scratch + r * ps), (columns,))
                    target = carray(floats_at(at + (row + r) * os), (columns,))
                    for c in range(columns):
                        target[c] = source[c]
                row += some
        work = upcoming
