"""The seam between a linear layer and the way its weights are stored and multiplied.

A method reads what it needs from the checkpoint (`create_weights`), brings it into the form that
the device multiplies fastest (`process`, once), and multiplies (`apply`). One scheme a file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

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

    def part(self, index: int) -> "LinearSpec":
        """One of the parts as a layer of its own."""
        return LinearSpec(
            (self.parts[index],), self.in_features, (self.out_features[index],), self.bias
        )


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

    def dequantize(self, weights: WeightsT) -> Tensor:
        """Float32 [sum(out_features), in_features] of what `create_weights` returned."""
        ...


AnyMethod = QuantMethod[Any]


def stacked_bias(
    spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The parts' biases behind each other; None when the layer has none."""
    if not spec.bias:
        return None
    return torch.cat([source.load(f"{part}.bias").to(device, dtype) for part in spec.parts])


def bias_shapes(spec: LinearSpec) -> dict[str, tuple[int, ...]]:
    if not spec.bias:
        return {}
    return {
        f"{part}.bias": (rows,) for part, rows in zip(spec.parts, spec.out_features, strict=True)
    }


def to_device(weights: Any, device: torch.device) -> Any:
    """A method's weights with all of their tensors on `device`."""
    if isinstance(weights, Tensor):
        return weights.to(device)
    if isinstance(weights, list | tuple):
        return type(weights)(to_device(part, device) for part in weights)
    if is_dataclass(weights) and not isinstance(weights, type):
        changed = {
            item.name: to_device(getattr(weights, item.name), device) for item in fields(weights)
        }
        return replace(weights, **changed)
    return weights


def tensors_in(weights: Any) -> Iterator[Tensor]:
    """The tensors in a method's weights, oneDNN's packed ones included."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, list | tuple):
        for item in weights:
            yield from tensors_in(item)
    elif is_dataclass(weights):
        for found in fields(weights):
            yield from tensors_in(getattr(weights, found.name))


def weight_bytes(weights: Any) -> int:
    """Memory of the tensors in a method's weights; what several of them share counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors_in(weights):
        size = tensor.numel() * tensor.element_size()
        place = id(tensor) if tensor.is_mkldnn else tensor.data_ptr()
        sizes[place] = max(size, sizes.get(place, 0))
    return sum(sizes.values())
