"""Register tiles of the CPU's attention, as LLVM instructions: scores of some query rows against 16
or more keys, their weighted values, and a step of the online softmax between the two.

Flash attention's inner loops; nothing here knows blocks, heads or sequences: addresses and sizes
in, sums out. The tile sizes follow from how many vector registers there are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from headrace.engine.layers.cpu_simd import (
    F32,
    I32,
    I64,
    INTS,
    LANES,
    VECTOR,
    address_at,
    base_pointer,
    constant,
    exp2_of,
    fma,
    load,
    load_element,
    load_lanes,
    maximum,
    reduce,
    splat,
    store,
)

LOWEST = -1e30  # below any score, and safe to subtract from itself

_HAS_AVX512 = bool(llvm.get_host_cpu_features().get("avx512f", False))
_SCORE_TILES: tuple[int, ...] = (8, 4, 3, 2, 1) if _HAS_AVX512 else (4, 3, 2, 1)
"""Query rows that one tile of `scores` holds in registers, largest first."""
SCORE_BLOCKS = 2 if _HAS_AVX512 else 1
"""Groups of 16 keys in a tile of `scores`."""
_BYTE_SCORE_TILES: tuple[int, ...] = (4, 3, 2, 1)
BYTE_SCORE_BLOCKS = 4 if _HAS_AVX512 else 2
"""The same for keys in 8 bits, which few query rows share: enough sums at once to hide latency."""
_MIX_TILES: tuple[int, ...] = (6, 4, 3, 2, 1) if _HAS_AVX512 else (2, 1)
"""Query rows in a tile of `mix`."""
MIX_VECTORS = 4 if _HAS_AVX512 else 2
"""Vectors of 16 value columns in a tile of `mix`."""


def _score_tile(rows: int, blocks: int, signed_bytes: bool) -> Callable[..., Any]:
    """scores[r, j] = sum over d of query[r, d] * keys[d, j], for `rows` rows and 16 * `blocks`
    keys, floats or signed bytes; keys of a block lie [d, key_stride]."""

    @intrinsic
    def tile(
        typing_context: Any,
        query: Any,
        keys: Any,
        key_stride: Any,
        head_dim: Any,
        scores: Any,
        score_stride: Any,
    ) -> Any:
        """`keys`: address of an array of block addresses."""

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            query, keys, key_stride, head_dim, scores, score_stride = args
            bases = [
                base_pointer(
                    builder,
                    load(builder, address_at(builder, keys, ir.Constant(I64, block), 8), I64),
                )
                for block in range(blocks)
            ]
            row_bases = [
                base_pointer(
                    builder,
                    address_at(builder, query, builder.mul(head_dim, ir.Constant(I64, row))),
                )
                for row in range(rows)
            ]
            sums = [
                [cgutils.alloca_once(builder, VECTOR) for _ in range(blocks)] for _ in range(rows)
            ]
            for row in sums:
                for cell in row:
                    builder.store(constant(0.0), cell)
            with cgutils.for_range(builder, head_dim) as loop:
                offset = builder.mul(loop.index, key_stride)
                vectors = [load_lanes(builder, base, offset, signed_bytes) for base in bases]
                for row_base, row in zip(row_bases, sums, strict=True):
                    value = splat(builder, load_element(builder, row_base, loop.index, F32))
                    for vector, cell in zip(vectors, row, strict=True):
                        builder.store(fma(builder, value, vector, builder.load(cell)), cell)
            for index, row in enumerate(sums):
                start = builder.mul(score_stride, ir.Constant(I64, index))
                for block, cell in enumerate(row):
                    at = builder.add(start, ir.Constant(I64, LANES * block))
                    store(builder, builder.load(cell), address_at(builder, scores, at))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return tile


def _mix_tile(rows: int, vectors: int, signed_bytes: bool) -> Callable[..., Any]:
    """out[r, c] += sum over t of weights[r, t] * values[t, c], for `rows` rows and 16 * `vectors`
    columns of floats or signed bytes; t runs over the tokens of several blocks, each
    [16, head_dim]."""

    @intrinsic
    def tile(
        typing_context: Any,
        weights: Any,
        weight_stride: Any,
        values: Any,
        column: Any,
        num_tokens: Any,
        head_dim: Any,
        out: Any,
    ) -> Any:
        """`values`: address of an array of block addresses; `column`: the first one."""

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            weights, weight_stride, values, column, num_tokens, head_dim, out = args
            addresses = [
                [
                    address_at(
                        builder,
                        out,
                        builder.add(
                            builder.mul(head_dim, ir.Constant(I64, row)),
                            builder.add(column, ir.Constant(I64, LANES * vector)),
                        ),
                    )
                    for vector in range(vectors)
                ]
                for row in range(rows)
            ]
            cells = [
                [cgutils.alloca_once(builder, VECTOR) for _ in range(vectors)] for _ in range(rows)
            ]
            for address_row, cell_row in zip(addresses, cells, strict=True):
                for address, cell in zip(address_row, cell_row, strict=True):
                    builder.store(load(builder, address), cell)
            lanes = ir.Constant(I64, LANES)
            row_bases = [
                base_pointer(
                    builder,
                    address_at(builder, weights, builder.mul(weight_stride, ir.Constant(I64, row))),
                )
                for row in range(rows)
            ]
            num_blocks = builder.sdiv(builder.add(num_tokens, ir.Constant(I64, LANES - 1)), lanes)
            with cgutils.for_range(builder, num_blocks) as block_loop:
                base = base_pointer(
                    builder, load(builder, address_at(builder, values, block_loop.index, 8), I64)
                )
                first = builder.mul(block_loop.index, lanes)
                left = builder.sub(num_tokens, first)
                count = builder.select(builder.icmp_signed("<", left, lanes), left, lanes)
                with cgutils.for_range(builder, count) as loop:
                    start = builder.add(builder.mul(loop.index, head_dim), column)
                    loaded = [
                        load_lanes(
                            builder,
                            base,
                            builder.add(start, ir.Constant(I64, LANES * vector)),
                            signed_bytes,
                        )
                        for vector in range(vectors)
                    ]
                    token = builder.add(first, loop.index)
                    for row_base, cell_row in zip(row_bases, cells, strict=True):
                        weight = splat(builder, load_element(builder, row_base, token, F32))
                        for vector, cell in zip(loaded, cell_row, strict=True):
                            builder.store(fma(builder, weight, vector, builder.load(cell)), cell)
            for address_row, cell_row in zip(addresses, cells, strict=True):
                for address, cell in zip(address_row, cell_row, strict=True):
                    store(builder, builder.load(cell), address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


def _score_rows(sizes: Sequence[int], tiles: Sequence[Callable[..., Any]]) -> Any:
    """scores of any number of rows: the largest tile as often as it fits, then the next."""
    size, tile = sizes[0], tiles[0]
    if len(sizes) == 1:

        @njit
        def rest(
            rows: Any, query: Any, keys: Any, stride: Any, head_dim: Any, scores: Any, chunk: Any
        ) -> None:
            return

    else:
        rest = _score_rows(sizes[1:], tiles[1:])

    @njit
    def run(
        rows: Any, query: Any, keys: Any, stride: Any, head_dim: Any, scores: Any, chunk: Any
    ) -> None:
        row = 0
        while rows - row >= size:
            tile(
                query + 4 * row * head_dim, keys, stride, head_dim, scores + 4 * row * chunk, chunk
            )
            row += size
        if row < rows:
            rest(
                rows - row,
                query + 4 * row * head_dim,
                keys,
                stride,
                head_dim,
                scores + 4 * row * chunk,
                chunk,
            )

    return run


def _mix_rows(sizes: Sequence[int], tiles: Sequence[Callable[..., Any]]) -> Any:
    """Weighted values of any number of rows, for one group of columns."""
    size, tile = sizes[0], tiles[0]
    if len(sizes) == 1:

        @njit
        def rest(
            rows: Any, weights: Any, chunk: Any, values: Any, column: Any, n: Any, d: Any, out: Any
        ) -> None:
            return

    else:
        rest = _mix_rows(sizes[1:], tiles[1:])

    @njit
    def run(
        rows: Any, weights: Any, chunk: Any, values: Any, column: Any, n: Any, d: Any, out: Any
    ) -> None:
        row = 0
        while rows - row >= size:
            tile(weights + 4 * row * chunk, chunk, values, column, n, d, out + 4 * row * d)
            row += size
        if row < rows:
            rest(
                rows - row,
                weights + 4 * row * chunk,
                chunk,
                values,
                column,
                n,
                d,
                out + 4 * row * d,
            )

    return run


def score_rows(blocks: int, signed_bytes: bool = False) -> Any:
    """A function that scores any number of query rows against 16 * `blocks` keys."""
    sizes = _BYTE_SCORE_TILES if signed_bytes else _SCORE_TILES
    return _score_rows(sizes, [_score_tile(rows, blocks, signed_bytes) for rows in sizes])


def mix_rows(vectors: int, signed_bytes: bool = False) -> Any:
    """A function that adds any number of rows' weighted values, 16 * `vectors` columns of them."""
    return _mix_rows(_MIX_TILES, [_mix_tile(rows, vectors, signed_bytes) for rows in _MIX_TILES])


