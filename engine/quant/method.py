"""The seam between a linear layer and the way its weights are stored and multiplied.

A method reads what it needs from the checkpoint (`create_weights`), brings it into the form that
the device multiplies fastest (`process`, once), and multiplies (`apply`). One scheme a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from headrace.engine.loading.checkpoint import TensorSource

WeightsT = TypeVar("WeightsT")


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer made of one or more of the checkpoint's, stacked along the output.

    `parts`: their prefixes, e.g. `model.layers.0.self_attn.q_proj`; `out_features`: rows of each.
    """

    parts: Sequence[str]
    in_features: int
    out_features: Sequence[int]
    bias: bool = False


class QuantMethod(Protocol[WeightsT]):
    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint's tensors that `create_weights` reads."""
        ...

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> WeightsT: ...

    def process(self, weights: WeightsT) -> WeightsT: ...

    def apply(self, weights: WeightsT, x: Tensor) -> Tensor:
        """x [rows, in_features] to [rows, sum(out_features)]."""
        ...
