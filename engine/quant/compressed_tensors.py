"""compressed-tensors (llm-compressor): packed integers, INT8 with INT8 activations, FP8.

pack-quantized: `weight_packed` int32 [out, words], along the input, lowest bits first, plus
2^(bits - 1); `weight_scale` [out, groups]; `weight_zero_point` int32 [words, groups], packed along
the output, plus 2^(bits - 1) too. int-quantized and float-quantized: `weight` and `weight_scale`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.engine.errors import CheckpointError
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.fp8 import Fp8
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
from headrace.engine.quant.int8 import Int8, Int8Weights, int8_matrix
from headrace.engine.quant.int8_dynamic import (
    Int8Dynamic,
    Int8DynamicWeights,
    int8_dynamic_weights,
)
from headrace.engine.quant.method import AnyMethod, LinearSpec, bias_shapes, stacked_bias
from headrace.engine.quant.packing import unpack_words
from headrace.engine.quant.settings import Settings

_LEVELS = 127.5  # its scale of a token is the largest magnitude over half of 255


@dataclass(frozen=True, slots=True)
class Rule:
    """Which layers a group of the config means, and how they are stored."""

    targets: Sequence[str]
    method: AnyMethod


def read_rules(values: Mapping[str, Any]) -> tuple[list[Rule], list[str]]:
    """The config's groups in their order, and the layers that it leaves out."""
    settings = Settings("quantization_config", values)
    groups = settings.mapping("config_groups")
    if not groups:
        raise CheckpointError("quantization_config: config_groups is missing")
    rules = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise CheckpointError(f"quantization_config: {name} is {group!r}; an object is needed")
        scheme = Settings(f"quantization_config: {name}", group)
        form = scheme.values.get("format") or settings.text("format")
        rules.append(Rule(scheme.texts("targets"), _method(form, scheme)))
    return rules, settings.texts("ignore")


