"""Building blocks of the CPU kernels that numba's loops cannot express: raw addresses, an atomic
counter, and register-tiled loops over vectors of 16 floats, written as LLVM instructions.

LLVM maps a vector of 16 to one AVX-512 register, two of AVX2 or four of NEON; the tile sizes follow
from how many registers there are. All functions take addresses (int64), not arrays.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
_BYTE = ir.IntType(8)
_I32, _I64, _F32, _F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
_VECTOR = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)
LOWEST = -1e30  # below any score, and safe to subtract from itself

_HAS_AVX512 = bool(llvm.get_host_cpu_features().get("avx512f", False))
SCORE_TILES: tuple[int, ...] = (8, 4, 3, 2, 1) if _HAS_AVX512 else (4, 3, 2, 1)
"""Query rows that one tile of `scores` holds in registers, largest first."""
SCORE_BLOCKS = 2 if _HAS_AVX512 else 1
"""Groups of 16 keys in a tile of `scores`."""
BYTE_SCORE_TILES: tuple[int, ...] = (4, 3, 2, 1)
BYTE_SCORE_BLOCKS = 4 if _HAS_AVX512 else 2
"""The same for keys in 8 bits, which few query rows share: enough sums at once to hide latency."""
MIX_TILES: tuple[int, ...] = (6, 4, 3, 2, 1) if _HAS_AVX512 else (2, 1)
"""Query rows in a tile of `mix`."""
MIX_VECTORS = 4 if _HAS_AVX512 else 2
"""Vectors of 16 value columns in a tile of `mix`."""


def opaque(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The address as a value that LLVM knows nothing about.

    Functions are compiled alone and optimized again once they are linked into their callers. In
    between, LLVM may have written a sum of integers used as an address as an offset from null,
    which the second round takes for undefined behaviour and drops.
    """
    kind = ir.FunctionType(address.type, [address.type])
    return builder.asm(kind, "", "=r,0", [address], side_effect=False)


def _base(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """A byte pointer to index from: made once, outside of loops, it costs them nothing."""
    return builder.inttoptr(opaque(builder, address), _BYTE.as_pointer())


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(opaque(builder, address), kind.as_pointer())


def _at(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, size: int = 4) -> ir.Value:
    """Address of element `index` of `size` bytes."""
    return builder.add(base, builder.mul(index, ir.Constant(_I64, size)))


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type = _VECTOR) -> ir.Value:
    loaded = builder.load(_pointer(builder, address, kind))
    loaded.align = 4 if kind in (_VECTOR, _F32) else 8
    return loaded


def _element(
    builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type, size: int = 4
) -> ir.Value:
    """The value of this type at element `index` of `size` bytes behind a base."""
    place = builder.gep(base, [builder.mul(index, ir.Constant(_I64, size))])
    loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
    loaded.align = 8 if kind is _I64 else 4
    return loaded


def _lanes(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, signed_bytes: bool) -> ir.Value:
    """LANES values from element `index` on behind a base: floats, or signed bytes as floats."""
    if not signed_bytes:
        return _element(builder, base, index, _VECTOR)
    kind = ir.VectorType(_BYTE, LANES)
    loaded = builder.load(builder.bitcast(builder.gep(base, [index]), kind.as_pointer()))
    loaded.align = 1
    return builder.sitofp(builder.sext(loaded, _INTS), _VECTOR)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, _pointer(builder, address, value.type)).align = 4


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(_INTS, [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [value] * LANES)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    signature = ir.FunctionType(a.type, [a.type] * 3)
    suffix = f"v{LANES}f32" if isinstance(a.type, ir.VectorType) else "f32"
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.{suffix}")
    return builder.call(function, [a, b, c])


def _reduce(builder: ir.IRBuilder, name: str, vector: ir.Value) -> ir.Value:
    """Horizontal sum or maximum, pairwise: the order is the same on every machine."""
    width = LANES
    while width > 1:
        width //= 2
        mask = [*range(width, 2 * width), *range(width, 2 * width)] * (LANES // (2 * width))
        indices = ir.Constant(_INTS, (mask * LANES)[:LANES])
        other = builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), indices)
        vector = builder.fadd(vector, other) if name == "sum" else _maximum(builder, vector, other)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


_EXP2_TERMS = [math.log(2) ** k / math.factorial(k) for k in range(7)]
_ROUND = 1.5 * 2.0**23  # adding it rounds to an integer, which lands in the low mantissa bits


