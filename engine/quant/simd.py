"""Typed loads for the compiled kernels of quantized formats, beside those of `layers.cpu_simd`."""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.engine.layers.cpu_simd import opaque

LANES = 16
_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _INTS = ir.VectorType(_I8, LANES), ir.VectorType(_I32, LANES)
_VECTOR = ir.VectorType(_F32, LANES)
_HAS_PERMUTE = bool(llvm.get_host_cpu_features().get("avx512f", False))


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(opaque(builder, address), kind.as_pointer())


def _pointer_to(kind: Any) -> Any:
    """Turns an address into a typed pointer for `carray`."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            address = opaque(builder, args[0])
            return builder.inttoptr(address, context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


bytes_at = _pointer_to(types.uint8)
signed_bytes_at = _pointer_to(types.int8)
words_at = _pointer_to(types.int32)
integers_at = _pointer_to(types.int64)
floats_at = _pointer_to(types.float32)


@intrinsic
def float_of(typing_context: Any, pattern: Any) -> Any:
    """The float32 with these bits (int32)."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def nearest(typing_context: Any, x: Any) -> Any:
    """The float32 rounded to an integer, halves to even, whatever fast math the caller allows."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = ir.FunctionType(_F32, [_F32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32")
        return builder.call(function, args)

    return types.float32(types.float32), codegen


@intrinsic
def byte_at(typing_context: Any, address: Any) -> Any:
    """The unsigned byte at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = builder.load(_pointer(builder, args[0], ir.IntType(8)))
        return builder.zext(value, ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def word_at(typing_context: Any, address: Any) -> Any:
    """The unsigned 32-bit word at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = builder.load(_pointer(builder, args[0], ir.IntType(32)))
        value.align = 1
        return builder.zext(value, ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def half_at(typing_context: Any, address: Any) -> Any:
    """The float16 at an address, as float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = builder.load(_pointer(builder, args[0], ir.HalfType()))
        value.align = 1
        return builder.fpext(value, ir.FloatType())

    return types.float32(types.int64), codegen


@intrinsic
def bfloat_at(typing_context: Any, address: Any) -> Any:
    """The bfloat16 at an address, as float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = builder.load(_pointer(builder, args[0], ir.IntType(16)))
        value.align = 1
        wide = builder.zext(value, ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, 16)), ir.FloatType())

    return types.float32(types.int64), codegen


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _field(builder: ir.IRBuilder, address: ir.Value, shift: ir.Value, mask: ir.Value) -> ir.Value:
    """(bytes >> shift) & mask of the 16 bytes at an address, as 16 integers of 32 bits."""
    loaded = builder.load(_pointer(builder, address, _BYTES))
    loaded.align = 1
    wide = builder.zext(loaded, _INTS)
    wide = builder.lshr(wide, _splat(builder, builder.trunc(shift, _I32)))
    return builder.and_(wide, _splat(builder, builder.trunc(mask, _I32)))


def _store_affine(
    builder: ir.IRBuilder, values: ir.Value, out: ir.Value, zero: Any, scale: Any, add: Any
) -> None:
    """out[:16] = (values - zero) * scale + add, the last step as one fused operation."""
    shifted = builder.fsub(values, _splat(builder, zero))
    signature = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32")
    result = builder.call(fma, [shifted, _splat(builder, scale), _splat(builder, add)])
    builder.store(result, _pointer(builder, out, _VECTOR)).align = 4


_OUTPUT = (types.int64, types.float32, types.float32, types.float32)


@intrinsic
def decode(
    typing_context: Any, out: Any, zero: Any, scale: Any, add: Any, low: Any, shift: Any, mask: Any
) -> Any:
    """out[:16] = (q - zero) * scale + add with q = (low[:16] >> shift) & mask."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, zero, scale, add, low, shift, mask = args
        values = builder.uitofp(_field(builder, low, shift, mask), _VECTOR)
        _store_affine(builder, values, out, zero, scale, add)
        return context.get_dummy_value()

    return types.void(*_OUTPUT, *[types.int64] * 3), codegen


@intrinsic
def decode_two(
    typing_context: Any,
    out: Any,
    zero: Any,
    scale: Any,
    add: Any,
    low: Any,
    low_shift: Any,
    low_mask: Any,
    high: Any,
    high_shift: Any,
    high_mask: Any,
    place: Any,
) -> Any:
    """As `decode`, with further bits: ((high[:16] >> high_shift) & high_mask) << place."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, zero, scale, add, low, low_shift, low_mask, high, high_shift, high_mask, place = args
        upper = builder.shl(
            _field(builder, high, high_shift, high_mask),
            _splat(builder, builder.trunc(place, _I32)),
        )
        joined = builder.or_(_field(builder, low, low_shift, low_mask), upper)
        _store_affine(builder, builder.uitofp(joined, _VECTOR), out, zero, scale, add)
        return context.get_dummy_value()

    return types.void(*_OUTPUT, *[types.int64] * 7), codegen


@intrinsic
def decode_bits(
    typing_context: Any,
    out: Any,
    zero: Any,
    scale: Any,
    add: Any,
    low: Any,
    shift: Any,
    mask: Any,
    bits: Any,
    place: Any,
) -> Any:
    """As `decode`, with one further bit a value: bit i of `bits`, moved to `place`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, zero, scale, add, low, shift, mask, bits, place = args
        lane = ir.Constant(_INTS, list(range(LANES)))
        word = _splat(builder, builder.trunc(bits, _I32))
        upper = builder.and_(builder.lshr(word, lane), ir.Constant(_INTS, [1] * LANES))
        upper = builder.shl(upper, _splat(builder, builder.trunc(place, _I32)))
        joined = builder.or_(_field(builder, low, shift, mask), upper)
        _store_affine(builder, builder.uitofp(joined, _VECTOR), out, zero, scale, add)
        return context.get_dummy_value()

    return types.void(*_OUTPUT, *[types.int64] * 5), codegen


@intrinsic
def decode_pairs(
    typing_context: Any, out: Any, zero: Any, scale: Any, add: Any, pairs: Any, bits: Any
) -> Any:
    """Two bits a value from the word `pairs`, lowest first, and a third from `bits`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, zero, scale, add, pairs, bits = args
        lane = ir.Constant(_INTS, list(range(LANES)))
        twice = ir.Constant(_INTS, list(range(0, 2 * LANES, 2)))
        one, two, three = (ir.Constant(_INTS, [value] * LANES) for value in (1, 2, 3))
        low = builder.lshr(_splat(builder, builder.trunc(pairs, _I32)), twice)
        upper = builder.lshr(_splat(builder, builder.trunc(bits, _I32)), lane)
        joined = builder.or_(builder.and_(low, three), builder.shl(builder.and_(upper, one), two))
        _store_affine(builder, builder.uitofp(joined, _VECTOR), out, zero, scale, add)
        return context.get_dummy_value()

    return types.void(*_OUTPUT, *[types.int64] * 2), codegen


@intrinsic
def decode_signed(
    typing_context: Any, out: Any, zero: Any, scale: Any, add: Any, source: Any
) -> Any:
    """out[:16] = (q - zero) * scale + add with q the 16 int8 at `source`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, zero, scale, add, source = args
        loaded = builder.load(_pointer(builder, source, _BYTES))
        loaded.align = 1
        values = builder.sitofp(builder.sext(loaded, _INTS), _VECTOR)
        _store_affine(builder, values, out, zero, scale, add)
        return context.get_dummy_value()

    return types.void(*_OUTPUT, types.int64), codegen


@intrinsic
def decode_table(
    typing_context: Any, out: Any, scale: Any, table: Any, low: Any, shift: Any
) -> Any:
    """out[:16] = table[(low[:16] >> shift) & 15] * scale, of a table of 16 floats."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, scale, table, low, shift = args
        index = _field(builder, low, shift, ir.Constant(_I64, 15))
        if _HAS_PERMUTE:
            entries = builder.load(_pointer(builder, table, _VECTOR))
            entries.align = 4
            function_type = ir.FunctionType(_VECTOR, [_VECTOR, _INTS])
            permute = cgutils.get_or_insert_function(
                builder.module, function_type, "llvm.x86.avx512.permvar.sf.512"
            )
            values = builder.call(permute, [entries, index])
        else:
            values = ir.Constant(_VECTOR, ir.Undefined)
            pointer = _pointer(builder, table, _F32)
            for lane in range(LANES):
                place = ir.Constant(_I32, lane)
                entry = builder.gep(pointer, [builder.extract_element(index, place)])
                values = builder.insert_element(values, builder.load(entry), place)
        result = builder.fmul(values, _splat(builder, scale))
        builder.store(result, _pointer(builder, out, _VECTOR)).align = 4
        return context.get_dummy_value()

    kinds = (types.int64, types.float32, *[types.int64] * 3)
    return types.void(*kinds), codegen


def _fp8_values(builder: ir.IRBuilder, source: ir.Value) -> ir.Value:
    """The 16 float8_e4m3fn at an address as float32.

    Their exponent and mantissa, moved to float32's place, are too small by 2^120 (the difference of
    the biases, 127 - 7), subnormals included. 0x7F is NaN.
    """

    def every(value: int) -> ir.Constant:
        return ir.Constant(_INTS, [value] * LANES)

    loaded = builder.load(_pointer(builder, source, _BYTES))
    loaded.align = 1
    wide = builder.zext(loaded, _INTS)
    magnitude = builder.and_(wide, every(0x7F))
    sign = builder.shl(builder.and_(wide, every(0x80)), every(24))
    pattern = builder.or_(builder.shl(magnitude, every(20)), sign)
    raised = ir.Constant(_VECTOR, [2.0**120] * LANES)
    values = builder.fmul(builder.bitcast(pattern, _VECTOR), raised)
    nan = ir.Constant(_VECTOR, [float("nan")] * LANES)
    return builder.select(builder.icmp_unsigned("==", magnitude, every(0x7F)), nan, values)


def _store_product(
    builder: ir.IRBuilder, values: ir.Value, factors: ir.Value, out: ir.Value
) -> None:
    result = builder.fmul(values, factors)
    builder.store(result, _pointer(builder, out, _VECTOR)).align = 4


@intrinsic
def decode_fp8(typing_context: Any, out: Any, scale: Any, source: Any) -> Any:
    """out[:16] = the 16 float8_e4m3fn at `source`, times scale."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, scale, source = args
        _store_product(builder, _fp8_values(builder, source), _splat(builder, scale), out)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


