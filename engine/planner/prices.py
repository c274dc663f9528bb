"""What a card costs an hour, on demand and interruptible. A table with a date, and overrides.

List prices in US dollars of one card in the smallest offer that has it, divided by the cards in
it. They move every month and differ by region and provider: give your own where it matters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.hardware import find_card

PRICES_DATE = "2025-07"
SPOT_SHARE = 0.4
"""Interruptible capacity at this share of the on-demand price: between 30 and 50 % is usual."""


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars a card and hour, and where the figure is from."""

    on_demand: float
    spot: float
    source: str


_LIST: dict[str, tuple[float, str]] = {
    "T4": (0.526, "AWS g4dn.xlarge"),
    "V100-16": (3.06, "AWS p3.2xlarge"),
    "V100-32": (3.90, "AWS p3dn.24xlarge / 8"),
    "A10": (0.75, "Lambda"),
    "A10G": (1.006, "AWS g5.xlarge"),
    "L4": (0.805, "AWS g6.xlarge"),
    "RTX-3090": (0.43, "RunPod secure"),
    "RTX-4090": (0.69, "RunPod secure"),
    "RTX-5090": (0.89, "RunPod secure"),
    "A6000": (0.80, "Lambda"),
    "L40S": (1.861, "AWS g6e.xlarge"),
    "A100-40": (2.74, "AWS p4d.24xlarge / 8"),
    "A100-80": (3.43, "AWS p4de.24xlarge / 8"),
    "H100-PCIe": (2.49, "Lambda"),
    "H100": (6.88, "AWS p5.48xlarge / 8"),
    "H200": (7.91, "AWS p5en.48xlarge / 8"),
    "B200": (14.24, "AWS p6-b200.48xlarge / 8"),
    "MI300X": (6.00, "Azure ND96isr MI300X v5 / 8"),
}


def price_table(overrides: Iterable[str] = (), only: str | None = None) -> Mapping[str, Price]:
    """Prices by card name.

    An override is `A10=0.75`, `A10=0.75/0.30` (on demand / spot), several with commas, or a bare
    number for the card `only`. Raises PlanError for what cannot be read.
    """
    table = {n: Price(p, p * SPOT_SHARE, source) for n, (p, source) in _LIST.items()}
    table["cpu"] = Price(0.0, 0.0, "your own machine")
    for text in overrides:
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = item.rpartition("=")
            if not equals and only is None:
                raise PlanError(f"price {item!r} names no card; write it as A10={item}")
            card = find_card(name).name if equals else str(only)
            table[card] = _parse(value, item)
    return table


def _parse(value: str, item: str) -> Price:
    on_demand, slash, spot = value.partition("/")
    try:
        first = float(on_demand)
        second = float(spot) if slash else first * SPOT_SHARE
    except ValueError:
        raise PlanError(
            f"price {item!r} is not CARD=DOLLARS or CARD=DOLLARS/SPOT an hour"
        ) from None
    if not (0 <= first < 1e6 and 0 <= second < 1e6):
        raise PlanError(f"price {item!r} is out of range")
    return Price(first, second, "given")
