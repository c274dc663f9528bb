"""GPTQ checkpoints: 2, 3, 4 or 8 bits packed along the input, with or without act-order.

Layout: `qweight` int32 [in * bits / 32, out], `qzeros` int32 [groups, out * bits / 32], `scales`
float16 [groups, out], `g_idx` int32 [in], the group of each column.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.engine.errors import CheckpointError
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.grouped import (
    GroupedWeights,
    Piece,
    apply_grouped,
    check_group,
    dequantize_grouped,
    fused,
    grouped_matrix,
    process_grouped,
)
from headrace.engine.quant.method import LinearSpec, bias_shapes, stacked_bias
from headrace.engine.quant.packing import BITS, unpack_words
from headrace.engine.quant.settings import Settings

logger = logging.getLogger(__name__)

# Zero points of version 1 are stored less one: by taking this from the whole word, so a field that
# was 0 borrows from its neighbours.
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class GPTQConfig:
    """`group` 0: one for all of the input. `version`: what the label says (1 or 2)."""

    bits: int
    group: int
    symmetric: bool
    version: int
    dynamic: Mapping[str, Mapping[str, Any]]

    def of(self, part: str) -> "GPTQConfig | None":
        """The settings of a layer, `dynamic` overrides applied; None: stored as floats."""
        for key, values in self.dynamic.items():
            sign, pattern = (key[:2], key[2:]) if key[:2] in ("+:", "-:") else ("+:", key)
            if re.match(pattern, part):
                if sign == "-:":
                    return None
                settings = Settings("quantization_config.dynamic", values)
                return replace(
                    self,
                    bits=_bits(settings, self.bits),
                    group=_group(settings, self.group),
                    symmetric=settings.boolean("sym", self.symmetric),
                )
        return self


def read_config(values: Mapping[str, Any]) -> GPTQConfig:
    settings = Settings("quantization_config", values)
    label = values.get("checkpoint_format") or values.get("format") or "gptq"
    if label not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"quantization_config: GPTQ format {label!r} is not supported (gptq and gptq_v2 are)"
        )
    return GPTQConfig(
        _bits(settings, None),
        _group(settings, None),
        settings.boolean("sym", True),
        2 if label == "gptq_v2" else 1,
        settings.mapping("dynamic"),
    )


def _bits(settings: Settings, default: int | None) -> int:
    bits = settings.integer("bits", default)
    if bits not in BITS:
        raise CheckpointError(f"quantization_config: GPTQ with {bits} bits (2, 3, 4 and 8 are run)")
    return bits


def _group(settings: Settings, default: int | None) -> int:
    group = settings.integer("group_size", default)
    return max(group, 0)


class GPTQ:
    """`version_of`: which convention the checkpoint's zero points follow."""

    def __init__(self, config: GPTQConfig, version: int) -> None:
        self._config = config
        self._version = version

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        bits, group = self._config.bits, self._config.group or spec.in_features
        problem = check_group(group, spec.in_features)
        if problem:
            raise CheckpointError(f"{spec.parts[0]}: GPTQ {problem}; that is not supported")
        groups = -(-spec.in_features // group)
        shapes: dict[str, tuple[int, ...]] = bias_shapes(spec)
        for part, rows in zip(spec.parts, spec.out_features, strict=True):
            shapes[f"{part}.qweight"] = (spec.in_features * bits // 32, rows)
            shapes[f"{part}.qzeros"] = (groups, rows * bits // 32)
            shapes[f"{part}.scales"] = (groups, rows)
            shapes[f"{part}.g_idx"] = (spec.in_features,)
        return shapes

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> GroupedWeights:
        pieces = [self._piece(part, source, device) for part in spec.parts]
        return GroupedWeights(fused(pieces), stacked_bias(spec, source, torch.float32, device))

    def process(self, weights: GroupedWeights) -> GroupedWeights:
        return process_grouped(weights)

    def apply(self, weights: GroupedWeights, x: Tensor) -> Tensor:
        return apply_grouped(weights, x)

    def dequantize(self, weights: GroupedWeights) -> Tensor:
        return dequantize_grouped(weights)

    def _piece(self, part: str, source: TensorSource, device: torch.device) -> Piece:
        bits = self._config.bits
        values = unpack_words(source.load(f"{part}.qweight").to(device), bits)
        zeros = unpack_zeros(source.load(f"{part}.qzeros").to(device), bits, self._version)
        scales = source.load(f"{part}.scales").to(device)
        group = self._config.group or len(values)
        order = column_order(source.load(f"{part}.g_idx").to(device), group, part)
        if order is not None:
            values = values[order]
        matrix = grouped_matrix(values.T, scales.T, zeros.T, bits, group)
        return Piece(matrix, order)


def unpack_zeros(words: Tensor, bits: int, version: int) -> Tensor:
    """int32 [groups, words] to zero points, uint8 [groups, out]."""
    if version == 1 and bits in _ONES:
        raised = (words.long() + _ONES[bits]) & 0xFFFFFFFF
        words = torch.where(raised >= 2**31, raised - 2**32, raised).int()
    fields = unpack_words(words.T.contiguous(), bits).T
    if version == 1 and bits not in _ONES:
        fields = (fields + 1) & (2**bits - 1)  # at 3 bits each field lost its own one
    return fields


def column_order(group_of: Tensor, group: int, part: str) -> Tensor | None:
    """Columns sorted by their group, None when they are already."""
    expected = torch.arange(len(group_of), device=group_of.device) // group
    if torch.equal(group_of.long(), expected):
        return None
    sorted_groups, order = group_of.long().sort(stable=True)
    if not torch.equal(sorted_groups, expected):
        raise CheckpointError(f"{part}.g_idx: its groups do not have {group} columns each")
    return order


def zero_point_version(samples: Mapping[str, GPTQConfig], source: TensorSource, label: int) -> int:
    """1 or 2, told by the weights: over many groups they average to nothing, so the right zero
    points are those that the stored values scatter around; the others lie one beside. `samples`:
    layers to look at and their settings."""
    offsets = {1: 0.0, 2: 0.0}
    for part, config in samples.items():
        bits, scales = config.bits, source.load(f"{part}.scales").float()
        values = unpack_words(source.load(f"{part}.qweight"), bits)
        group_of = source.load(f"{part}.g_idx").long()
        totals = torch.zeros_like(scales).index_add_(0, group_of, values.float())
        counts = torch.bincount(group_of, minlength=len(scales))[:, None]
        for version in offsets:
            zeros = unpack_zeros(source.load(f"{part}.qzeros"), bits, version).float()
            offsets[version] += float((totals / counts - zeros).mean())
    distance = {version: abs(offset) / len(samples) for version, offset in offsets.items()}
    found = min(distance, key=lambda version: distance[version])
    if distance[found] > 0.4 or abs(distance[1] - distance[2]) < 0.3:
        return label  # the weights do not say
    if found != label:
        logger.warning(
            "quantization_config says GPTQ version %d, but the zero points are version %d's;"
            " they are read as such",
            label,
            found,
        )
    return found
