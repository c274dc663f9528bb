"""bitsandbytes' 4-bit codes: NF4 and FP4, blocks of 64 values with one scale, which double
quantization stores in a byte.

Layout: `weight` uint8 [out * in / 2, 1], rows behind each other, high nibble first; `absmax`
float32 [blocks], or uint8 with `nested_absmax`, `nested_quant_map` and, in the JSON of
`quant_state`, an offset: absmax = map[byte] * nested_absmax[block of 256] + offset. A value is
code * absmax, rounded to the type that the JSON names. Also made at load from floats.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.engine.errors import CheckpointError, EngineError
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.device_matrix import DeviceMatrix, codes_on_device, on_kernels
from headrace.engine.quant.method import LinearSpec, bias_shapes, stacked_bias
from headrace.engine.quant.packed import multiply, whole
from headrace.engine.quant.packing import CHUNK, pack_rows, unpack_rows
from headrace.engine.quant.unquantized import Unquantized

BLOCK = 64
_NESTED_BLOCK = 256
_ROUNDINGS = {"float16": 0, "bfloat16": 1, "float32": 2}
_DTYPES = {0: torch.float16, 1: torch.bfloat16, 2: torch.float32}

# Quantiles of a normal distribution, scaled to [-1, 1] (Dettmers et al. 2023, QLoRA, appendix E),
# and the values of a 4-bit float with 2 exponent bits.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_HALF = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4 = (*_FP4_HALF, *(-value for value in _FP4_HALF))
CODES = {"nf4": NF4, "fp4": FP4}


@dataclass(frozen=True, slots=True)
class Nested:
    """Scales in bytes: `codes` uint8 [out, blocks a row]; for each part `starts` int64 (its first
    row and its first entry in `absmax`) and in `tables` float32 [parts, 257] its 256 values and
    offset; `absmax` float32, one for 256 codes of a part."""

    codes: Tensor
    starts: Tensor
    absmax: Tensor
    tables: Tensor

    def scales(self, first: int, last: int) -> Tensor:
        """Float32 [last - first, blocks a row]."""
        blocks = self.codes.shape[1]
        rows = torch.arange(first, last)
        part = (rows[:, None] >= self.starts[:, 0]).sum(1) - 1
        flat = (rows - self.starts[part, 0])[:, None] * blocks + torch.arange(blocks)
        outer = self.absmax[self.starts[part, 1, None] + flat // _NESTED_BLOCK]
        values = self.tables[part[:, None], self.codes[first:last].long()]
        return values * outer + self.tables[part, -1, None]


@dataclass(frozen=True, slots=True)
class CodeMatrix:
    """`packed` uint8 [out, bytes], `table` float32 [16]; `scales` float32 [out, blocks] or nested;
    `group` columns a block; `rounding` as the kernels number it."""

    packed: Tensor
    table: Tensor
    scales: Tensor | Nested
    group: int
    rounding: int
    in_features: int

    @property
    def out_features(self) -> int:
        return len(self.packed)

    @property
    def kernel(self) -> tuple[str, str]:
        return "row_kernels", "nested4" if isinstance(self.scales, Nested) else "code4"

    def fields(self) -> Sequence[int]:
        packed = (self.packed.data_ptr(), self.packed.shape[1])
        scales = self.scales
        if isinstance(scales, Nested):
            return (
                *(*packed, scales.codes.data_ptr(), self.table.data_ptr(), scales.codes.shape[1]),
                *(self.rounding, scales.starts.data_ptr(), scales.absmax.data_ptr()),
                *(scales.tables.data_ptr(), len(scales.tables)),
            )
        return (
            *(*packed, scales.data_ptr(), self.table.data_ptr(), scales.shape[1]),
            *(self.group // CHUNK, self.rounding),
        )

    def unpack(self, first: int, last: int) -> Tensor:
        values = self.table[unpack_rows(self.packed[first:last], self.in_features, 4).long()]
        scales = self.scales
        rows = scales.scales(first, last) if isinstance(scales, Nested) else scales[first:last]
        values *= rows[:, torch.arange(self.in_features) // self.group]
        return values.to(_DTYPES[self.rounding]).float()

    def placed(self) -> "CodeMatrix | DeviceMatrix":
        """`rounding` is left out: products are summed in float32, nothing is rounded in between."""
        if not on_kernels(self.packed.device):
            return self
        values, scales = unpack_rows(self.packed, self.in_features, 4), self.scales
        if isinstance(scales, Nested):
            nested = (scales.starts, scales.absmax, scales.tables)
            return codes_on_device(values, self.table, scales.codes, nested, self.group)
        return codes_on_device(values, self.table, scales, None, self.group)


@dataclass(frozen=True, slots=True)
class CodeWeights:
    matrix: CodeMatrix | DeviceMatrix
    bias: Tensor | None


class _Codes:
    def process(self, weights: CodeWeights) -> CodeWeights:
        return replace(weights, matrix=weights.matrix.placed())

    def apply(self, weights: CodeWeights, x: Tensor) -> Tensor:
        return multiply(weights.matrix, weights.bias, x)

    def dequantize(self, weights: CodeWeights) -> Tensor:
        return whole(weights.matrix)


class StoredCodes(_Codes):
    """`kind`: nf4 or fp4; `double`: scales are stored in bytes."""

    def __init__(self, kind: str, double: bool) -> None:
        self._kind = kind
        self._double = double

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = bias_shapes(spec)
        for part, rows in zip(spec.parts, spec.out_features, strict=True):
            values = rows * spec.in_features
            blocks = -(-values // BLOCK)
            shapes[f"{part}.weight"] = (-(-values // 2), 1)
            shapes[f"{part}.weight.absmax"] = (blocks,)
            shapes[f"{part}.weight.quant_map"] = (16,)
            if self._double:
                shapes[f"{part}.weight.nested_absmax"] = (-(-blocks // _NESTED_BLOCK),)
                shapes[f"{part}.weight.nested_quant_map"] = (256,)
        return shapes

    def state_name(self, part: str) -> str:
        return f"{part}.weight.quant_state.bitsandbytes__{self._kind}"

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> CodeWeights:
        matrices = []
        for index in range(len(spec.parts)):
            matrices.append(self._matrix(spec.part(index), source))
        return CodeWeights(joined(matrices), stacked_bias(spec, source, torch.float32, device))

    def _matrix(self, spec: LinearSpec, source: TensorSource) -> CodeMatrix:
        part, rows, columns = spec.parts[0], spec.out_features[0], spec.in_features
        if self.state_name(part) not in source.shapes():
            raise CheckpointError(f"checkpoint: tensor {self.state_name(part)} missing")
        state = _read_state(source.load(self.state_name(part)), part)
        if state.get("shape") != [rows, columns] or state.get("blocksize") != BLOCK:
            raise CheckpointError(
                f"{part}: bitsandbytes quant_state has shape {state.get('shape')} in blocks of"
                f" {state.get('blocksize')}; [{rows}, {columns}] in blocks of {BLOCK} is needed"
            )
        rounding = _ROUNDINGS.get(str(state.get("dtype")))
        if rounding is None:
            raise CheckpointError(f"{part}: bitsandbytes dtype {state.get('dtype')!r} is unknown")
        _check_columns(columns, part)
        codes = source.load(f"{part}.weight").flatten()
        values = torch.stack((codes >> 4, codes & 15), 1).view(rows, columns)
        absmax = source.load(f"{part}.weight.absmax")
        scales: Tensor | Nested = absmax.float()
        if self._double:
            table = source.load(f"{part}.weight.nested_quant_map").float()
            offset = torch.tensor([float(state["nested_offset"])])
            scales = Nested(
                absmax.view(rows, -1) if columns % BLOCK == 0 else absmax[None],
                torch.zeros(1, 2, dtype=torch.int64),
                source.load(f"{part}.weight.nested_absmax").float(),
                torch.cat((table, offset))[None],
            )
        quant_map = source.load(f"{part}.weight.quant_map").float()
        return _code_matrix(values, quant_map, scales, rounding)


class LoadedCodes(_Codes):
    """Made at load from floats, products in float32. `double`: scales in bytes too."""

    def __init__(self, kind: str, double: bool) -> None:
        self._table = torch.tensor(CODES[kind])
        self._double = double

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        return Unquantized().tensor_shapes(spec)

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> CodeWeights:
        if (spec.in_features % BLOCK and self._double) or spec.in_features % CHUNK:
            raise EngineError(
                f"{spec.parts[0]}: {spec.in_features} columns are no multiple of"
                f" {BLOCK if self._double else CHUNK}, which nf4 and fp4 need; int8 runs"
            )
        matrices = [self._matrix(source.load(f"{part}.weight")) for part in spec.parts]
        return CodeWeights(joined(matrices), stacked_bias(spec, source, torch.float32, device))

    def _matrix(self, weight: Tensor) -> CodeMatrix:
        rows, columns = weight.shape
        group = BLOCK if columns % BLOCK == 0 else CHUNK
        blocks = weight.float().view(rows, -1, group)
        absmax = blocks.abs().amax(2)
        scales: Tensor | Nested = absmax
        if self._double:
            scales = nested_scales(absmax)
            absmax = scales.scales(0, rows)
        scaled = blocks / torch.where(absmax == 0, 1.0, absmax)[..., None]
        sorted_codes, order = self._table.sort()
        edges = (sorted_codes[1:] + sorted_codes[:-1]) / 2
        values = order[torch.bucketize(scaled, edges)].to(torch.uint8).view(rows, columns)
        return CodeMatrix(
            *(pack_rows(values, 4), self._table, scales, group, _ROUNDINGS["float32"], columns)
        )


def nested_scales(absmax: Tensor) -> Nested:
    """Scales [rows, blocks] in bytes: less their mean, in 255 even steps of each 256's range."""
    offset = absmax.mean()
    flat = (absmax - offset).flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % _NESTED_BLOCK)).view(-1, _NESTED_BLOCK)
    outer = padded.abs().amax(1).clamp(min=1e-30)
    codes = ((padded / outer[:, None] + 1) * 127.5).round_().to(torch.uint8)
    table = torch.linspace(-1, 1, 256)
    return Nested(
        codes.flatten()[: len(flat)].view_as(absmax).contiguous(),
        torch.zeros(1, 2, dtype=torch.int64),
        outer,
        torch.cat((table, offset[None]))[None],
    )