@intrinsic
def decode_lanes(typing_context: Any, out: Any, scales: Any, source: Any, kind: Any) -> Any:
    """out[i] = source[i] * scales[i] for 16 values, int8 (kind 1) or float8_e4m3fn (2)."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, scales, source, kind = args
        factors = builder.load(_pointer(builder, scales, _VECTOR))
        factors.align = 4
        loaded = builder.load(_pointer(builder, source, _BYTES))
        loaded.align = 1
        integers = builder.sitofp(builder.sext(loaded, _INTS), _VECTOR)
        is_integer = builder.icmp_unsigned("==", kind, ir.Constant(_I64, 1))
        values = builder.select(is_integer, integers, _fp8_values(builder, source))
        _store_product(builder, values, factors, out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def round_to_short(typing_context: Any, out: Any, kind: Any) -> Any:
    """out[:16] rounded to float16 (kind 0), to bfloat16 (1) or not at all, halves to even."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        def every(value: int) -> ir.Constant:
            return ir.Constant(_INTS, [value] * LANES)

        out, kind = args
        pointer = _pointer(builder, out, _VECTOR)
        values = builder.load(pointer)
        values.align = 4
        half = builder.fptrunc(values, ir.VectorType(ir.HalfType(), LANES))
        pattern = builder.bitcast(values, _INTS)
        odd = builder.and_(builder.lshr(pattern, every(16)), every(1))
        raised = builder.add(builder.add(pattern, every(0x7FFF)), odd)
        bfloat = builder.bitcast(builder.and_(raised, every(-65536)), _VECTOR)
        zero, one = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
        rounded = builder.select(builder.icmp_unsigned("==", kind, one), bfloat, values)
        is_half = builder.icmp_unsigned("==", kind, zero)
        rounded = builder.select(is_half, builder.fpext(half, _VECTOR), rounded)
        builder.store(rounded, pointer).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def dot(typing_context: Any, a: Any, b: Any, blocks: Any) -> Any:
    """Sum of a[i] * b[i] over 64 * blocks floats, in four vectors of partial sums."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        a, b, blocks = args
        left, right = _pointer(builder, a, _F32), _pointer(builder, b, _F32)
        signature_of_fma = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fma = cgutils.get_or_insert_function(
            builder.module, signature_of_fma, f"llvm.fma.v{LANES}f32"
        )
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(4)]
        for cell in sums:
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), cell)

        def load(base: ir.Value, index: ir.Value) -> ir.Value:
            place = builder.bitcast(builder.gep(base, [index]), _VECTOR.as_pointer())
            loaded = builder.load(place)
            loaded.align = 4
            return loaded

        with cgutils.for_range(builder, blocks) as loop:
            first = builder.mul(loop.index, ir.Constant(_I64, 4 * LANES))
            for part, cell in enumerate(sums):
                index = builder.add(first, ir.Constant(_I64, LANES * part))
                product = [load(left, index), load(right, index), builder.load(cell)]
                builder.store(builder.call(fma, product), cell)
        values = [builder.load(cell) for cell in sums]
        total = builder.fadd(builder.fadd(values[0], values[1]), builder.fadd(values[2], values[3]))
        for width in (8, 4, 2, 1):
            order = ir.Constant(_INTS, [lane ^ width for lane in range(LANES)])
            undefined = ir.Constant(_VECTOR, ir.Undefined)
            total = builder.fadd(total, builder.shuffle_vector(total, undefined, order))
        return builder.extract_element(total, ir.Constant(_I32, 0))

    return types.float32(*[types.int64] * 3), codegen
