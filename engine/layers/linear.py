"""A linear layer: weights and the method that multiplies them."""

from typing import Any

import torch
from torch import Tensor

from headrace.engine.layers.huge_pages import HugePages
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.method import LinearSpec, QuantMethod, to_device


class Linear:
    """`linear(x)`: x [rows, in] to [rows, out]."""

    __slots__ = ("_method", "_weights")

    def __init__(self, method: QuantMethod[Any], weights: Any) -> None:
        self._method = method
        self._weights = weights

    @classmethod
    def load(
        cls,
        method: QuantMethod[Any],
        spec: LinearSpec,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        memory: HugePages | None = None,
    ) -> "Linear":
        """Weights as the method wants them, in `memory` if one is given."""
        created = to_device(method.create_weights(spec, source, dtype, device), device)
        weights = method.process(created)
        return cls(method, weights if memory is None else memory.moved(weights))

    @property
    def weights(self) -> Any:
        """What the method multiplies with, to be counted (see `quant.method.weight_bytes`)."""
        return self._weights

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._method.apply(self._weights, x)
        return y