def joined(matrices: Sequence[CodeMatrix]) -> CodeMatrix:
    """Stacked along the rows; they have one table, one rounding and one kind of scales."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    scales: Tensor | Nested
    nested = [matrix.scales for matrix in matrices if isinstance(matrix.scales, Nested)]
    if nested:
        row, entry, starts = 0, 0, []
        for part in nested:
            starts.append(part.starts + torch.tensor([row, entry]))
            row, entry = row + len(part.codes), entry + len(part.absmax)
        scales = Nested(
            torch.cat([part.codes for part in nested]),
            torch.cat(starts),
            torch.cat([part.absmax for part in nested]),
            torch.cat([part.tables for part in nested]),
        )
    else:
        scales = torch.cat([m.scales for m in matrices if isinstance(m.scales, Tensor)])
    return replace(first, packed=torch.cat([m.packed for m in matrices]), scales=scales)


def _code_matrix(
    values: Tensor, table: Tensor, scales: Tensor | Nested, rounding: int
) -> CodeMatrix:
    """`values` uint8 [out, in]; `scales` of blocks that may span rows."""
    rows, columns = values.shape
    group = BLOCK
    if columns % BLOCK:  # blocks span rows: a scale for each chunk of 32, which none of them cuts
        flat = scales.scales(0, 1)[0] if isinstance(scales, Nested) else scales
        group = CHUNK
        scales = flat.repeat_interleave(BLOCK // CHUNK)[: rows * columns // CHUNK]
    if isinstance(scales, Tensor):
        scales = scales.view(rows, -1).contiguous()
    return CodeMatrix(pack_rows(values, 4), table, scales, group, rounding, columns)


def _check_columns(columns: int, part: str) -> None:
    if columns % CHUNK:
        raise CheckpointError(
            f"{part}: bitsandbytes 4-bit with {columns} columns is not supported (a multiple of"
            f" {CHUNK} is needed)"
        )


def _read_state(data: Tensor, part: str) -> dict[str, Any]:
    try:
        state = json.loads(bytes(data.tolist()))
    except ValueError as error:
        raise CheckpointError(f"{part}: bitsandbytes quant_state is damaged: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{part}: bitsandbytes quant_state is damaged: no object")
    return state
