"""What the CPU kernels are made of and numba's own language cannot say: vectors of 16 floats, raw
addresses, an atomic counter, a request for cache lines, 2**x. Written as LLVM instructions.

LLVM maps a vector of 16 to one AVX-512 register, two of AVX2 or four of NEON. Functions that take a
builder write instructions for the intrinsics here and in `cpu_attention_tiles`; the intrinsics are
called by kernels. All take addresses (int64), not arrays. Nothing here knows what is computed.
"""

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
BYTE = ir.IntType(8)
I32, I64, F32, F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
VECTOR = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)


def opaque(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The address as a value that LLVM knows nothing about.

    Functions are compiled alone and optimized again once they are linked into their callers. In
    between, LLVM may have written a sum of integers used as an address as an offset from null,
    which the second round takes for undefined behaviour and drops.
    """
    kind = ir.FunctionType(address.type, [address.type])
    return builder.asm(kind, "", "=r,0", [address], side_effect=False)


def base_pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """A byte pointer to index from: made once, outside of loops, it costs them nothing."""
    return builder.inttoptr(opaque(builder, address), BYTE.as_pointer())


def pointer_to(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """The address as a pointer to this type."""
    return builder.inttoptr(opaque(builder, address), kind.as_pointer())


def address_at(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, size: int = 4) -> ir.Value:
    """Address of element `index` of `size` bytes."""
    return builder.add(base, builder.mul(index, ir.Constant(I64, size)))


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type = VECTOR) -> ir.Value:
    """The value of this type at an address; a vector need not be aligned to its size."""
    loaded = builder.load(pointer_to(builder, address, kind))
    loaded.align = 4 if kind in (VECTOR, F32) else 8
    return loaded


def load_element(
    builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type, size: int = 4
) -> ir.Value:
    """The value of this type at element `index` of `size` bytes behind a base."""
    place = builder.gep(base, [builder.mul(index, ir.Constant(I64, size))])
    loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
    loaded.align = 8 if kind is I64 else 4
    return loaded


def load_lanes(
    builder: ir.IRBuilder, base: ir.Value, index: ir.Value, signed_bytes: bool
) -> ir.Value:
    """LANES values from element `index` on behind a base: floats, or signed bytes as floats."""
    if not signed_bytes:
        return load_element(builder, base, index, VECTOR)
    kind = ir.VectorType(BYTE, LANES)
    loaded = builder.load(builder.bitcast(builder.gep(base, [index]), kind.as_pointer()))
    loaded.align = 1
    return builder.sitofp(builder.sext(loaded, INTS), VECTOR)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    """Write floats, which need not be aligned to their vector's size."""
    builder.store(value, pointer_to(builder, address, value.type)).align = 4


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """A vector that holds the scalar LANES times."""
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(INTS, [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def constant(value: float) -> ir.Constant:
    """The same of a float known now."""
    return ir.Constant(VECTOR, [value] * LANES)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once; scalars or vectors."""
    signature = ir.FunctionType(a.type, [a.type] * 3)
    suffix = f"v{LANES}f32" if isinstance(a.type, ir.VectorType) else "f32"
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.{suffix}")
    return builder.call(function, [a, b, c])


def reduce(builder: ir.IRBuilder, name: str, vector: ir.Value) -> ir.Value:
    """Horizontal sum or maximum, pairwise: the order is the same on every machine."""
    width = LANES
    while width > 1:
        width //= 2
        mask = [*range(width, 2 * width), *range(width, 2 * width)] * (LANES // (2 * width))
        indices = ir.Constant(INTS, (mask * LANES)[:LANES])
        other = builder.shuffle_vector(vector, ir.Constant(VECTOR, ir.Undefined), indices)
        vector = builder.fadd(vector, other) if name == "sum" else maximum(builder, vector, other)
    return builder.extract_element(vector, ir.Constant(I32, 0))


def maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger one, lane by lane; `b` where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


_EXP2_TERMS = [math.log(2) ** k / math.factorial(k) for k in range(7)]
_ROUND = 1.5 * 2.0**23  # adding it rounds to an integer, which lands in the low mantissa bits


def exp2_of(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x, relative error about 2e-7; below -125 it stays at 2**-125, NaN stays NaN.

    x = n + f with |f| <= 1/2: a polynomial in f, and n added to its exponent bits.
    """
    if isinstance(x.type, ir.VectorType):
        const = constant
        integers: ir.Type = INTS
        shift = ir.Constant(INTS, [23] * LANES)
    else:

        def const(value: float) -> ir.Constant:
            return ir.Constant(F32, value)

        integers, shift = I32, ir.Constant(I32, 23)
    x = builder.select(builder.fcmp_ordered("<", x, const(-125.0)), const(-125.0), x)
    shifted = builder.fadd(x, const(_ROUND))
    fraction = builder.fsub(x, builder.fsub(shifted, const(_ROUND)))
    value: ir.Value = const(_EXP2_TERMS[-1])
    for term in reversed(_EXP2_TERMS[:-1]):
        value = fma(builder, value, fraction, const(term))
    exponent = builder.shl(builder.bitcast(shifted, integers), shift)
    return builder.bitcast(builder.add(builder.bitcast(value, integers), exponent), x.type)


@intrinsic
def claim(typing_context: Any, address: Any) -> Any:
    """Atomically add one to the int64 at `address`; returns what it was."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = pointer_to(builder, args[0], I64)
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def prefetch(typing_context: Any, address: Any, num_bytes: Any) -> Any:
    """Ask for the cache lines of a range that is read soon."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        options = [ir.Constant(I32, value) for value in (0, 2, 1)]  # read, to L2, data
        lines = builder.sdiv(args[1], ir.Constant(I64, 64))
        with cgutils.for_range(builder, lines) as loop:
            address = address_at(builder, args[0], loop.index, 64)
            builder.call(function, [pointer_to(builder, address, ir.IntType(8)), *options])
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
        return builder.fptrunc(builder.bitcast(args[0], F64), F32)

    return types.float32(types.int64), codegen


@intrinsic
def exp2(typing_context: Any, x: Any) -> Any:
    """2**x for float32, in instructions that a loop around it can be vectorized over."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return exp2_of(builder, args[0])

    return types.float32(types.float32), codegen


@intrinsic
def sum_of_lanes(typing_context: Any, address: Any) -> Any:
    """The sum of LANES floats."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return reduce(builder, "sum", load(builder, args[0]))

    return types.float32(types.int64), codegen
