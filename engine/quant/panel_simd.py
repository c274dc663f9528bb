"""The inner tile of the float32 matmul, written as LLVM instructions.

Addresses are int64. Each base becomes an opaque pointer once, outside the loop, and the loop
indexes from it: LLVM then neither takes a sum of integers for an offset from null (and drops the
load) nor loses the addressing modes of the machine.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from headrace.engine.layers.cpu_simd import opaque

LANES = 16
VECTORS = 3
PANEL = LANES * VECTORS
"""Columns of a panel: 3 vectors times 8 rows are 24 of AVX-512's 32 registers."""
ROWS: tuple[int, ...] = (8, 4, 2, 1)
"""Row counts that a tile is compiled for."""

_I8, _I32, I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_LINE = 64
LINES_PER_K = PANEL * 4 // _LINE
"""Cache lines of a panel for each k."""


def base(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """A byte pointer to index from."""
    return builder.inttoptr(opaque(builder, address), _I8.as_pointer())


def rows_at(builder: ir.IRBuilder, first: ir.Value, stride: ir.Value, rows: int) -> list[ir.Value]:
    """A pointer to each of the rows, `stride` bytes apart."""
    offsets = [builder.mul(stride, ir.Constant(I64, row)) for row in range(rows)]
    return [base(builder, builder.add(first, offset)) for offset in offsets]


def load(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
    """The value of this type `offset` bytes behind a pointer."""
    loaded = builder.load(builder.bitcast(builder.gep(pointer, [offset]), kind.as_pointer()))
    loaded.align = 4
    return loaded


def store(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, offset: ir.Value) -> None:
    place = builder.bitcast(builder.gep(pointer, [offset]), value.type.as_pointer())
    builder.store(value, place).align = 4


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, zeros)


def offsets() -> list[ir.Constant]:
    """Of a panel's vectors in a row, in bytes."""
    return [ir.Constant(I64, 4 * LANES * index) for index in range(VECTORS)]


def accumulate(
    builder: ir.IRBuilder,
    inputs: Sequence[ir.Value],
    panel: ir.Value,
    size: ir.Value,
    ahead: ir.Value,
    lines: int,
    cells: Sequence[Sequence[ir.Value]],
    multiply_add: Callable[[ir.Value, ir.Value, ir.Value], ir.Value],
) -> None:
    """cells[r][v] = multiply_add(inputs[r][k], panel[k][v], cells[r][v]) for each of `size` k.

    A k is 4 bytes of each input and PANEL times 4 bytes of the panel. With each, `lines` cache
    lines are asked for, from `ahead` on.
    """
    element = cells[0][0].type.pointee.element
    weights, far = base(builder, panel), base(builder, ahead)
    prefetch = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]),
        "llvm.prefetch.p0",
    )
    read_to_l2 = [ir.Constant(_I32, value) for value in (0, 2, 1)]
    with cgutils.for_range(builder, size) as loop:
        k = loop.index
        first = builder.mul(k, ir.Constant(I64, 4 * PANEL))
        vector = ir.VectorType(element, LANES)
        loaded = [
            load(builder, weights, builder.add(first, offset), vector) for offset in offsets()
        ]
        for line in range(lines):
            at = builder.mul(k, ir.Constant(I64, _LINE * lines))
            at = builder.add(at, ir.Constant(I64, _LINE * line))
            builder.call(prefetch, [builder.gep(far, [at]), *read_to_l2])
        step = builder.mul(k, ir.Constant(I64, 4))
        for place, row in zip(inputs, cells, strict=True):
            value = splat(builder, load(builder, place, step, element))
            for weight, cell in zip(loaded, row, strict=True):
                builder.store(multiply_add(value, weight, builder.load(cell)), cell)


def _tile(rows: int, lines: int) -> Callable[..., Any]:
    """out[r, :] = start[r, :] + sum over k of x[r, k] * panel[k, :], for `rows` rows of one panel.

    Every output is one chain of fused multiply-adds in the order of k, whatever `rows` is: a row's
    result does not depend on the rows beside it.
    """

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_stride: Any,
        panel: Any,
        size: Any,
        start: Any,
        start_stride: Any,
        out: Any,
        out_stride: Any,
        ahead: Any,
    ) -> Any:
        """Addresses, and strides in bytes; `size`: of k."""

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            x, x_stride, panel, size, start, start_stride, out, out_stride, ahead = args
            cells = [
                [cgutils.alloca_once(builder, _VECTOR) for _ in offsets()] for _ in range(rows)
            ]
            for place, row in zip(rows_at(builder, start, start_stride, rows), cells, strict=True):
                for offset, cell in zip(offsets(), row, strict=True):
                    builder.store(load(builder, place, offset, _VECTOR), cell)
            fma = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(_VECTOR, [_VECTOR] * 3),
                f"llvm.fma.v{LANES}f32",
            )

            def multiply_add(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
                return builder.call(fma, [a, b, c])

            inputs = rows_at(builder, x, x_stride, rows)
            accumulate(builder, inputs, panel, size, ahead, lines, cells, multiply_add)
            for place, row in zip(rows_at(builder, out, out_stride, rows), cells, strict=True):
                for offset, cell in zip(offsets(), row, strict=True):
                    store(builder, builder.load(cell), place, offset)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tile


def tiles(lines: int) -> Sequence[Callable[..., Any]]:
    """A tile function for each entry of ROWS."""
    return [_tile(rows, lines) for rows in ROWS]
