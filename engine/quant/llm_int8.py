"""bitsandbytes' LLM.int8: INT8 weights and activations, but activations that stick out stay precise
(Dettmers et al. 2022, LLM.int8()).

Values of magnitude 6 and more are taken out of a token before it is quantized, and multiplied as
two INT8 digits, 15 bits together, so the weights are held once and only as bytes. bitsandbytes
takes out whole columns, those where any token of the batch sticks out; here each token's own values
are, so that its result does not depend on what shares the batch.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.int8_dynamic import (
    Int8Dynamic,
    Int8DynamicWeights,
    int8_dynamic_weights,
    quantize_tokens,
)
from headrace.engine.quant.method import LinearSpec, bias_shapes, stacked_bias

_FEW = 64
"""Tokens in a step up to which the weights' bytes take longer than their products."""


class LLMInt8(Int8Dynamic):
    """`threshold`: the magnitude from which a value sticks out; `stored`: weights are read as
    bitsandbytes wrote them (`weight` int8, `SCB` float32: weight * SCB / 127), not made at load.
    """

    def __init__(self, threshold: float = 6.0, stored: bool = False) -> None:
        super().__init__()
        self._threshold = threshold
        self._stored = stored

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        if not self._stored:
            return super().tensor_shapes(spec)
        shapes: dict[str, tuple[int, ...]] = bias_shapes(spec)
        for part, rows in zip(spec.parts, spec.out_features, strict=True):
            shapes[f"{part}.weight"] = (rows, spec.in_features)
            shapes[f"{part}.SCB"] = (rows,)
        return shapes

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Int8DynamicWeights:
        if not self._stored:
            return super().create_weights(spec, source, dtype, device)
        return int8_dynamic_weights(
            torch.cat([source.load(f"{part}.weight").to(device) for part in spec.parts]),
            torch.cat([source.load(f"{part}.SCB").float() for part in spec.parts]) / 127,
            stacked_bias(spec, source, torch.float32, device),
        )

    def apply(self, weights: Int8DynamicWeights, x: Tensor) -> Tensor:
        if weights.on_kernels:
            return self._apply_on_kernels(weights, x)
        outliers = x.abs() >= self._threshold
        rows = outliers.any(1).nonzero().flatten()
        if not len(rows):
            return super().apply(weights, x)
        unbiased = replace(weights, bias=None)
        apart = torch.where(outliers[rows], x[rows], 0).float()
        digits, scales = quantize_tokens(apart)
        rest = apart - (digits.float() - 128) * scales[:, None]
        y = super().apply(unbiased, torch.cat((torch.where(outliers, 0, x).float(), apart, rest)))
        result = y[: len(x)]
        result[rows] += y[len(x) : len(x) + len(rows)] + y[len(x) + len(rows) :]
        if weights.bias is not None:
            result += weights.bias
        return result.to(x.dtype)

    def _apply_on_kernels(self, weights: Int8DynamicWeights, x: Tensor) -> Tensor:
        """Every token brings its two rows of digits along, so nothing waits for the device to say
        which stick out. A batch that reads weights more than it computes pays nothing for it; for
        others the rows that need it are asked for, which waits."""
        outliers = x.abs() >= self._threshold
        rows = outliers.any(1).nonzero().flatten() if len(x) > _FEW else None
        apart = torch.where(outliers, x, 0).float()
        if rows is not None:
            apart = apart[rows]
        digits, scales = _kernel_quantize(apart)
        rest = apart - digits.float() * scales[:, None]
        y = super().apply(
            replace(weights, bias=None),
            torch.cat((torch.where(outliers, 0, x).float(), apart, rest)),
        )
        result, beside = y[: len(x)], y[len(x) : len(x) + len(apart)] + y[len(x) + len(apart) :]
        if rows is None:
            result += beside
        else:
            result[rows] += beside
        if weights.bias is not None:
            result += weights.bias
        return result.to(x.dtype)


def _kernel_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    from headrace.kernels.int8_dynamic_matmul import quantize_tokens as quantize

    return quantize(x)
