"""Compiled kernels that multiply by packed rows of weights.

Each format has a row function `row(fields, n, out)`: row n as float32 to the address `out`, whole
blocks (so up to a block beyond the row's length); `fields` are the format's addresses and sizes.
Two loops use it: `fill` unpacks rows for a matmul, `few` multiplies them with a few activations
while they lie in the first-level cache. A format's kernels are these loops with its row function.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from headrace.engine.layers.cpu_simd import claim
from headrace.engine.quant.simd import (
    bfloat_at,
    byte_at,
    bytes_at,
    decode,
    decode_fp8,
    decode_pairs,
    decode_signed,
    decode_table,
    dot,
    floats_at,
    half_at,
    integers_at,
    round_to_short,
    words_at,
)

OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}}

_FIELDS = 10
_ZERO = np.float32(0.0)


@njit(error_model="numpy")
def _product(a_at: Any, b_at: Any, size: Any) -> Any:
    blocks = size // 64
    total = dot(a_at, b_at, blocks)
    a, b = carray(floats_at(a_at), (size,)), carray(floats_at(b_at), (size,))
    for i in range(64 * blocks, size):
        total += a[i] * b[i]
    return total


def loops(row: Any) -> tuple[Any, Any]:
    """`fill` and `few` of a format, from its row function."""

    def fill(args: Any) -> None:
        """args: counter, fields, first row, rows, out, floats between rows of out, rows a claim."""
        a = carray(args, (7,))
        fields = carray(integers_at(a[1]), (_FIELDS,))
        while True:
            begin = claim(a[0]) * a[6]
            if begin >= a[3]:
                break
            for r in range(begin, min(begin + a[6], a[3])):
                row(fields, a[2] + r, a[4] + 4 * r * a[5])

    def few(args: Any) -> None:
        """args: counter, fields, rows of weights, x, rows of x, size, y, bias (0: none), scratch,
        floats of scratch a thread, rows a claim."""
        a = carray(args, (11,))
        fields = carray(integers_at(a[1]), (_FIELDS,))
        num_rows, batch, size = a[2], a[4], a[5]
        row_at = a[8] + 4 * a[9] * claim(a[0] + 8)
        bias = carray(floats_at(a[7]), (num_rows,))
        while True:
            begin = claim(a[0]) * a[10]
            if begin >= num_rows:
                break
            for n in range(begin, min(begin + a[10], num_rows)):
                row(fields, n, row_at)
                for m in range(batch):
                    y = carray(floats_at(a[6] + 4 * (m * num_rows + n)), (1,))
                    y[0] = _product(a[3] + 4 * m * size, row_at, size)
                    if a[7] != 0:
                        y[0] += bias[n]

    # numba names symbols after the function: two bodies under one name, compiled in two processes,
    # would be taken for each other when both come from its cache.
    for loop in (fill, few):
        loop.__qualname__ = f"{row.py_func.__name__}_{loop.__name__}"
    compiled = njit(error_model="numpy")
    return compiled(fill), compiled(few)


@njit(inline="always", error_model="numpy")
def _scale_at(base: Any, kind: Any, index: Any) -> Any:
    """Entry of an array of float16 (kind 0), bfloat16 (1) or float32 (2)."""
    if kind == 0:
        return half_at(base + 2 * index)
    if kind == 1:
        return bfloat_at(base + 2 * index)
    return carray(floats_at(base + 4 * index), (1,))[0]


@njit(inline="always", error_model="numpy")
def _zero_at(base: Any, index: Any, default: Any) -> Any:
    if base == 0:
        return np.float32(default)
    return np.float32(carray(bytes_at(base + index), (1,))[0])


# Groups. fields: packed, bytes a row, scales, their kind, zeros (uint8; 0: none), the zero point
# where there are none, groups a row, chunks of 32 a group, chunks a row.


@njit(error_model="numpy")
def _group4(f: Any, n: Any, out: Any) -> None:
    """16 bytes a chunk: value i and value i + 16 share byte i."""
    at = f[0] + n * f[1]
    for g in range(f[6]):
        scale = _scale_at(f[2], f[3], n * f[6] + g)
        zero = _zero_at(f[4], n * f[6] + g, f[5])
        for c in range(g * f[7], min((g + 1) * f[7], f[8])):
            decode(out + 128 * c, zero, scale, _ZERO, at + 16 * c, 0, 15)
            decode(out + 128 * c + 64, zero, scale, _ZERO, at + 16 * c, 4, 15)


@njit(error_model="numpy")
def _group3(f: Any, n: Any, out: Any) -> None:
    """12 bytes a chunk: two words of 16 low pairs, then 32 high bits."""
    at = f[0] + n * f[1]
    for g in range(f[6]):
        scale = _scale_at(f[2], f[3], n * f[6] + g)
        zero = _zero_at(f[4], n * f[6] + g, f[5])
        for c in range(g * f[7], min((g + 1) * f[7], f[8])):
            words = carray(words_at(at + 12 * c), (3,))
            decode_pairs(out + 128 * c, zero, scale, _ZERO, words[0], words[2])
            decode_pairs(out + 128 * c + 64, zero, scale, _ZERO, words[1], words[2] >> 16)


@njit(error_model="numpy")
def _group2(f: Any, n: Any, out: Any) -> None:
    """8 bytes a chunk: two words of 16 pairs."""
    at = f[0] + n * f[1]
    for g in range(f[6]):
        scale = _scale_at(f[2], f[3], n * f[6] + g)
        zero = _zero_at(f[4], n * f[6] + g, f[5])
        for c in range(g * f[7], min((g + 1) * f[7], f[8])):
            words = carray(words_at(at + 8 * c), (2,))
            decode_pairs(out + 128 * c, zero, scale, _ZERO, words[0], 0)
            decode_pairs(out + 128 * c + 64, zero, scale, _ZERO, words[1], 0)


@njit(error_model="numpy")
def _group8(f: Any, n: Any, out: Any) -> None:
    at = f[0] + n * f[1]
    for g in range(f[6]):
        scale = _scale_at(f[2], f[3], n * f[6] + g)
        zero = _zero_at(f[4], n * f[6] + g, f[5])
        for c in range(g * f[7], min((g + 1) * f[7], f[8])):
            decode(out + 128 * c, zero, scale, _ZERO, at + 32 * c, 0, 255)
            decode(out + 128 * c + 64, zero, scale, _ZERO, at + 32 * c + 16, 0, 255)


@njit(error_model="numpy")
def _int8(f: Any, n: Any, out: Any) -> None:
    """fields: int8 values, bytes a row (a multiple of 16), scales (float32)."""
    scale = _scale_at(f[2], 2, n)
    for c in range(f[1] // 16):
        decode_signed(out + 64 * c, _ZERO, scale, _ZERO, f[0] + n * f[1] + 16 * c)


@njit(error_model="numpy")
def _code4(f: Any, n: Any, out: Any) -> None:
    """fields: packed (as _group4), bytes a row, scales (float32), table of 16, scales a row, chunks
    of 32 a scale, what products are rounded to (0 float16, 1 bfloat16, 2 nothing)."""
    at = f[0] + n * f[1]
    for g in range(f[4]):
        scale = _scale_at(f[2], 2, n * f[4] + g)
        for c in range(g * f[5], min((g + 1) * f[5], f[1] // 16)):
            for side in range(2):
                to = out + 128 * c + 64 * side
                decode_table(to, scale, f[3], at + 16 * c, 4 * side)
                round_to_short(to, f[6])


@njit(error_model="numpy")
def _nested4(f: Any, n: Any, out: Any) -> None:
    """As _code4, with scales in bytes. fields: packed, bytes a row, scales (uint8), table of 16,
    scales a row, rounding, per part first row and first entry among the scales of scales (int64
    pairs), those scales of scales (one for 256), per part a table of 256 and an offset (float32),
    number of parts."""
    at = f[0] + n * f[1]
    part = 0
    starts = carray(integers_at(f[6]), (2 * f[9],))
    while part + 1 < f[9] and n >= starts[2 * part + 2]:
        part += 1
    first_row, first_scale = starts[2 * part], starts[2 * part + 1]
    table = f[8] + 4 * 257 * part
    offset = _scale_at(table, 2, 256)
    for g in range(f[4]):
        code = byte_at(f[2] + n * f[4] + g)
        block = first_scale + ((n - first_row) * f[4] + g) // 256
        scale = _scale_at(table, 2, code) * _scale_at(f[7], 2, block) + offset
        for c in range(2 * g, 2 * g + 2):
            for side in range(2):
                to = out + 128 * c + 64 * side
                decode_table(to, scale, f[3], at + 16 * c, 4 * side)
                round_to_short(to, f[5])


@njit(error_model="numpy")
def _fp8(f: Any, n: Any, out: Any) -> None:
    """fields: values, bytes a row (a multiple of 16), scales, their kind, scales a row, vectors of
    16 a scale."""
    at = f[0] + n * f[1]
    for g in range(f[4]):
        scale = _scale_at(f[2], f[3], n * f[4] + g)
        for v in range(g * f[5], min((g + 1) * f[5], f[1] // 16)):
            decode_fp8(out + 64 * v, scale, at + 16 * v)


_group4_fill, _group4_few = loops(_group4)
_group3_fill, _group3_few = loops(_group3)
_group2_fill, _group2_few = loops(_group2)
_group8_fill, _group8_few = loops(_group8)
_int8_fill, _int8_few = loops(_int8)
_code4_fill, _code4_few = loops(_code4)
_nested4_fill, _nested4_few = loops(_nested4)
_fp8_fill, _fp8_few = loops(_fp8)


def group4_fill(args: Any) -> None:
    _group4_fill(args)


def group4_few(args: Any) -> None:
    _group4_few(args)


def group3_fill(args: Any) -> None:
    _group3_fill(args)


def group3_few(args: Any) -> None:
    _group3_few(args)


def group2_fill(args: Any) -> None:
    _group2_fill(args)


def group2_few(args: Any) -> None:
    _group2_few(args)


def group8_fill(args: Any) -> None:
    _group8_fill(args)


def group8_few(args: Any) -> None:
    _group8_few(args)


def int8_fill(args: Any) -> None:
    _int8_fill(args)


def int8_few(args: Any) -> None:
    _int8_few(args)


def code4_fill(args: Any) -> None:
    _code4_fill(args)


def code4_few(args: Any) -> None:
    _code4_few(args)


def nested4_fill(args: Any) -> None:
    _nested4_fill(args)


def nested4_few(args: Any) -> None:
    _nested4_few(args)


def fp8_fill(args: Any) -> None:
    _fp8_fill(args)


def fp8_few(args: Any) -> None:
    _fp8_few(args)
