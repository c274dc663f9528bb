"""Repairs of Triton's interpreter, which is wrong about bfloat16 in two places (seen in 3.6, 3.7).

float32 to bfloat16 truncates where a GPU rounds to nearest even, and `tl.dot` multiplies the bit
patterns of bfloat16 operands as if they were integers. Drop when the interpreter does both right.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def repair() -> None:
    """Patch the interpreter's builder; calling it again changes nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "bfloat16_repaired", False):
        return
    cast_impl, create_dot = builder.cast_impl, builder.create_dot

    def repaired_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_round(src.data), dst_type.scalar)
        return cast_impl(self, src, dst_type)

    def repaired_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        widened = [
            interpreter.TensorHandle(_widen(x.data), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        ]
        return create_dot(self, *widened, d, *precision)

    builder.cast_impl, builder.create_dot = repaired_cast, repaired_dot
    builder.bfloat16_repaired = True
