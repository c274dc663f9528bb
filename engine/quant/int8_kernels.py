"""Compiled kernels around int8 matmuls: float rows to bytes and back, each in one pass.

A kernel is `void f(int64 *args)`: the first entry is the address of a counter from which the
threads of one launch claim rows. `quant.native` compiles and runs them.
"""

from typing import Any

import numpy as np
from numba import carray

from headrace.engine.layers.cpu_simd import as_float, claim
from headrace.engine.quant.simd import bytes_at, float_of, floats_at, nearest, words_at

# No fast math: products are rounded as torch rounds them.
OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy"}

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_ZERO_POINT = np.float32(128.0)
_HIGHEST = np.float32(255.0)
_TINY = np.float32(1e-30)


def quantize_rows(args: Any) -> None:
    """args: counter, x (float32), out (uint8, zero point 128), scales, rows, size, levels, rows a
    claim.

    scale = max|x| / levels; out = round(x / scale) + 128. The maximum is taken among the bit
    patterns: integers compare without a care for NaN, whose patterns lie above infinity's, so a row
    with either gets the scale NaN and says so in all of its outputs.
    """
    a = carray(args, (8,))
    counter, rows, size, levels, grain = a[0], a[4], a[5], as_float(a[6]), a[7]
    scales = carray(floats_at(a[3]), (rows,))
    while True:
        first = claim(counter) * grain
        if first >= rows:
            break
        for r in range(first, min(first + grain, rows)):
            source = carray(floats_at(a[1] + 4 * r * size), (size,))
            patterns = carray(words_at(a[1] + 4 * r * size), (size,))
            target = carray(bytes_at(a[2] + r * size), (size,))
            top = patterns[0] & 0
            for i in range(size):
                top = max(top, patterns[i] & _MAGNITUDE)
            if top >= _INFINITY:
                scales[r] = float_of(patterns[0] | _MAGNITUDE)
                for i in range(size):
                    target[i] = 128
                continue
            peak = float_of(top)
            scales[r] = peak / levels
            if peak < _TINY:  # its reciprocal would overflow; zero for all that a matmul can tell
                for i in range(size):
                    target[i] = 128
                continue
            inverse = levels / peak
            for i in range(size):
                value = nearest(source[i] * inverse) + _ZERO_POINT
                target[i] = int(min(value, _HIGHEST))


def scale_rows(args: Any) -> None:
    """args: counter, y (float32), scales, bias (0: none), rows, size, rows a claim.

    y[r, :] = y[r, :] * scales[r] + bias, in place.
    """
    a = carray(args, (7,))
    counter, rows, size, grain = a[0], a[4], a[5], a[6]
    scales = carray(floats_at(a[2]), (rows,))
    bias = carray(floats_at(a[3]), (size,))
    while True:
        first = claim(counter) * grain
        if first >= rows:
            break
        for r in range(first, min(first + grain, rows)):
            row = carray(floats_at(a[1] + 4 * r * size), (size,))
            scale = scales[r]
            if a[3] == 0:
                for i in range(size):
                    row[i] *= scale
            else:
                for i in range(size):
                    row[i] = row[i] * scale + bias[i]
