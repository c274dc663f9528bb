"""How the weights of a whole model are held: which method each linear layer gets, and where its
tensors come from. Knows no architecture and no file format.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.method import LinearSpec, QuantMethod
from headrace.engine.quant.unquantized import Unquantized

MethodFor = Callable[[LinearSpec], QuantMethod[Any]]


class Embedding(Protocol):
    def __call__(self, token_ids: Tensor, /) -> Tensor:
        """Rows [tokens, hidden] in the model's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """Rows as they are stored, in the model's dtype when they are looked up."""

    weight: Tensor
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids].to(self.dtype)


def plain(spec: LinearSpec) -> QuantMethod[Any]:
    return Unquantized()


@dataclass(frozen=True, slots=True)
class Scheme:
    """`source`: the tensors as the methods read them. `head`: the method for a head stored as
    floats; with `stored_head` the head is a layer like the others. `ignored`: tensors that no layer
    needs. `embedding`: makes the lookup of the tensor with a name, None: a plain table."""

    name: str
    source: TensorSource
    method_for: MethodFor = plain
    head: QuantMethod[Any] = field(default_factory=Unquantized)
    stored_head: bool = False
    ignored: Iterable[str] = ()
    embedding: Callable[[str, torch.dtype], Embedding] | None = None

    def embed(self, name: str, dtype: torch.dtype, device: torch.device) -> Embedding:
        if self.embedding is not None:
            return self.embedding(name, dtype)
        weight = self.source.load(name).to(device)
        # Wider than the model's dtype is kept narrow; narrower (16 bits) is kept as it is.
        if weight.dtype.itemsize > dtype.itemsize:
            weight = weight.to(dtype)
        return Table(weight, dtype)


class FloatSource:
    """The tensors of a quantized checkpoint as the floats that they stand for."""

    def __init__(self, stored: Scheme, layers: Sequence[LinearSpec]) -> None:
        self._stored = stored
        self._specs: dict[str, LinearSpec] = {}
        shapes = dict(stored.source.shapes())
        for name in stored.ignored:
            shapes.pop(name, None)
        for layer in layers:
            for index, part in enumerate(layer.parts):
                spec = replace(layer.part(index), bias=False)
                method = stored.method_for(spec)
                if isinstance(method, Unquantized):
                    continue
                for name in method.tensor_shapes(spec):
                    shapes.pop(name, None)
                shapes[f"{part}.weight"] = (*spec.out_features, spec.in_features)
                self._specs[f"{part}.weight"] = spec
        self._shapes = shapes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str) -> Tensor:
        spec = self._specs.get(name)
        if spec is None:
            return self._stored.source.load(name)
        method = self._stored.method_for(spec)
        weights = method.create_weights(
            spec, self._stored.source, torch.float32, torch.device("cpu")
        )
        return method.dequantize(weights)
