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

LANES = 16
VECTORS = 3
PANEL = LANES * VECTORS
"""Columns of a panel: 3 vectors times 8 rows are 24 of AVX-512's 32 registers."""
ROWS: tuple[int, ...] = (8, 4, 2, 1)
"""Row counts that a tile is compiled for."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_LINE = 64
LINES_PER_K = PANEL * 4 // _LINE
"""Cache lines of a panel for each k."""


def _opaque(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """A pointer of whose address LLVM knows nothing."""
    kind = ir.FunctionType(_I64, [_I64])
    hidden = builder.asm(kind, "", "=r,0", [address], side_effect=False)
    return builder.inttoptr(hidden, _I8.as_pointer())


def _at(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())


def _load(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    loaded = builder.load(pointer)
    loaded.align = 4
    return loaded


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, zeros)


def _tile(rows: int, lines: int) -> Callable[..., Any]:
    """out[r, :] = start[r, :] + sum over k of x[r, k] * panel[k, :], for `rows` rows of one panel.

    Every output is one chain of fused multiply-adds in the order of k, whatever `rows` is: a row's
    result does not depend on the rows beside it. With each k, `lines` cache lines are asked for,
    from `ahead` on.
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
            vector = [ir.Constant(_I64, 4 * LANES * index) for index in range(VECTORS)]

            def row_bases(base: ir.Value, stride: ir.Value) -> list[ir.Value]:
                offsets = [builder.mul(stride, ir.Constant(_I64, row)) for row in range(rows)]
                return [_opaque(builder, builder.add(base, offset)) for offset in offsets]

            cells = [[cgutils.alloca_once(builder, _VECTOR) for _ in vector] for _ in range(rows)]
            for base, row in zip(row_bases(start, start_stride), cells, strict=True):
                for offset, cell in zip(vector, row, strict=True):
                    builder.store(_load(builder, _at(builder, base, offset, _VECTOR)), cell)
            inputs = row_bases(x, x_stride)
            weights, far = _opaque(builder, panel), _opaque(builder, ahead)
            prefetch = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]),
                "llvm.prefetch.p0",
            )
            read_to_l2 = [ir.Constant(_I32, value) for value in (0, 2, 1)]
            fma = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(_VECTOR, [_VECTOR] * 3),
                f"llvm.fma.v{LANES}f32",
            )
            with cgutils.for_range(builder, size) as loop:
                k = loop.index
                first = builder.mul(k, ir.Constant(_I64, 4 * PANEL))
                loaded = [
                    _load(builder, _at(builder, weights, builder.add(first, offset), _VECTOR))
                    for offset in vector
                ]
                for line in range(lines):
                    at = builder.mul(k, ir.Constant(_I64, _LINE * lines))
                    at = builder.add(at, ir.Constant(_I64, _LINE * line))
                    builder.call(prefetch, [builder.gep(far, [at]), *read_to_l2])
                step = builder.mul(k, ir.Constant(_I64, 4))
                for base, row in zip(inputs, cells, strict=True):
                    value = _splat(builder, _load(builder, _at(builder, base, step, _F32)))
                    for weight, cell in zip(loaded, row, strict=True):
                        total = builder.call(fma, [value, weight, builder.load(cell)])
                        builder.store(total, cell)
            for base, row in zip(row_bases(out, out_stride), cells, strict=True):
                for offset, cell in zip(vector, row, strict=True):
                    stored = builder.store(builder.load(cell), _at(builder, base, offset, _VECTOR))
                    stored.align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tile


def tiles(lines: int) -> Sequence[Callable[..., Any]]:
    """A tile function for each entry of ROWS."""
    return [_tile(rows, lines) for rows in ROWS]