def _exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x, relative error about 2e-7; below -125 it stays at 2**-125, NaN stays NaN.

    x = n + f with |f| <= 1/2: a polynomial in f, and n added to its exponent bits.
    """
    if isinstance(x.type, ir.VectorType):
        const = _constant
        integers: ir.Type = _INTS
        shift = ir.Constant(_INTS, [23] * LANES)
    else:

        def const(value: float) -> ir.Constant:
            return ir.Constant(_F32, value)

        integers, shift = _I32, ir.Constant(_I32, 23)
    x = builder.select(builder.fcmp_ordered("<", x, const(-125.0)), const(-125.0), x)
    shifted = builder.fadd(x, const(_ROUND))
    fraction = builder.fsub(x, builder.fsub(shifted, const(_ROUND)))
    value: ir.Value = const(_EXP2_TERMS[-1])
    for term in reversed(_EXP2_TERMS[:-1]):
        value = _fma(builder, value, fraction, const(term))
    exponent = builder.shl(builder.bitcast(shifted, integers), shift)
    return builder.bitcast(builder.add(builder.bitcast(value, integers), exponent), x.type)


@intrinsic
def claim(typing_context: Any, address: Any) -> Any:
    """Atomically add one to the int64 at `address`; returns what it was."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = _pointer(builder, args[0], _I64)
        return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def prefetch(typing_context: Any, address: Any, num_bytes: Any) -> Any:
    """Ask for the cache lines of a range that is read soon."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        options = [ir.Constant(_I32, value) for value in (0, 2, 1)]  # read, to L2, data
        lines = builder.sdiv(args[1], ir.Constant(_I64, 64))
        with cgutils.for_range(builder, lines) as loop:
            address = _at(builder, args[0], loop.index, 64)
            builder.call(function, [_pointer(builder, address, ir.IntType(8)), *options])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def floats_at(typing_context: Any, address: Any) -> Any:
    """The address as a pointer to float32, for `carray`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address = opaque(builder, args[0])
        return builder.inttoptr(address, context.get_value_type(signature.return_type))

    pointer = types.CPointer(types.float32)  # type: ignore[attr-defined]
    return pointer(types.int64), codegen


@intrinsic
def integers_at(typing_context: Any, address: Any) -> Any:
    """The address as a pointer to int64, for `carray`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address = opaque(builder, args[0])
        return builder.inttoptr(address, context.get_value_type(signature.return_type))

    pointer = types.CPointer(types.int64)  # type: ignore[attr-defined]
    return pointer(types.int64), codegen


@intrinsic
def as_float(typing_context: Any, bits: Any) -> Any:
    """The float64 whose bits an int64 holds, rounded to float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.fptrunc(builder.bitcast(args[0], _F64), _F32)

    return types.float32(types.int64), codegen


