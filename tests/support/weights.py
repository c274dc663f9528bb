"""Tensors at hand as a checkpoint's source, for tests of quantization methods."""

from collections.abc import Mapping

from torch import Tensor


class Given:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def load(self, name: str) -> Tensor:
        return self._tensors[name]
