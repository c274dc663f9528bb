"""Float32 weights in panels, and memory in huge pages."""

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from weights import Given

from headrace.engine.layers.huge_pages import HugePages
from headrace.engine.quant.method import LinearSpec
from headrace.engine.quant.panels import PANEL, in_panels, multiplies_panels, multiply_panels
from headrace.engine.quant.unquantized import PlainWeights, Unquantized

THP = "/sys/kernel/mm/transparent_hugepage"
CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(not multiplies_panels(), reason="needs numba and AVX-512")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_panels_hold_every_weight_once_and_zeros_beside_them() -> None:
    weight = normal(PANEL + 7, 5)
    panels = in_panels(weight)
    assert panels.shape == (2, 5, PANEL)
    back = panels.transpose(1, 2).reshape(-1, 5)
    assert torch.equal(back[: len(weight)], weight)
    assert not back[len(weight) :].any()


@needs_kernel
@pytest.mark.parametrize("out", [1, 47, 48, 49, 192, 576])
@pytest.mark.parametrize("size", [1, 30, 64, 577])
def test_panels_multiply_as_a_float64_product_does(out: int, size: int) -> None:
    """Row counts take every tile (8, 4, 2, 1), few rows and many, and more blocks than one."""
    weight, bias = normal(out, size, seed=1), normal(out, seed=2)
    panels = in_panels(weight)
    for rows in (0, 1, 2, 3, 7, 8, 15, 24, 31, 65, 700):
        x = normal(rows, size, seed=rows)
        expected = functional.linear(x.double(), weight.double(), bias.double())
        found = multiply_panels(panels, bias, x)
        magnitude = functional.linear(x.abs(), weight.abs(), bias.abs()).double()
        assert ((found - expected).abs() <= 1e-7 * size**0.5 * magnitude + 1e-6).all()


@needs_kernel
def test_the_kernel_and_the_packing_agree_on_the_width_of_a_panel() -> None:
    from headrace.engine.quant import panel_kernels

    assert panel_kernels.PANEL == PANEL


@needs_kernel
def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    panels, start = in_panels(normal(100, 333)), normal(100, seed=1)
    x = normal(301, 333, seed=2)
    whole = multiply_panels(panels, start, x)
    for first, last in ((0, 1), (3, 5), (7, 31), (100, 164), (300, 301)):
        assert torch.equal(multiply_panels(panels, start, x[first:last]), whole[first:last])


@needs_kernel
def test_a_row_with_nan_leaves_its_neighbours_alone() -> None:
    panels, start = in_panels(normal(60, 64)), torch.zeros(60)
    x = normal(9, 64)
    clean = multiply_panels(panels, start, x)
    x[4, 3] = torch.nan
    found = multiply_panels(panels, start, x)
    assert found[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[others], clean[others])


@needs_kernel
@pytest.mark.parametrize("bias", [True, False])
def test_an_unquantized_layer_of_several_parts_runs_in_panels(bias: bool) -> None:
    tensors = {"a.weight": normal(3, 40), "b.weight": normal(90, 40, seed=1)}
    tensors |= {"a.bias": normal(3, seed=2), "b.bias": normal(90, seed=3)}
    spec, method = LinearSpec(("a", "b"), 40, (3, 90), bias), Unquantized()
    weights = method.process(method.create_weights(spec, Given(tensors), torch.float32, CPU))
    assert weights.layout == "panels"
    x = normal(5, 40, seed=4)
    expected = functional.linear(
        x,
        torch.cat((tensors["a.weight"], tensors["b.weight"])),
        torch.cat((tensors["a.bias"], tensors["b.bias"])) if bias else None,
    )
    torch.testing.assert_close(method.apply(weights, x), expected)


@dataclass(frozen=True)
class _Weights:
    large: Tensor
    small: Tensor
    parts: tuple[Tensor, ...]
    name: str


def test_moved_weights_are_equal_and_apart() -> None:
    """100 tensors of 400 kB take two pieces of 32 MiB; writing to one changes no other."""
    memory = HugePages()
    held = [
        memory.moved(_Weights(normal(100_000, seed=i), normal(3), (normal(50, 2000, seed=i),), "x"))
        for i in range(50)
    ]
    held[7].large.zero_()
    for index, weights in enumerate(held):
        if index != 7:
            assert torch.equal(weights.large, normal(100_000, seed=index))
        assert torch.equal(weights.parts[0], normal(50, 2000, seed=index))
        assert weights.large.data_ptr() % 64 == 0
        assert weights.name == "x"


def test_what_onednn_packed_stays_as_it_is() -> None:
    if not torch._C._has_mkldnn:
        pytest.skip("torch without oneDNN")
    packed = torch.ops.mkldnn._reorder_linear_weight(normal(512, 512), 64)
    weights = PlainWeights(packed, None, "onednn")
    assert HugePages().moved(weights).weight is packed


def test_memory_for_weights_is_private_and_asks_for_huge_pages() -> None:
    """The kernel's own word (smaps): shared mappings would never get large pages here."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not Path(THP).exists():
        pytest.skip("no huge pages to ask for")
    held = HugePages().moved(normal(100_000))
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        place = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ", line)
        if place and int(place[1], 16) <= held.data_ptr() < int(place[2], 16):
            assert place[3].endswith("p")
            flags = next(line for line in lines if line.startswith("VmFlags:"))
            assert "hg" in flags.split()
            return
    raise AssertionError("the tensor lies in no mapping")
