"""What the kernels that multiply packed weights have in common: their arguments, and values and
scales out of packed words. Launches nothing."""

import math

import torch
import triton
import triton.language as tl

from headrace.kernels.packed_weights import BITS, SPAN, TILE_COLUMNS, TILE_WORDS, PackedWeights

EXPONENT = 127 << 23
"""The bits of the float32 that is 1; an argument of the kernels."""


def kernel_tensors(
    x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Tensors in the kernels' order; those that a kernel will not read are stood in for."""
    nested = weights.nested
    return (
        x,
        weights.tiles,
        weights.scales,
        weights.tiles if weights.zeros is None else weights.zeros,
        weights.tiles if weights.table is None else weights.table,
        weights.tiles if nested is None else nested.starts,
        weights.tiles if nested is None else nested.absmax,
        weights.tiles if nested is None else nested.tables,
        weights.tiles if bias is None else bias,
    )


def kernel_constants(
    weights: PackedWeights, bias: torch.Tensor | None, step: int
) -> dict[str, object]:
    """`step`: columns that a kernel has at hand at once; SEGMENT of them share a scale."""
    bits = BITS[weights.kind]
    return {
        "K": weights.columns,
        "GROUP": weights.group,
        "SEGMENT": math.gcd(weights.group, step),
        "KIND": weights.kind,
        "BITS": bits,
        "TILE": TILE_COLUMNS[bits],
        "TILE_WORDS": TILE_WORDS[bits],
        "MIDDLE": weights.middle,
        "HAS_ZEROS": weights.zeros is not None,
        "PARTS": 0 if weights.nested is None else len(weights.nested.starts),
        "HAS_BIAS": bias is not None,
        "SPAN": SPAN,
    }


@triton.jit
def packed_values(
    words, high, at, zero, table_ptr, exponent,
    span: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """value(q) - zero in float32 of columns 16 span to 16 span + 15 of a tile; `at` is 0 to 15, and
    `zero` is ignored where values are floats."""
    if KIND == "code4":
        return tl.load(table_ptr + ((words >> 4 * span) & 15))
    elif KIND == "fp8":
        q = words >> 8 * span
        # The bits of a float32 that is 2^120 times too small, subnormals included.
        bits = ((q & 0x80) << 24) | ((q & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((q & 0x7F) == 0x7F, float("nan"), value)
    else:
        # q stays where it lies in the word, if that is within a float32's mantissa, and becomes
        # 2^(23 - LOW) + q by the right exponent: no conversion, one shift for all of a word's upper
        # half, and the difference below is exact. `exponent` is an argument, because ptxas makes
        # one instruction of a mask and an or only if one of them is no constant.
        WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
        FIRST: tl.constexpr = WIDTH * span
        IN_PLACE: tl.constexpr = FIRST + BITS <= 23
        LOW: tl.constexpr = FIRST if IN_PLACE else FIRST - 16
        if IN_PLACE:
            field = words
        else:
            field = words >> 16
        field = field & (((1 << WIDTH) - 1) << LOW)
        if BITS == 3:
            field = field | ((high >> (2 * span + at // 8)) & 1) << (LOW + 2)
        value = (field | (exponent + ((23 - LOW) << 23))).to(tl.float32, bitcast=True)
        return value - (zero + (1 << (23 - LOW)))


@triton.jit
def packed_scales(
    group, n, columns, scales_ptr, starts_ptr, absmax_ptr, tables_ptr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Scales in float32, of `group` and `columns` broadcast against each other."""
    stored = tl.load(scales_ptr + group.to(tl.int64) * n + columns)
    if PARTS == 0:
        return stored.to(tl.float32)
    else:
        part = columns * 0
        for index in tl.static_range(1, PARTS):
            part += (columns >= tl.load(starts_ptr + 2 * index)).to(tl.int32)
        flat = (columns - tl.load(starts_ptr + 2 * part)) * GROUPS + group
        outer = tl.load(absmax_ptr + tl.load(starts_ptr + 2 * part + 1) + flat // 256)
        value = tl.load(tables_ptr + part * 257 + stored.to(tl.int32))
        return value * outer + tl.load(tables_ptr + part * 257 + 256)
