"""Matmuls whose rows do not depend on what else is in the batch: for deterministic mode on a CPU.

A library chooses its blocking by the number of rows, and with it the order in which products are
summed. Here another method is only ever called with row counts that were tried when the model was
loaded and gave every row, at every place, the very bits that `SMALLEST` rows give it; a batch is
cut into such pieces, the last one padded. Idea: He, "Defeating nondeterminism in LLM inference",
Thinking Machines Lab, 2025.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.engine.errors import EngineError
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.method import LinearSpec, QuantMethod

SMALLEST = 16
SIZES = (16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048)
_TRIAL_OPERATIONS = 4e10
"""A shape's larger row counts are tried while all trials together take no more than this (0.2 s at
200 GFLOP/s); those that are not tried are not used."""

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FixedRowsWeights:
    """`inner`: the other method's; `sizes`: row counts it may be called with, ascending."""

    inner: Any
    in_features: int
    out_features: int
    sizes: Sizes = ()


class FixedRows:
    """`method` in pieces of tried row counts. `tried`: what other layers have found already, by
    the form of their weights; shared by the layers of one model."""

    def __init__(self, method: QuantMethod[Any], tried: dict[Hashable, Sizes]) -> None:
        self._method = method
        self._tried = tried

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        return self._method.tensor_shapes(spec)

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> FixedRowsWeights:
        inner = self._method.create_weights(spec, source, dtype, device)
        return FixedRowsWeights(inner, spec.in_features, sum(spec.out_features))

    def process(self, weights: FixedRowsWeights) -> FixedRowsWeights:
        """Raises EngineError for a method whose rows depend on each other."""
        inner = self._method.process(weights.inner)
        form = (type(self._method), weights.in_features, _form(inner))
        if form not in self._tried:
            self._tried[form] = agreeing_sizes(
                lambda x: self._method.apply(inner, x), weights.in_features, weights.out_features
            )
        sizes = self._tried[form]
        return FixedRowsWeights(inner, weights.in_features, weights.out_features, sizes)

    def apply(self, weights: FixedRowsWeights, x: Tensor) -> Tensor:
        left, parts = len(x), []
        if not left:
            return self._method.apply(weights.inner, x)
        while left:
            size = _next_size(left, weights.sizes)
            piece = x[len(x) - left :][:size]
            if len(piece) < size:
                padded = x.new_zeros(size, x.shape[1])
                padded[: len(piece)] = piece
                piece = padded
            parts.append(self._method.apply(weights.inner, piece)[:left])
            left -= min(size, left)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def dequantize(self, weights: FixedRowsWeights) -> Tensor:
        return self._method.dequantize(weights.inner)


def _next_size(left: int, sizes: Sizes) -> int:
    """The largest row count that is filled, but for the last few rows."""
    filled = -(-left // SMALLEST) * SMALLEST
    return max(size for size in sizes if size <= filled)


def agreeing_sizes(run: Callable[[Tensor], Tensor], in_features: int, out_features: int) -> Sizes:
    """Row counts of SIZES at which `run` gives each row the bits that it gives it among SMALLEST.

    Raises EngineError if a row's bits depend on its place or its neighbours among SMALLEST.
    """
    generator = torch.Generator().manual_seed(0)

    def rows(count: int) -> Tensor:
        """Magnitudes over several powers of two: another order of sums then shows in most rows."""
        powers = torch.randint(-4, 5, (count, in_features), generator=generator)
        return torch.randn(count, in_features, generator=generator) * powers.exp2()

    x = rows(SMALLEST)
    expected = run(x)
    for shift in range(1, SMALLEST):
        others = rows(SMALLEST)
        others[shift] = x[0]
        if not _same_bits(run(others)[shift], expected[0]):
            raise EngineError(
                "deterministic=True: a row of this quantization's matmul depends on the rows beside"
                " it; choose another quantization, or leave deterministic mode"
            )
    found = [SMALLEST]
    done = 0
    for size in SIZES[1:]:
        done += size - len(x) + size
        if 2.0 * done * in_features * out_features > _TRIAL_OPERATIONS:
            break
        while len(x) < size:
            more = rows(SMALLEST)
            x, expected = torch.cat((x, more)), torch.cat((expected, run(more)))
        if _same_bits(run(x), expected):
            found.append(size)
    return tuple(found)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {4: torch.int32, 2: torch.int16, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def _form(weights: Any) -> Hashable:
    """What a kernel is chosen by: types, shapes and settings, not values."""
    if isinstance(weights, Tensor):
        return weights.dtype, tuple(weights.shape)
    if isinstance(weights, list | tuple):
        return tuple(map(_form, weights))
    if is_dataclass(weights):
        return type(weights), *(_form(getattr(weights, item.name)) for item in fields(weights))
    if isinstance(weights, int | float | str):
        return weights
    return type(weights).__name__
