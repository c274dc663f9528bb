"""Matmuls with packed weights: rows are unpacked where they are multiplied, never the whole matrix.

A few rows of activations meet each row of weights while it is in the first-level cache; more of
them meet a tile of rows in a scratch buffer that all layers share, by an ordinary matmul. Compiled
kernels unpack where numba is installed; elsewhere each format unpacks in plain torch.
"""

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.quant.device_matrix import DeviceMatrix
from headrace.engine.quant.native import Kernel, kernel

logger = logging.getLogger(__name__)

_FEW = 12
"""Rows of activations up to which rows of weights are multiplied one by one."""
_TILE_FLOATS = 1 << 18  # 1 MiB: half of what a core's second-level cache holds
_BLOCK = 256  # a row is unpacked in whole blocks, none of them longer


class PackedMatrix(Protocol):
    """[out_features, in_features], packed along rows."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def kernel(self) -> tuple[str, str]:
        """Module and prefix of the compiled `Loops`."""
        ...

    def fields(self) -> Sequence[int]:
        """What the kernels read: addresses and sizes, at most 10."""
        ...

    def unpack(self, first: int, last: int) -> Tensor:
        """Rows [first, last) as float32 [last - first, in_features], in plain torch."""
        ...

    def placed(self) -> "PackedMatrix | DeviceMatrix":
        """In the Triton kernels' layout where they multiply it, else as it is; EngineError: on this
        device nothing does."""
        ...


class Loops(NamedTuple):
    """A format's compiled kernels: `fill` unpacks rows, `few` multiplies few rows by each."""

    fill: Kernel
    few: Kernel


def multiply(matrix: PackedMatrix | DeviceMatrix, bias: Tensor | None, x: Tensor) -> Tensor:
    """x [rows, in_features] times the transposed matrix plus bias (float32), in x's dtype;
    computed in float32."""
    if isinstance(matrix, DeviceMatrix):
        return matrix.multiply(bias, x)
    wide = x.float().contiguous()
    loops = _compiled(matrix)
    if loops is not None and len(wide) <= _FEW:
        return _multiply_few(loops.few, matrix, bias, wide).to(x.dtype)
    y = torch.empty(len(wide), matrix.out_features, device=x.device)
    step = max(64, _TILE_FLOATS // matrix.in_features // 16 * 16)
    for first in range(0, matrix.out_features, step):
        last = min(first + step, matrix.out_features)
        rows = unpacked(matrix, first, last)
        y[:, first:last] = wide @ rows.T
    if bias is not None:
        y += bias
    return y.to(x.dtype)


def unpacked(matrix: PackedMatrix, first: int, last: int) -> Tensor:
    """Rows [first, last) as float32; the next call overwrites them."""
    loops = _compiled(matrix)
    return matrix.unpack(first, last) if loops is None else _fill(loops.fill, matrix, first, last)


def _fill(run: Kernel, matrix: PackedMatrix, first: int, last: int) -> Tensor:
    stride = matrix.in_features + -matrix.in_features % _BLOCK
    scratch = _scratch((last - first) * stride)
    fields = _as_array(matrix)
    run(fields.ctypes.data, first, last - first, scratch.data_ptr(), stride, 16)
    return scratch[: (last - first) * stride].view(-1, stride)[:, : matrix.in_features]


def expanded(matrix: PackedMatrix) -> Tensor:
    """All of it as float32 in memory of its own, by the compiled kernels where they run."""
    out = torch.empty(matrix.out_features, matrix.in_features)
    step = max(64, _TILE_FLOATS // matrix.in_features // 16 * 16)
    for first in range(0, matrix.out_features, step):
        last = min(first + step, matrix.out_features)
        out[first:last] = unpacked(matrix, first, last)
    return out


def whole(matrix: PackedMatrix | DeviceMatrix) -> Tensor:
    """All of it as float32 in plain torch."""
    if isinstance(matrix, DeviceMatrix):
        raise TypeError("dequantize takes what create_weights returned, not what process did")
    return matrix.unpack(0, matrix.out_features)


def _multiply_few(run: Kernel, matrix: PackedMatrix, bias: Tensor | None, x: Tensor) -> Tensor:
    y = torch.empty(len(x), matrix.out_features)
    stride = matrix.in_features + -matrix.in_features % _BLOCK
    scratch = _scratch(stride * torch.get_num_threads())
    fields = _as_array(matrix)
    run(
        *(fields.ctypes.data, matrix.out_features, x.data_ptr(), len(x), matrix.in_features),
        *(y.data_ptr(), 0 if bias is None else bias.data_ptr(), scratch.data_ptr(), stride, 16),
    )
    return y


def _compiled(matrix: PackedMatrix) -> Loops | None:
    """None: there are none here, or they are not to be trusted."""
    module, prefix = matrix.kernel
    fill, few = kernel(module, f"{prefix}_fill"), kernel(module, f"{prefix}_few")
    if fill is None or few is None:
        return None
    loops = Loops(fill, few)
    if matrix.kernel not in _TRUSTED:
        _TRUSTED[matrix.kernel] = _unpacks_rightly(loops, matrix)
    return loops if _TRUSTED[matrix.kernel] else None


_TRUSTED: dict[tuple[str, str], bool] = {}


def _unpacks_rightly(loops: Loops, matrix: PackedMatrix) -> bool:
    """Whether this machine's compiled kernels do as plain torch does, tried on a few rows."""
    rows = min(8, matrix.out_features)
    expected = matrix.unpack(0, rows)
    x = torch.linspace(-1, 1, matrix.in_features)[None]
    products = _multiply_few(loops.few, matrix, None, x)[:, :rows]
    if torch.allclose(
        _fill(loops.fill, matrix, 0, rows), expected, rtol=1e-5, atol=1e-6, equal_nan=True
    ) and torch.allclose(products, x @ expected.T, rtol=1e-3, atol=1e-3, equal_nan=True):
        return True
    logger.error(
        "%s: the compiled kernel unpacks wrongly on this CPU; plain torch is used, which is slower",
        matrix.kernel[1],
    )
    return False


def _as_array(matrix: PackedMatrix) -> NDArray[np.int64]:
    return np.array((*matrix.fields(), *[0] * 10)[:10], dtype=np.int64)


@functools.cache
def _buffers() -> list[Tensor]:
    return [torch.empty(0)]


def _scratch(size: int) -> Tensor:
    """At least `size` floats, the same memory for every layer."""
    buffers = _buffers()
    if buffers[0].numel() < size:
        buffers[0] = torch.empty(size)
    return buffers[0]
