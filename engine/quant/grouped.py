"""Weight-only integers of 2, 3, 4 or 8 bits in groups along the input: weight = (q - zero) * scale.

What GPTQ, AWQ, compressed-tensors and our own rounding have in common once their packing is undone.
Knows no file format.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.engine.quant.device_matrix import DeviceMatrix, integers_on_device, on_kernels
from headrace.engine.quant.packed import multiply, whole
from headrace.engine.quant.packing import CHUNK, pack_rows, unpack_rows

_SCALE_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """`packed` uint8 [out, bytes]; `scales` [out, groups] in 16 or 32 bits; `zeros` uint8
    [out, groups], None where all are 2^(bits - 1); `group` columns a group (the last may be
    short)."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    in_features: int

    @property
    def out_features(self) -> int:
        return len(self.packed)

    @property
    def kernel(self) -> tuple[str, str]:
        return "row_kernels", f"group{self.bits}"

    def fields(self) -> Sequence[int]:
        return (
            *(self.packed.data_ptr(), self.packed.shape[1]),
            *(self.scales.data_ptr(), _SCALE_KINDS[self.scales.dtype]),
            0 if self.zeros is None else self.zeros.data_ptr(),
            *(2 ** (self.bits - 1), self.scales.shape[1]),
            *(-(-self.group // CHUNK), -(-self.in_features // CHUNK)),
        )

    def unpack(self, first: int, last: int) -> Tensor:
        values = unpack_rows(self.packed[first:last], self.in_features, self.bits).float()
        groups = torch.arange(self.in_features, device=values.device) // self.group
        if self.zeros is None:
            values -= 2 ** (self.bits - 1)
        else:
            values -= self.zeros[first:last].float()[:, groups]
        return values.mul_(self.scales[first:last].float()[:, groups])

    def placed(self) -> "GroupedMatrix | DeviceMatrix":
        if not on_kernels(self.packed.device):
            return self
        values = unpack_rows(self.packed, self.in_features, self.bits)
        return integers_on_device(values, self.scales, self.zeros, self.bits, self.group)


def grouped_matrix(
    values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int
) -> GroupedMatrix:
    """`values` uint8 [out, in]; `scales` and `zeros` [out, groups]. Scales are kept in their type;
    zero points that are all in the middle are dropped."""
    columns = values.shape[1]
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    return GroupedMatrix(
        pack_rows(values, bits),
        scales.contiguous(),
        None if zeros is None else zeros.to(torch.uint8).contiguous(),
        bits,
        min(group, columns),
        columns,
    )


def check_group(group: int, columns: int) -> str | None:
    """Why the kernels cannot take groups of this size; None when they can."""
    if group >= columns or group % CHUNK == 0:
        return None
    return f"groups of {group} are no multiple of {CHUNK}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a layer that share one order of columns. `order` int64 [in]: column i of the matrix
    is column order[i] of the layer (GPTQ sorts columns by their group); None: as they are."""

    matrix: GroupedMatrix | DeviceMatrix
    order: Tensor | None


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    pieces: Sequence[Piece]
    bias: Tensor | None


def fused(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Neighbours with equal bits, groups and order become one piece."""
    result: list[Piece] = []
    for piece in pieces:
        joined = _joined(result[-1], piece) if result else None
        if joined is not None:
            result[-1] = joined
        else:
            result.append(piece)
    return result


def process_grouped(weights: GroupedWeights) -> GroupedWeights:
    """As the device multiplies them."""
    pieces = [replace(piece, matrix=piece.matrix.placed()) for piece in weights.pieces]
    return replace(weights, pieces=pieces)


def apply_grouped(weights: GroupedWeights, x: Tensor) -> Tensor:
    """x [rows, in] to [rows, out of all pieces]."""
    if len(weights.pieces) == 1:
        piece = weights.pieces[0]
        return multiply(piece.matrix, weights.bias, _ordered(x, piece.order))
    parts = [multiply(piece.matrix, None, _ordered(x, piece.order)) for piece in weights.pieces]
    y = torch.cat(parts, dim=1)
    return y if weights.bias is None else y.add_(weights.bias.to(y.dtype))


def dequantize_grouped(weights: GroupedWeights) -> Tensor:
    """Float32 [out, in], columns in the layer's order."""
    parts = []
    for piece in weights.pieces:
        values = whole(piece.matrix)
        if piece.order is not None:
            values = torch.empty_like(values).index_copy_(1, piece.order, values)
        parts.append(values)
    return torch.cat(parts)


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(1, order)


def _joined(a: Piece, b: Piece) -> Piece | None:
    """Both as one piece; None where they are not alike."""
    above, below = a.matrix, b.matrix
    if not isinstance(above, GroupedMatrix) or not isinstance(below, GroupedMatrix):
        return None
    if (above.bits, above.group) != (below.bits, below.group):
        return None
    if above.scales.dtype != below.scales.dtype:
        return None
    if (a.order is None) != (b.order is None):
        return None
    if a.order is not None and b.order is not None and not torch.equal(a.order, b.order):
        return None
    return Piece(_concatenated(above, below), a.order)


def _concatenated(a: GroupedMatrix, b: GroupedMatrix) -> GroupedMatrix:
    zeros = None
    if a.zeros is not None or b.zeros is not None:
        zeros = torch.cat([_all_zeros(a), _all_zeros(b)])
    return GroupedMatrix(
        torch.cat((a.packed, b.packed)),
        torch.cat((a.scales, b.scales)),
        zeros,
        *(a.bits, a.group, a.in_features),
    )


def _all_zeros(matrix: GroupedMatrix) -> Tensor:
    if matrix.zeros is not None:
        return matrix.zeros
    middle = 2 ** (matrix.bits - 1)
    return torch.full(matrix.scales.shape, middle, dtype=torch.uint8, device=matrix.scales.device)
