"""Row functions of GGUF's block types, compiled. Layouts: ggml-quants.h of ggml.

Each row is a run of blocks; types up to Q8_0 hold 32 values a block, K types 256 in sub-blocks of
16 or 32 with scales of 4 or 6 bits. fields: data, bytes a row, blocks a row.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from headrace.engine.quant.row_kernels import OPTIONS as OPTIONS
from headrace.engine.quant.row_kernels import loops
from headrace.engine.quant.simd import (
    byte_at,
    decode,
    decode_bits,
    decode_signed,
    decode_two,
    half_at,
    signed_bytes_at,
    word_at,
)

_ZERO = np.float32(0.0)
_EIGHT, _SIXTEEN = np.float32(8.0), np.float32(16.0)
_FOUR, _THIRTY_TWO = np.float32(4.0), np.float32(32.0)


@njit(error_model="numpy")
def _q8_0(f: Any, n: Any, out: Any) -> None:
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 34 * b, out + 128 * b
        scale = half_at(at)
        decode_signed(to, _ZERO, scale, _ZERO, at + 2)
        decode_signed(to + 64, _ZERO, scale, _ZERO, at + 18)


@njit(error_model="numpy")
def _q4_0(f: Any, n: Any, out: Any) -> None:
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 18 * b, out + 128 * b
        scale = half_at(at)
        decode(to, _EIGHT, scale, _ZERO, at + 2, 0, 15)
        decode(to + 64, _EIGHT, scale, _ZERO, at + 2, 4, 15)


@njit(error_model="numpy")
def _q4_1(f: Any, n: Any, out: Any) -> None:
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 20 * b, out + 128 * b
        scale, low = half_at(at), half_at(at + 2)
        decode(to, _ZERO, scale, low, at + 4, 0, 15)
        decode(to + 64, _ZERO, scale, low, at + 4, 4, 15)


@njit(error_model="numpy")
def _q5_0(f: Any, n: Any, out: Any) -> None:
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 22 * b, out + 128 * b
        scale, fifth = half_at(at), word_at(at + 2)
        decode_bits(to, _SIXTEEN, scale, _ZERO, at + 6, 0, 15, fifth, 4)
        decode_bits(to + 64, _SIXTEEN, scale, _ZERO, at + 6, 4, 15, fifth >> 16, 4)


@njit(error_model="numpy")
def _q5_1(f: Any, n: Any, out: Any) -> None:
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 24 * b, out + 128 * b
        scale, low, fifth = half_at(at), half_at(at + 2), word_at(at + 4)
        decode_bits(to, _ZERO, scale, low, at + 8, 0, 15, fifth, 4)
        decode_bits(to + 64, _ZERO, scale, low, at + 8, 4, 15, fifth >> 16, 4)


@njit(error_model="numpy")
def _q2_k(f: Any, n: Any, out: Any) -> None:
    """16 scales (a nibble each of scale and minimum), 64 bytes, d, dmin."""
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 84 * b, out + 1024 * b
        step, low = half_at(at + 80), half_at(at + 82)
        for i in range(16):
            half, shift, side = i // 8, i // 2 % 4, i % 2
            packed = byte_at(at + i)
            scale = step * np.float32(packed & 15)
            least = -low * np.float32(packed >> 4)
            source = at + 16 + 32 * half + 16 * side
            decode(to + 64 * i, _ZERO, scale, least, source, 2 * shift, 3)


@njit(error_model="numpy")
def _q3_k(f: Any, n: Any, out: Any) -> None:
    """32 bytes of third bits (set: no offset), 64 bytes of pairs, 12 bytes of 6-bit scales, d."""
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 110 * b, out + 1024 * b
        step = half_at(at + 108)
        for i in range(16):
            half, shift, side = i // 8, i // 2 % 4, i % 2
            low = byte_at(at + 96 + i % 8) >> 4 * half & 15
            high = byte_at(at + 104 + i % 4) >> 2 * (i // 4) & 3
            scale = step * np.float32((low | high << 4) - 32)
            pairs, thirds = at + 32 + 32 * half + 16 * side, at + 16 * side
            decode_two(
                to + 64 * i,
                _FOUR,
                scale,
                _ZERO,
                pairs,
                2 * shift,
                3,
                thirds,
                4 * half + shift,
                1,
                2,
            )


@njit(inline="always", error_model="numpy")
def _six_bit_scale(scales: Any, i: Any) -> Any:
    """Scale i of 8 in Q4_K's and Q5_K's 12 bytes."""
    late = i // 4  # the last four have their upper bits with the first four
    low = byte_at(scales + i + 4 * late) & (63 >> 2 * late)
    return low | (byte_at(scales + i - 4 * late) >> 6) * late << 4


@njit(inline="always", error_model="numpy")
def _six_bit_minimum(scales: Any, i: Any) -> Any:
    late = i // 4
    low = byte_at(scales + 4 + i) >> 4 * late & 63
    return low | (byte_at(scales + i) >> 6) * late << 4


@njit(error_model="numpy")
def _q4_k(f: Any, n: Any, out: Any) -> None:
    """d, dmin, 12 bytes of scales and minimums, 128 bytes of nibbles."""
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 144 * b, out + 1024 * b
        step, low = half_at(at), half_at(at + 2)
        for i in range(8):
            scale = step * np.float32(_six_bit_scale(at + 4, i))
            least = -low * np.float32(_six_bit_minimum(at + 4, i))
            source = at + 16 + 32 * (i // 2)
            for side in range(2):
                decode(
                    to + 128 * i + 64 * side,
                    _ZERO,
                    scale,
                    least,
                    source + 16 * side,
                    4 * (i % 2),
                    15,
                )


@njit(error_model="numpy")
def _q5_k(f: Any, n: Any, out: Any) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit i for sub-block i."""
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 176 * b, out + 1024 * b
        step, low = half_at(at), half_at(at + 2)
        for i in range(8):
            scale = step * np.float32(_six_bit_scale(at + 4, i))
            least = -low * np.float32(_six_bit_minimum(at + 4, i))
            source = at + 48 + 32 * (i // 2)
            for side in range(2):
                decode_two(
                    to + 128 * i + 64 * side,
                    _ZERO,
                    scale,
                    least,
                    source + 16 * side,
                    4 * (i % 2),
                    15,
                    at + 16 + 16 * side,
                    i,
                    1,
                    4,
                )


@njit(error_model="numpy")
def _q6_k(f: Any, n: Any, out: Any) -> None:
    """128 bytes of nibbles, 64 of pairs, 16 int8 scales, d."""
    for b in range(f[2]):
        at, to = f[0] + n * f[1] + 210 * b, out + 1024 * b
        step = half_at(at + 208)
        scales = carray(signed_bytes_at(at + 192), (16,))
        for i in range(16):
            half, block, side = i // 8, i // 2 % 4, i % 2
            scale = step * np.float32(scales[i])
            nibbles = at + 64 * half + 32 * (block % 2) + 16 * side
            pairs = at + 128 + 32 * half + 16 * side
            decode_two(
                to + 64 * i,
                _THIRTY_TWO,
                scale,
                _ZERO,
                nibbles,
                4 * (block // 2),
                15,
                pairs,
                2 * block,
                3,
                4,
            )


_q8_0_fill, _q8_0_few = loops(_q8_0)
_q4_0_fill, _q4_0_few = loops(_q4_0)
_q4_1_fill, _q4_1_few = loops(_q4_1)
_q5_0_fill, _q5_0_few = loops(_q5_0)
_q5_1_fill, _q5_1_few = loops(_q5_1)
_q2_k_fill, _q2_k_few = loops(_q2_k)
_q3_k_fill, _q3_k_few = loops(_q3_k)
_q4_k_fill, _q4_k_few = loops(_q4_k)
_q5_k_fill, _q5_k_few = loops(_q5_k)
_q6_k_fill, _q6_k_few = loops(_q6_k)


def q8_0_fill(args: Any) -> None:
    _q8_0_fill(args)


def q8_0_few(args: Any) -> None:
    _q8_0_few(args)


def q4_0_fill(args: Any) -> None:
    _q4_0_fill(args)


def q4_0_few(args: Any) -> None:
    _q4_0_few(args)


def q4_1_fill(args: Any) -> None:
    _q4_1_fill(args)


def q4_1_few(args: Any) -> None:
    _q4_1_few(args)


def q5_0_fill(args: Any) -> None:
    _q5_0_fill(args)


def q5_0_few(args: Any) -> None:
    _q5_0_few(args)


def q5_1_fill(args: Any) -> None:
    _q5_1_fill(args)


def q5_1_few(args: Any) -> None:
    _q5_1_few(args)


def q2_k_fill(args: Any) -> None:
    _q2_k_fill(args)


def q2_k_few(args: Any) -> None:
    _q2_k_few(args)


def q3_k_fill(args: Any) -> None:
    _q3_k_fill(args)


def q3_k_few(args: Any) -> None:
    _q3_k_few(args)


def q4_k_fill(args: Any) -> None:
    _q4_k_fill(args)


def q4_k_few(args: Any) -> None:
    _q4_k_few(args)


def q5_k_fill(args: Any) -> None:
    _q5_k_fill(args)


def q5_k_few(args: Any) -> None:
    _q5_k_few(args)


def q6_k_fill(args: Any) -> None:
    _q6_k_fill(args)


def q6_k_few(args: Any) -> None:
    _q6_k_few(args)
