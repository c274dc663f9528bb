"""Weights as they are; on a CPU packed once for oneDNN's matmul.

They may be narrower than the activations (bfloat16 beside float32, where the CPU multiplies
bfloat16): rows are rounded on the way in, and the products come back in the activations' dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.method import LinearSpec

_PACKED_ROWS = 64  # the row count that oneDNN's layout is chosen for; any count runs


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """`weight` [out, in]; `packed`: in oneDNN's blocked layout, only its own matmul reads it."""

    weight: Tensor
    bias: Tensor | None
    packed: bool = False


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

    def process(self, weights: PlainWeights) -> PlainWeights:
        if not can_pack(weights.weight):
            return weights
        packed = torch.ops.mkldnn._reorder_linear_weight(weights.weight, _PACKED_ROWS)
        return PlainWeights(packed, weights.bias, packed=True)

    def apply(self, weights: PlainWeights, x: Tensor) -> Tensor:
        narrow = x.to(weights.weight.dtype)
        if weights.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                narrow, weights.weight, weights.bias, "none", [], ""
            )
        else:
            y = functional.linear(narrow, weights.weight, weights.bias)
        return y.to(x.dtype)

    def dequantize(self, weights: PlainWeights) -> Tensor:
        return weights.weight.float()


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN packs this weight: float32 or bfloat16 on a CPU, in a torch built with it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
