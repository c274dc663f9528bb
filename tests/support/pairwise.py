"""Rows of choices in which every pair of choices of two factors occurs at least once."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]


def pairs(row: Mapping[str, str]) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in combinations(sorted(row.items()), 2)}


def pairwise(factors: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Greedy and deterministic. `allowed` judges partial rows: a pair it refuses is left out."""
    names = list(factors)
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
        if allowed({a: x, b: y})
    }
    rows = []
    while missing:
        row: Row = dict(min(missing, key=sorted))
        for name in names:
            if name in row:
                continue
            gains = {
                value: len(pairs({**row, name: value}) & missing)
                for value in factors[name]
                if allowed({**row, name: value})
            }
            row[name] = max(gains, key=gains.__getitem__)
        missing -= pairs(row)
        rows.append(row)
    return rows
