"""Weights in 2 to 8 bits as the dequantizing matmul reads them: tiles of columns, all rows in each.

    weight[n, k] = (value(q[n, k]) - zero[k / group, n]) * scale[k / group, n]

Layouts
    tiles   [ceil(K / columns of a tile), N, words of a tile], int32: a program that works on some
            rows reads one unbroken stretch of memory a tile
        8 bits   64 columns, 16 words: byte s of word j holds column 16 s + j
        4 bits   128 columns, 16 words: nibble s of word j holds column 16 s + j
        2 bits   256 columns, 16 words: pair s of word j holds column 16 s + j
        3 bits   256 columns, 24 words: the low pairs of bits as at 2 bits, then 8 words in which
                 bit b of word j is the high bit of column 8 b + j
    scales  [groups, N], float16, bfloat16 or float32; uint8 where they are themselves codes
    zeros   [groups, N], uint8, or None

So a stretch of 16 columns comes out of its tile by one shift and one mask a value, and it never
crosses a group. Nothing here launches a kernel.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

SPAN = 16
"""Columns that one shift takes out of a tile."""

GROUP_MULTIPLE = 32

BITS = {"int2": 2, "int3": 3, "int4": 4, "int8": 8, "code4": 4, "fp8": 8}
"""Kinds of values: unsigned integers; indices into a table; float8_e4m3fn."""

TILE_COLUMNS = {2: 256, 3: 256, 4: 128, 8: 64}
TILE_WORDS = {2: 16, 3: 24, 4: 16, 8: 16}
_NESTED_BLOCK = 256


class NestedScales(NamedTuple):
    """Scales that are codes of their own, as bitsandbytes' double quantization has them.

    A layer stacked of `parts` counts each part's codes row by row from its first row on:
    scale = tables[part, code] * absmax[entry + (row * groups + group) / 256] + tables[part, 256].
    starts [parts, 2] int64: a part's first row and its first entry in `absmax`; absmax float32;
    tables [parts, 257] float32.
    """

    starts: torch.Tensor
    absmax: torch.Tensor
    tables: torch.Tensor


class PackedWeights(NamedTuple):
    """One matrix [N, K]. `middle` is the zero point where `zeros` is None; `group` columns share a
    scale (a multiple of 32, or at least K); `table` [16] float32 holds the values of code4."""

    tiles: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    kind: str
    group: int
    columns: int
    middle: int = 0
    table: torch.Tensor | None = None
    nested: NestedScales | None = None

    @property
    def rows(self) -> int:
        return self.tiles.shape[1]


def check(weights: PackedWeights) -> None:
    """ValueError where the parts do not fit together."""
    bits = BITS.get(weights.kind)
    if bits is None:
        raise ValueError(f"kind {weights.kind!r} is not one of {', '.join(BITS)}")
    group, columns, rows = weights.group, weights.columns, weights.rows
    if group < columns and group % GROUP_MULTIPLE:
        raise ValueError(f"groups of {group} are no multiple of {GROUP_MULTIPLE}")
    shape = (-(-columns // TILE_COLUMNS[bits]), rows, TILE_WORDS[bits])
    if tuple(weights.tiles.shape) != shape or not weights.tiles.is_contiguous():
        raise ValueError(f"tiles {tuple(weights.tiles.shape)} must be contiguous {shape}")
    groups = (-(-columns // group), rows)
    for name, tensor in (("scales", weights.scales), ("zeros", weights.zeros)):
        if tensor is not None and (tuple(tensor.shape) != groups or not tensor.is_contiguous()):
            raise ValueError(f"{name} {tuple(tensor.shape)} must be contiguous {groups}")
    if (weights.kind == "code4") != (weights.table is not None):
        raise ValueError("code4 and nothing else has a table")


def pack_tiles(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [N, K] below 2^bits to tiles; columns beyond K hold 0."""
    width = TILE_COLUMNS[bits]
    padded = functional.pad(values, (0, -values.shape[1] % width))
    tiles = padded.view(len(values), -1, width).transpose(0, 1)
    if bits != 3:
        return _joined(tiles, bits)
    words: torch.Tensor = torch.cat((_joined(tiles & 3, 2), _joined(tiles >> 2, 1)), dim=2)
    return words


def unpack_tiles(tiles: torch.Tensor, columns: int, bits: int) -> torch.Tensor:
    """Back to uint8 [N, K]."""
    if bits == 3:
        values = _separate(tiles[:, :, :SPAN], 2) | _separate(tiles[:, :, SPAN:], 1) << 2
    else:
        values = _separate(tiles, bits)
    return values.transpose(0, 1).flatten(1)[:, :columns]


def dequantize(weights: PackedWeights) -> torch.Tensor:
    """Float32 [N, K], by the formula."""
    stored = unpack_tiles(weights.tiles, weights.columns, BITS[weights.kind])
    if weights.table is not None:
        values: torch.Tensor = weights.table[stored.long()]
    elif weights.kind == "fp8":
        values = stored.contiguous().view(torch.float8_e4m3fn).float()
    else:
        values = stored.float()
    group_of = torch.arange(weights.columns, device=stored.device) // weights.group
    if weights.zeros is None:
        values = values - weights.middle
    else:
        values = values - weights.zeros.t()[:, group_of].float()
    return values * scale_values(weights).t()[:, group_of]


def scale_values(weights: PackedWeights) -> torch.Tensor:
    """Float32 [groups, N]."""
    nested = weights.nested
    if nested is None:
        return weights.scales.float()
    groups, rows = weights.scales.shape
    row = torch.arange(rows, device=weights.scales.device)
    part = (row[:, None] >= nested.starts[:, 0]).sum(1) - 1
    flat = (row - nested.starts[part, 0])[:, None] * groups
    flat = flat + torch.arange(groups, device=row.device)
    outer = nested.absmax[nested.starts[part, 1, None] + flat // _NESTED_BLOCK]
    values = nested.tables[part[:, None], weights.scales.t().long()]
    scales: torch.Tensor = values * outer + nested.tables[part, -1, None]
    return scales.t()


def _joined(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [tiles, N, columns] to int32 words, the first columns lowest."""
    fields = values.unflatten(2, (32 // bits, -1))
    words = torch.zeros_like(fields[:, :, 0], dtype=torch.int32)
    for index in range(32 // bits):
        words |= fields[:, :, index].int() << bits * index
    return words.contiguous()


def _separate(words: torch.Tensor, bits: int) -> torch.Tensor:
    fields = [(words >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    return torch.cat(fields, dim=2).to(torch.uint8)
