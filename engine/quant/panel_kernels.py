"""A compiled float32 matmul for a CPU's short batches: y = start + x @ weight.T.

`weight` [n, k] lies in panels of PANEL columns, [ceil(n / PANEL), k, PANEL], the last one filled up
with zeros. While a thread multiplies by one panel it asks for the panel that it multiplies by next,
so that the weights arrive from memory beside the arithmetic and not before it. `quant.panels` packs
the weights; `quant.native` compiles and runs the kernel.
"""

from typing import Any

from numba import carray, njit

from headrace.engine.layers.cpu_simd import claim
from headrace.engine.quant.panel_simd import LINES_PER_K, PANEL, tiles
from headrace.engine.quant.simd import floats_at

OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy"}

SCRATCH_FLOATS = 2 * 8 * PANEL
"""float32 entries of work space that one thread needs."""

_few8, _few4, _few2, _few1 = tiles(LINES_PER_K)
_many8, _many4, _many2, _many1 = tiles(1)
_LINE = 64


@njit
def _rows(
    rows: Any, x: Any, xs: Any, panel: Any, k: Any, start: Any, ss: Any, out: Any, os: Any,
    ahead: Any,
) -> None:  # fmt: skip
    """One panel for any number of rows, and `ahead` asked for beside it: over the first three tiles
    where there are so many, else whole beside each."""
    many = rows >= 8 * LINES_PER_K
    row = 0
    while rows - row >= 8:
        at, begin, to = x + row * xs, start + row * ss, out + row * os
        if many:
            far = ahead
            if row < 8 * LINES_PER_K:
                far = ahead + row // 8 * _LINE * k
            _many8(at, xs, panel, k, begin, ss, to, os, far)
        else:
            _few8(at, xs, panel, k, begin, ss, to, os, ahead)
        row += 8
    if rows - row >= 4:
        at, begin, to = x + row * xs, start + row * ss, out + row * os
        if many:
            _many4(at, xs, panel, k, begin, ss, to, os, ahead)
        else:
            _few4(at, xs, panel, k, begin, ss, to, os, ahead)
        row += 4
    if rows - row >= 2:
        at, begin, to = x + row * xs, start + row * ss, out + row * os
        if many:
            _many2(at, xs, panel, k, begin, ss, to, os, ahead)
        else:
            _few2(at, xs, panel, k, begin, ss, to, os, ahead)
        row += 2
    if rows - row >= 1:
        at, begin, to = x + row * xs, start + row * ss, out + row * os
        if many:
            _many1(at, xs, panel, k, begin, ss, to, os, ahead)
        else:
            _few1(at, xs, panel, k, begin, ss, to, os, ahead)


def multiply_panels(args: Any) -> None:
    """args: counter (a thread counter behind it), x, panels, k, n, start, its row stride in floats
    (0: one row for all), out, rows, rows of a block, scratch (SCRATCH_FLOATS a thread).

    `start` may be `out` itself. A piece of work is one panel and one block of rows; the next one is
    claimed before the current one is computed, so that its panel can be asked for.
    """
    a = carray(args, (11,))
    counter, x, panels, k, n = a[0], a[1], a[2], a[3], a[4]
    start, out, rows, block = a[5], a[7], a[8], a[9]
    scratch = a[10] + 4 * SCRATCH_FLOATS * claim(counter + 8)
    xs, ss, os, ps = 4 * k, 4 * a[6], 4 * n, 4 * PANEL
    num_panels = (n + PANEL - 1) // PANEL
    work_items = num_panels * ((rows + block - 1) // block)
    size = ps * k
    work = claim(counter)
    while work < work_items:
        upcoming = claim(counter)
        index, first = work % num_panels, work // num_panels * block
        panel = panels + index * size
        ahead = panels + upcoming % num_panels * size
        count = min(block, rows - first)
        columns = min(PANEL, n - index * PANEL)
        at, begin = out + first * os + index * ps, start + first * ss + index * ps
        if columns == PANEL:
            _rows(count, x + first * xs, xs, panel, k, begin, ss, at, os, ahead)
        else:
            row = 0
            while row < count:
                some = min(8, count - row)
                for r in range(some):
                    source = carray(floats_at(begin + (row + r) * ss), (columns,))
                    target = carray(floats_at(scratch + r * ps), (columns,))
                    for c in range(columns):
                        target[c] = source[c]
                end = scratch + 8 * ps
                _rows(some, x + (first + row) * xs, xs, panel, k, scratch, ps, end, ps, ahead)
                for r in range(some):
                    source = carray(floats_at(end + r * ps), (columns,))
                    target = carray(floats_at(at + (row + r) * os), (columns,))
                    for c in range(columns):
                        target[c] = source[c]
                row += some
        work = upcoming
