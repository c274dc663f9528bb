"""Weights as they are; on a CPU packed once, for our own matmul or for oneDNN's.

They may be narrower than the activations (bfloat16 beside float32, where the CPU multiplies
bfloat16): rows are rounded on the way in, and the products come back in the activations' dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.method import LinearSpec
from headrace.engine.quant.panels import in_panels, multiplies_panels, multiply_panels

_PACKED_ROWS = 64  # the row count that oneDNN's layout is chosen for; any count runs


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """`weight` [out, in] in rows, or in oneDNN's layout, which only its own matmul reads."""

    weight: Tensor
    bias: Tensor | None
    layout: Literal["rows", "onednn"] = "rows"


@dataclass(frozen=True, slots=True)
class PanelWeights:
    """`weight` in panels (`quant.panels`), which start from the bias: there is one always."""

    weight: Tensor
    bias: Tensor
    layout: Literal["panels"] = "panels"


FloatWeights = PlainWeights | PanelWeights


class Unquantized:
    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for part, rows in zip(spec.parts, spec.out_features, strict=True):
            shapes[f"{part}.weight"] = (rows, spec.in_features)
            if spec.bias:
                shapes[f"{part}.bias"] = (rows,)
        return shapes

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> PlainWeights:
        def stacked(kind: str) -> Tensor:
            parts = [source.load(f"{part}.{kind}").to(device, dtype) for part in spec.parts]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return PlainWeights(stacked("weight"), stacked("bias") if spec.bias else None)

    def process(self, weights: FloatWeights) -> FloatWeights:
        weight = weights.weight
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and multiplies_panels():
            bias = torch.zeros(len(weight)) if weights.bias is None else weights.bias
            return PanelWeights(in_panels(weight), bias)
        if not can_pack(weight):
            return weights
        packed = torch.ops.mkldnn._reorder_linear_weight(weights.weight, _PACKED_ROWS)
        return PlainWeights(packed, weights.bias, "onednn")

    def apply(self, weights: FloatWeights, x: Tensor) -> Tensor:
        if isinstance(weights, PanelWeights):
            return multiply_panels(weights.weight, weights.bias, x.float()).to(x.dtype)
        narrow = x.to(weights.weight.dtype)
        if weights.layout == "onednn":
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                narrow, weights.weight, weights.bias, "none", [], ""
            )
        else:
            y = functional.linear(narrow, weights.weight, weights.bias)
        return y.to(x.dtype)

    def dequantize(self, weights: FloatWeights) -> Tensor:
        return weights.weight.float()


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN packs this weight: float32 or bfloat16 on a CPU, in a torch built with it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
