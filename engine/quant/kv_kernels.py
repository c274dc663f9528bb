"""Keys and values in 8 bits, for the compiled attention: one scale for each token's head.

Kinds: 1 int8 (the largest magnitude becomes 127), 2 float8_e4m3fn (448). Layouts are those of
`layers.cpu_backend`; scales lie [block, kv_head, block_size].
"""

from typing import Any

import numpy as np
from numba import carray, njit

from headrace.engine.quant.simd import (
    bytes_at,
    decode_fp8,
    decode_lanes,
    decode_signed,
    float_of,
    floats_at,
    nearest,
    words_at,
)

_LANES = 16
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_INT8_TOP, _FP8_TOP = np.float32(127.0), np.float32(448.0)
_LOWERED = np.float32(2.0**-120)  # float32's exponent to float8's
_TINY, _ZERO = np.float32(1e-30), np.float32(0.0)


@njit(error_model="numpy")
def store_head(head_at: Any, size: Any, kind: Any, out_at: Any, stride: Any, scale_at: Any) -> None:
    """Quantize `size` floats (overwritten) to bytes `stride` apart, and write their scale; NaN or
    infinity makes the scale NaN."""
    head = carray(floats_at(head_at), (size,))
    patterns = carray(words_at(head_at), (size,))
    out = carray(bytes_at(out_at), ((size - 1) * stride + 1,))
    scale = carray(floats_at(scale_at), (1,))
    top = patterns[0] & 0
    for i in range(size):
        top = max(top, patterns[i] & _MAGNITUDE)
    limit = _INT8_TOP if kind == 1 else _FP8_TOP
    peak = float_of(top)
    scale[0] = peak / limit
    if top >= _INFINITY or peak < _TINY:
        if top >= _INFINITY:
            scale[0] = float_of(patterns[0] | _MAGNITUDE)
        for i in range(size):
            out[i * stride] = 0
        return
    inverse = limit / peak
    if kind == 1:
        for i in range(size):
            out[i * stride] = int(nearest(head[i] * inverse)) & 255
    else:
        for i in range(size):
            lowered = min(max(head[i] * inverse, -_FP8_TOP), _FP8_TOP) * _LOWERED
            head[i] = lowered
            bits = patterns[i] & _MAGNITUDE
            code = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
            out[i * stride] = code | ((patterns[i] >> 24) & 0x80)


@njit(error_model="numpy")
def load_keys(source: Any, stride: Any, size: Any, kind: Any, scales: Any, out: Any) -> None:
    """16 keys [size, 16], rows `stride` bytes apart, as floats [size, 16]."""
    for d in range(size):
        decode_lanes(out + 64 * d, scales, source + d * stride, kind)


@njit(error_model="numpy")
def load_values(source: Any, count: Any, size: Any, kind: Any, scales: Any, out: Any) -> None:
    """`count` values [count, size] as floats."""
    factors = carray(floats_at(scales), (count,))
    for t in range(count):
        for v in range(size // _LANES):
            at = source + t * size + _LANES * v
            if kind == 1:
                decode_signed(out + 4 * (t * size + _LANES * v), _ZERO, factors[t], _ZERO, at)
            else:
                decode_fp8(out + 4 * (t * size + _LANES * v), factors[t], at)
