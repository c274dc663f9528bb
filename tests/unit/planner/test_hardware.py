"""Cards as they are, and prices."""

import pytest

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.hardware import CARDS, find_card, this_cpu
from headrace.engine.planner.prices import PRICES_DATE, price_table
from headrace.engine.planner.schemes import parse_scheme


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("t4", "T4"),
        ("Tesla T4", "T4"),
        ("A100", "A100-80"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_card_is_found_as_people_and_drivers_write_it(typed: str, name: str) -> None:
    assert find_card(typed).name == name


def test_an_unknown_card_is_named_with_those_known() -> None:
    with pytest.raises(PlanError, match=r"unknown card 'K80'; known: T4, .*MI300X, cpu"):
        find_card("K80")


def test_memory_is_what_a_process_sees() -> None:
    """Less than the box says, by up to 9 %: 14.6 to 14.8 GiB of a T4's 16 GB."""
    assert 14.5 <= find_card("T4").memory / 2**30 <= 14.8
    boxes = {"T4": 16, "A10": 24, "L4": 24, "A100-80": 80, "H100": 80, "H200": 141, "B200": 192}
    for name, gigabytes in boxes.items():
        seen = find_card(name).memory / 2**30
        assert 0.90 * gigabytes <= seen * 1.0 < gigabytes


def test_what_a_card_cannot_do_is_refused_with_what_to_use() -> None:
    t4, a100, v100 = find_card("T4"), find_card("A100-80"), find_card("V100-16")
    assert t4.float_dtype == "fp16"
    assert t4.refuses(parse_scheme("bf16")) == "T4 has no bf16; use fp16"
    assert "8.9 or newer" in (a100.refuses(parse_scheme("fp8")) or "")
    assert "no int8" in (v100.refuses(parse_scheme("int8-dynamic")) or "")
    assert t4.refuses(parse_scheme("int8-dynamic")) is None
    assert find_card("L40S").refuses(parse_scheme("fp8")) is None
    assert any("FlashAttention-2" in limit for limit in t4.limits)


def test_only_cards_from_ampere_on_multiply_bf16_and_from_ada_on_fp8() -> None:
    for card in CARDS:
        if card.vendor == "nvidia":
            assert ("bf16" in card.flops) == (card.capability >= (8, 0))
            assert ("fp8" in card.flops) == (card.capability >= (8, 9))


def test_this_machine_is_a_card_too() -> None:
    cpu = this_cpu()
    assert cpu.memory > 2**28
    assert cpu.flops["fp32"] > 1e9
    assert cpu.float_dtype in ("fp32", "bf16")
    assert find_card("cpu").is_cpu


def test_every_listed_price_has_spot_below_on_demand_and_a_source() -> None:
    assert PRICES_DATE.count("-") == 1
    for name, price in price_table().items():
        assert find_card(name).name == name
        assert price.source
        assert price.spot <= price.on_demand


def test_prices_are_overridden() -> None:
    table = price_table(["A10=0.5/0.2, T4=0.1", "H100 80GB=2"])
    assert (table["A10"].on_demand, table["A10"].spot) == (0.5, 0.2)
    assert table["T4"].on_demand == 0.1
    assert table["H100"].on_demand == 2
    assert price_table(["3.5"], only="L4")["L4"].on_demand == 3.5


@pytest.mark.parametrize("text", ["A10", "A10=", "A10=x", "A10=1/y", "A10=-1", "K80=1", "0.5"])
def test_a_wrong_price_is_named(text: str) -> None:
    with pytest.raises(PlanError):
        price_table([text])