def matches(part: str, patterns: Sequence[str]) -> bool:
    """Whether a layer is meant: by its class (all are Linear), its name or a regular expression."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], part):
                return True
        elif pattern == "Linear" or part == pattern or part.endswith(f".{pattern}"):
            return True
    return False


def _method(form: str, scheme: Settings) -> AnyMethod:
    weights = Settings(f"{scheme.where}: weights", scheme.mapping("weights"))
    bits, strategy = weights.integer("num_bits"), weights.text("strategy")
    kind, symmetric = weights.text("type", "int"), weights.boolean("symmetric", True)
    activations = scheme.mapping("input_activations")
    if form == "pack-quantized" and kind == "int" and bits in (2, 4, 8):
        if strategy not in ("group", "channel"):
            raise _unsupported(form, scheme, f"strategy {strategy!r}")
        group = weights.integer("group_size") if strategy == "group" else 0
        return PackedIntegers(bits, group, symmetric)
    if form in ("int-quantized", "naive-quantized") and (kind, bits) == ("int", 8):
        if strategy not in ("channel", "tensor") or not symmetric:
            raise _unsupported(form, scheme, f"strategy {strategy!r}, symmetric {symmetric}")
        # Asymmetric activations, and fixed scales, run unquantized: nearer to the floats.
        dynamic = activations.get("dynamic") and activations.get("symmetric")
        per_token = activations.get("strategy") == "token" and activations.get("num_bits") == 8
        if dynamic and per_token:
            return StoredInt8Dynamic(strategy)
        return StoredInt8(strategy)
    if form in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8):
        if strategy == "block":
            block = weights.values.get("block_structure")
            if not isinstance(block, list) or len(block) != 2:
                raise _unsupported(form, scheme, f"block_structure {block!r}")
            return Fp8("block", (int(block[0]), int(block[1])))
        if strategy in ("channel", "tensor"):
            return Fp8(strategy)
    raise _unsupported(form, scheme, f"{bits}-bit {kind} weights, strategy {strategy!r}")


def _unsupported(form: str, scheme: Settings, what: str) -> CheckpointError:
    return CheckpointError(
        f"{scheme.where}: compressed-tensors {form} with {what} is not supported; pack-quantized"
        " integers, int-quantized INT8 and float-quantized FP8 are"
    )


class PackedIntegers:
    """`group` 0: one for all of the input."""

    def __init__(self, bits: int, group: int, symmetric: bool) -> None:
        self._bits = bits
        self._group = group
        self._symmetric = symmetric

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        group = self._group or spec.in_features
        problem = check_group(group, spec.in_features)
        if problem:
            raise CheckpointError(f"{spec.parts[0]}: {problem}; that is not supported")
        per_word = 32 // self._bits
        groups = -(-spec.in_features // group)
        shapes: dict[str, tuple[int, ...]] = bias_shapes(spec)
        for part, rows in zip(spec.parts, spec.out_features, strict=True):
            shapes[f"{part}.weight_packed"] = (rows, -(-spec.in_features // per_word))
            shapes[f"{part}.weight_scale"] = (rows, groups)
            shapes[f"{part}.weight_shape"] = (2,)
            if not self._symmetric:
                shapes[f"{part}.weight_zero_point"] = (-(-rows // per_word), groups)
        return shapes

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> GroupedWeights:
        pieces = [self._piece(spec.part(index), source) for index in range(len(spec.parts))]
        return GroupedWeights(fused(pieces), stacked_bias(spec, source, torch.float32, device))

    def process(self, weights: GroupedWeights) -> GroupedWeights:
        return process_grouped(weights)

    def apply(self, weights: GroupedWeights, x: Tensor) -> Tensor:
        return apply_grouped(weights, x)

    def dequantize(self, weights: GroupedWeights) -> Tensor:
        return dequantize_grouped(weights)

    def _piece(self, spec: LinearSpec, source: TensorSource) -> Piece:
        part, rows, columns = spec.parts[0], spec.out_features[0], spec.in_features
        shape = source.load(f"{part}.weight_shape").tolist()
        if shape != [rows, columns]:
            raise CheckpointError(f"{part}.weight_shape is {shape}; [{rows}, {columns}] is needed")
        words = source.load(f"{part}.weight_packed")
        values = unpack_words(words.T.contiguous(), self._bits)[:columns].T
        zeros = None
        if not self._symmetric:
            zeros = unpack_words(source.load(f"{part}.weight_zero_point"), self._bits)[:rows]
        scales = source.load(f"{part}.weight_scale")
        return Piece(
            grouped_matrix(values, scales, zeros, self._bits, self._group or columns), None
        )


def _int8_shapes(spec: LinearSpec, strategy: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = bias_shapes(spec)
    for part, rows in zip(spec.parts, spec.out_features, strict=True):
        shapes[f"{part}.weight"] = (rows, spec.in_features)
        shapes[f"{part}.weight_scale"] = (rows, 1) if strategy == "channel" else (1,)
    return shapes


def _int8_values(spec: LinearSpec, source: TensorSource) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and float32 scales [out]."""
    scales = [
        source.load(f"{part}.weight_scale").float().flatten().expand(rows)
        for part, rows in zip(spec.parts, spec.out_features, strict=True)
    ]
    return torch.cat([source.load(f"{part}.weight") for part in spec.parts]), torch.cat(scales)


class StoredInt8(Int8):
    def __init__(self, strategy: str) -> None:
        self._strategy = strategy

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        return _int8_shapes(spec, self._strategy)

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Int8Weights:
        bias = stacked_bias(spec, source, torch.float32, device)
        return Int8Weights(int8_matrix(*_int8_values(spec, source)), bias)


class StoredInt8Dynamic(Int8Dynamic):
    def __init__(self, strategy: str) -> None:
        super().__init__(_LEVELS)
        self._strategy = strategy

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        return _int8_shapes(spec, self._strategy)

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Int8DynamicWeights:
        bias = stacked_bias(spec, source, torch.float32, device)
        return int8_dynamic_weights(*_int8_values(spec, source), bias)
