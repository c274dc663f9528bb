"""Just enough of PromQL to see which metrics and labels an expression names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

WORDS = {
    "by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "offset",
    "bool", "sum", "max", "min", "avg", "count", "rate", "increase", "absent", "histogram_quantile",
    "clamp_min", "time", "vector", "delta", "deriv", "topk", "quantile", "label_values",
}  # fmt: skip

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?")


@dataclass(frozen=True)
class Selector:
    """One metric with its label matchers as (label, value)."""

    metric: str
    matchers: tuple[tuple[str, str], ...]


def selectors(expression: str) -> Iterator[Selector]:
    strings: list[str] = []

    def keep(found: re.Match[str]) -> str:
        strings.append(found.group()[1:-1])
        return f"\x00{len(strings) - 1}\x00"

    text = _STRING.sub(keep, expression)
    text = _RANGE.sub("", _GROUPING.sub("", text))
    for found in _SELECTOR.finditer(text):
        name, inside = found.groups()
        if name in WORDS and inside is None:
            continue
        matchers = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\x00(\d+)\x00", inside or "")
        yield Selector(name, tuple((label, strings[int(n)]) for label, n in matchers))


def grouped_by(expression: str) -> set[str]:
    """Labels named in by, on and the like."""
    return {
        label.strip()
        for _, labels in _GROUPING.findall(expression)
        for label in labels.split(",")
        if label.strip()
    }
