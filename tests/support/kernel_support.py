"""Helpers of the kernel tests: where they run, how outputs are poisoned, how cases are combined."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FULL = os.environ.get("KERNELS_FULL") == "1"

# Rounding of the stored result, with room for one rounding of an operand on the way (the softmax
# weights before the second matmul).
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal within `dtype`'s rounding; NaN equals nothing, so an unwritten output fails."""
    torch.testing.assert_close(actual.float(), expected.float(), **TOLERANCE[dtype])


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """What `torch.empty` may return at worst: NaN in every element."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def seeded(seed: int = 0) -> torch.Generator:
    """A CPU generator, so that the GPU sees the same numbers."""
    return torch.Generator().manual_seed(seed)


def normal(
    *shape: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> torch.Tensor:
    """Gaussian values of `dtype` on the device under test."""
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


@contextmanager
def empty_is_poison() -> Iterator[None]:
    """Inside, `torch.empty` and `torch.empty_like` return NaN (integers: their minimum)."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(torch.iinfo(tensor.dtype).min)

    def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(empty(*args, **kwargs))

    def poisoned_empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(empty_like(*args, **kwargs))

    torch.empty, torch.empty_like = poisoned_empty, poisoned_empty_like  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def combinations(
    in_full: dict[str, Iterable[Any]] | None = None, **axes: Iterable[Any]
) -> list[dict[str, Any]]:
    """Cases that cover every pair of values of two axes. With KERNELS_FULL=1 the cross product as
    well, in which the axes named in `in_full` have its values instead: shapes that take the same
    ways through a kernel in less time."""
    pairs = _all_pairs({name: list(values) for name, values in axes.items()})
    if not FULL:
        return pairs
    axes |= in_full or {}
    product = [
        dict(zip(axes, row, strict=True)) for row in itertools.product(*map(list, axes.values()))
    ]
    return [*product, *(case for case in pairs if case not in product)]


def _all_pairs(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Each case starts from a pair that is still open and takes on every other axis the value that
    closes most open pairs, the least used of them. Deterministic."""
    names, values = list(axes), list(axes.values())
    if len(names) == 1:
        return [{names[0]: value} for value in values[0]]
    open_pairs = {
        ((i, x), (j, y))
        for i, j in itertools.combinations(range(len(names)), 2)
        for x in range(len(values[i]))
        for y in range(len(values[j]))
    }
    used: Counter[tuple[int, int]] = Counter()
    cases = []
    while open_pairs:
        case = dict(min(open_pairs))
        for axis in range(len(names)):
            if axis not in case:
                case[axis] = max(
                    range(len(values[axis])),
                    key=lambda x: (
                        sum(_pair((axis, x), at) in open_pairs for at in case.items()),
                        -used[axis, x],
                    ),
                )
        used.update(case.items())
        open_pairs -= set(itertools.combinations(sorted(case.items()), 2))
        cases.append({name: values[i][case[i]] for i, name in enumerate(names)})
    return cases


def _pair(a: tuple[int, int], b: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (a, b) if a < b else (b, a)


def case_id(case: dict[str, Any]) -> str:
    """A readable test id."""

    def text(value: Any) -> str:
        return str(value).replace("torch.", "")

    return "-".join(f"{name}={text(value)}" for name, value in case.items())