STATE_FLOATS = LANES + 1
"""Of a row's online softmax: the reference that its weights are relative to, then LANES sums."""

_SLACK = 8.0
"""How far, in powers of two, scores may pass the reference before it moves: weights stay below
2**8, which costs no precision, and what was accumulated seldom has to be rescaled."""


@intrinsic
def softmax_step(
    typing_context: Any, scores: Any, num_vectors: Any, low: Any, high: Any, state: Any
) -> Any:
    """One step of the online softmax, base 2, over a row of scores (overwritten by its weights).

    Only scores [low, high) count. `state`: STATE_FLOATS floats, at first the lowest score and
    zeros. Returns the factor by which what was accumulated before must shrink.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        scores, num_vectors, low, high, state = args
        low32 = splat(builder, builder.trunc(low, I32))
        width = splat(builder, builder.trunc(builder.sub(high, low), I32))
        lane = ir.Constant(INTS, list(range(LANES)))

        def visible(index: ir.Value) -> ir.Value:
            start = builder.trunc(builder.mul(index, ir.Constant(I64, LANES)), I32)
            position = builder.sub(builder.add(splat(builder, start), lane), low32)
            return builder.icmp_unsigned("<", position, width)

        peak = cgutils.alloca_once(builder, VECTOR)
        builder.store(constant(LOWEST), peak)
        with cgutils.for_range(builder, num_vectors) as loop:
            address = address_at(builder, scores, builder.mul(loop.index, ir.Constant(I64, LANES)))
            score = builder.select(visible(loop.index), load(builder, address), constant(LOWEST))
            builder.store(maximum(builder, score, builder.load(peak)), peak)
        sums = builder.add(state, ir.Constant(I64, 4))
        reference = cgutils.alloca_once(builder, F32)
        total = cgutils.alloca_once(builder, VECTOR)
        shrink = cgutils.alloca_once(builder, F32)
        old = load(builder, state, F32)
        builder.store(old, reference)
        builder.store(load(builder, sums), total)
        builder.store(ir.Constant(F32, 1.0), shrink)
        limit = splat(builder, builder.fadd(old, ir.Constant(F32, _SLACK)))
        over = builder.fcmp_ordered(">", builder.load(peak), limit)
        bits = ir.IntType(LANES)
        any_over = builder.icmp_unsigned("!=", builder.bitcast(over, bits), ir.Constant(bits, 0))
        with builder.if_then(any_over, likely=False):
            new = maximum(builder, reduce(builder, "max", builder.load(peak)), old)
            factor = exp2_of(builder, builder.fsub(old, new))
            builder.store(factor, shrink)
            builder.store(new, reference)
            builder.store(builder.fmul(builder.load(total), splat(builder, factor)), total)
            store(builder, new, state)
        relative = splat(builder, builder.load(reference))
        with cgutils.for_range(builder, num_vectors) as loop:
            address = address_at(builder, scores, builder.mul(loop.index, ir.Constant(I64, LANES)))
            weight = exp2_of(builder, builder.fsub(load(builder, address), relative))
            weight = builder.select(visible(loop.index), weight, constant(0.0))
            store(builder, weight, address)
            builder.store(builder.fadd(builder.load(total), weight), total)
        store(builder, builder.load(total), sums)
        return builder.load(shrink)

    return types.float32(*[types.int64] * 5), codegen
