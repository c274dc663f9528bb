"""A fused layer whose parts are stored in different ways: each keeps its own method."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.method import LinearSpec, QuantMethod


class Parts:
    """`methods`: one for each part of the layer."""

    def __init__(self, methods: Sequence[QuantMethod[Any]]) -> None:
        self._methods = methods

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for index, method in enumerate(self._methods):
            shapes.update(method.tensor_shapes(spec.part(index)))
        return shapes

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> list[Any]:
        return [
            method.create_weights(spec.part(index), source, dtype, device)
            for index, method in enumerate(self._methods)
        ]

    def process(self, weights: list[Any]) -> list[Any]:
        return [method.process(part) for method, part in zip(self._methods, weights, strict=True)]

    def apply(self, weights: list[Any], x: Tensor) -> Tensor:
        parts = zip(self._methods, weights, strict=True)
        return torch.cat([method.apply(part, x) for method, part in parts], dim=1)

    def dequantize(self, weights: list[Any]) -> Tensor:
        parts = zip(self._methods, weights, strict=True)
        return torch.cat([method.dequantize(part) for method, part in parts])