@intrinsic
def exp2(typing_context: Any, x: Any) -> Any:
    """2**x for float32, in instructions that a loop around it can be vectorized over."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _exp2(builder, args[0])

    return types.float32(types.float32), codegen


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
                _base(
                    builder,
                    _load(builder, _at(builder, keys, ir.Constant(_I64, block), 8), _I64),
                )
                for block in range(blocks)
            ]
            row_bases = [
                _base(
                    builder,
                    _at(builder, query, builder.mul(head_dim, ir.Constant(_I64, row))),
                )
                for row in range(rows)
            ]
            sums = [
                [cgutils.alloca_once(builder, _VECTOR) for _ in range(blocks)] for _ in range(rows)
            ]
            for row in sums:
                for cell in row:
                    builder.store(_constant(0.0), cell)
            with cgutils.for_range(builder, head_dim) as loop:
                offset = builder.mul(loop.index, key_stride)
                vectors = [_lanes(builder, base, offset, signed_bytes) for base in bases]
                for row_base, row in zip(row_bases, sums, strict=True):
                    value = _splat(builder, _element(builder, row_base, loop.index, _F32))
                    for vector, cell in zip(vectors, row, strict=True):
                        builder.store(_fma(builder, value, vector, builder.load(cell)), cell)
            for index, row in enumerate(sums):
                start = builder.mul(score_stride, ir.Constant(_I64, index))
                for block, cell in enumerate(row):
                    at = builder.add(start, ir.Constant(_I64, LANES * block))
                    _store(builder, builder.load(cell), _at(builder, scores, at))
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
                    _at(
                        builder,
                        out,
                        builder.add(
                            builder.mul(head_dim, ir.Constant(_I64, row)),
                            builder.add(column, ir.Constant(_I64, LANES * vector)),
                        ),
                    )
                    for vector in range(vectors)
                ]
                for row in range(rows)
            ]
            cells = [
                [cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(rows)
            ]
            for address_row, cell_row in zip(addresses, cells, strict=True):
                for address, cell in zip(address_row, cell_row, strict=True):
                    builder.store(_load(builder, address), cell)
            lanes = ir.Constant(_I64, LANES)
            row_bases = [
                _base(
                    builder,
                    _at(builder, weights, builder.mul(weight_stride, ir.Constant(_I64, row))),
                )
                for row in range(rows)
            ]
            num_blocks = builder.sdiv(builder.add(num_tokens, ir.Constant(_I64, LANES - 1)), lanes)
            with cgutils.for_range(builder, num_blocks) as block_loop:
                base = _base(
                    builder, _load(builder, _at(builder, values, block_loop.index, 8), _I64)
                )
                first = builder.mul(block_loop.index, lanes)
                left = builder.sub(num_tokens, first)
                count = builder.select(builder.icmp_signed("<", left, lanes), left, lanes)
                with cgutils.for_range(builder, count) as loop:
                    start = builder.add(builder.mul(loop.index, head_dim), column)
                    loaded = [
                        _lanes(
                            builder,
                            base,
                            builder.add(start, ir.Constant(_I64, LANES * vector)),
                            signed_bytes,
                        )
                        for vector in range(vectors)
                    ]
                    token = builder.add(first, loop.index)
                    for row_base, cell_row in zip(row_bases, cells, strict=True):
                        weight = _splat(builder, _element(builder, row_base, token, _F32))
                        for vector, cell in zip(loaded, cell_row, strict=True):
                            builder.store(_fma(builder, weight, vector, builder.load(cell)), cell)
            for address_row, cell_row in zip(addresses, cells, strict=True):
                for address, cell in zip(address_row, cell_row, strict=True):
                    _store(builder, builder.load(cell), address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


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
        low32 = _splat(builder, builder.trunc(low, _I32))
        width = _splat(builder, builder.trunc(builder.sub(high, low), _I32))
        lane = ir.Constant(_INTS, list(range(LANES)))

        def visible(index: ir.Value) -> ir.Value:
            start = builder.trunc(builder.mul(index, ir.Constant(_I64, LANES)), _I32)
            position = builder.sub(builder.add(_splat(builder, start), lane), low32)
            return builder.icmp_unsigned("<", position, width)

        peak = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_constant(LOWEST), peak)
        with cgutils.for_range(builder, num_vectors) as loop:
            address = _at(builder, scores, builder.mul(loop.index, ir.Constant(_I64, LANES)))
            score = builder.select(visible(loop.index), _load(builder, address), _constant(LOWEST))
            builder.store(_maximum(builder, score, builder.load(peak)), peak)
        sums = builder.add(state, ir.Constant(_I64, 4))
        reference = cgutils.alloca_once(builder, _F32)
        total = cgutils.alloca_once(builder, _VECTOR)
        shrink = cgutils.alloca_once(builder, _F32)
        old = _load(builder, state, _F32)
        builder.store(old, reference)
        builder.store(_load(builder, sums), total)
        builder.store(ir.Constant(_F32, 1.0), shrink)
        limit = _splat(builder, builder.fadd(old, ir.Constant(_F32, _SLACK)))
        over = builder.fcmp_ordered(">", builder.load(peak), limit)
        bits = ir.IntType(LANES)
        any_over = builder.icmp_unsigned("!=", builder.bitcast(over, bits), ir.Constant(bits, 0))
        with builder.if_then(any_over, likely=False):
            new = _maximum(builder, _reduce(builder, "max", builder.load(peak)), old)
            factor = _exp2(builder, builder.fsub(old, new))
            builder.store(factor, shrink)
            builder.store(new, reference)
            builder.store(builder.fmul(builder.load(total), _splat(builder, factor)), total)
            _store(builder, new, state)
        relative = _splat(builder, builder.load(reference))
        with cgutils.for_range(builder, num_vectors) as loop:
            address = _at(builder, scores, builder.mul(loop.index, ir.Constant(_I64, LANES)))
            weight = _exp2(builder, builder.fsub(_load(builder, address), relative))
            weight = builder.select(visible(loop.index), weight, _constant(0.0))
            _store(builder, weight, address)
            builder.store(builder.fadd(builder.load(total), weight), total)
        _store(builder, builder.load(total), sums)
        return builder.load(shrink)

    return types.float32(*[types.int64] * 5), codegen


@intrinsic
def sum_of_lanes(typing_context: Any, address: Any) -> Any:
    """The sum of LANES floats."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _reduce(builder, "sum", _load(builder, args[0]))

    return types.float32(types.int64), codegen


def score_tiles(blocks: int) -> Sequence[Callable[..., Any]]:
    """A tile function for each entry of SCORE_TILES."""
    return [_score_tile(rows, blocks, signed_bytes=False) for rows in SCORE_TILES]


def byte_score_tiles(blocks: int) -> Sequence[Callable[..., Any]]:
    """A tile function for each entry of BYTE_SCORE_TILES."""
    return [_score_tile(rows, blocks, signed_bytes=True) for rows in BYTE_SCORE_TILES]


def mix_tiles(vectors: int, signed_bytes: bool = False) -> Sequence[Callable[..., Any]]:
    """A tile function for each entry of MIX_TILES."""
    return [_mix_tile(rows, vectors, signed_bytes) for rows in MIX_TILES]
