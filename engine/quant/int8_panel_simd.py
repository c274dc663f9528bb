"""The inner tile of the int8 matmul: AVX-512 VNNI's products of unsigned and signed bytes.

A panel is PANEL columns wide; of each, four weights along the input lie together, as the
instruction multiplies them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from headrace.engine.quant.panel_simd import (
    I64,
    LANES,
    ROWS,
    accumulate,
    base,
    load,
    offsets,
    rows_at,
    splat,
    store,
)

llvm.initialize_native_asmparser()  # an instruction is given by its name

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)


def _tile(rows: int, lines: int) -> Callable[..., Any]:
    """out[r, :] = (start + x[r] @ panel) * scales * row_scales[r] + bias: integers until the first
    product, rounded after each step."""

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_stride: Any,
        panel: Any,
        size: Any,
        start: Any,
        scales: Any,
        bias: Any,
        row_scales: Any,
        out: Any,
        out_stride: Any,
        ahead: Any,
    ) -> Any:
        """Addresses, and strides in bytes; `size`: a quarter of the input's."""

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            x, x_stride, panel, size, start, scales, bias, row_scales, out, out_stride, ahead = args
            cells = [[cgutils.alloca_once(builder, _INTS) for _ in offsets()] for _ in range(rows)]
            begin = base(builder, start)
            for index, offset in enumerate(offsets()):
                value = load(builder, begin, offset, _INTS)
                for row in cells:
                    builder.store(value, row[index])
            kind = ir.FunctionType(_INTS, [_INTS] * 3)

            def multiply_add(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
                # Not by its intrinsic, whose types differ between versions of LLVM.
                code, where = "vpdpbusd $3, $2, $0", "=v,0,v,v"
                return builder.asm(kind, code, where, [c, a, b], side_effect=False)

            inputs = rows_at(builder, x, x_stride, rows)
            accumulate(builder, inputs, panel, size, ahead, lines, cells, multiply_add)
            of_columns, added = base(builder, scales), base(builder, bias)
            of_rows = base(builder, row_scales)
            outputs = rows_at(builder, out, out_stride, rows)
            for index, (place, row) in enumerate(zip(outputs, cells, strict=True)):
                at = ir.Constant(I64, 4 * index)
                scale = splat(builder, load(builder, of_rows, at, ir.FloatType()))
                for offset, cell in zip(offsets(), row, strict=True):
                    value = builder.sitofp(builder.load(cell), _VECTOR)
                    value = builder.fmul(value, load(builder, of_columns, offset, _VECTOR))
                    value = builder.fmul(value, scale)
                    value = builder.fadd(value, load(builder, added, offset, _VECTOR))
                    store(builder, value, place, offset)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), codegen

    return tile


def tiles(lines: int) -> Sequence[Callable[..., Any]]:
    """A tile function for each entry of ROWS."""
    return [_tile(rows, lines) for rows in ROWS]
