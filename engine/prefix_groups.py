"""Groups the rows of a batch by the physical blocks that begin their tables.

Attention can then read a group's common blocks once for all its rows. Knows block ids only.
"""

from collections.abc import Sequence as Seq

from headrace.engine.batch import PrefixGroup

Table = tuple[int, list[int]]
"""A sequence's id and the blocks, all computed, that lie wholly before what it computes now."""


def prefix_groups(tables: Seq[Table]) -> list[PrefixGroup]:
    """Disjoint groups that save the most block reads: (rows - 1) * shared blocks, summed.

    Splits where a deeper common prefix of some rows is worth more than the one common to all: four
    system prompts behind one common template header make four groups, not one of the header.
    """
    groups: list[PrefixGroup] = []
    for members in _split(tables, 0):
        groups.extend(_best(members)[1])
    return groups


def _split(tables: Seq[Table], depth: int) -> list[list[Table]]:
    """The tables that go on after `depth`, by their block there; only those with company."""
    by_block: dict[int, list[Table]] = {}
    for table in tables:
        if len(table[1]) > depth:
            by_block.setdefault(table[1][depth], []).append(table)
    return [members for members in by_block.values() if len(members) > 1]


def _best(members: list[Table]) -> tuple[int, list[PrefixGroup]]:
    blocks = [table[1] for table in members]
    depth = _common_length(min(blocks), max(blocks))
    together = (len(members) - 1) * depth
    apart = 0
    parts: list[PrefixGroup] = []
    for part in _split(members, depth):
        saving, found = _best(part)
        apart += saving
        parts.extend(found)
    if apart > together:
        return apart, parts
    return together, [PrefixGroup(tuple(seq_id for seq_id, _ in members), depth)]


def _common_length(first: list[int], last: list[int]) -> int:
    """Of the smallest and the largest of a set of lists: the length common to all of them."""
    for index, block in enumerate(first):
        if index >= len(last) or last[index] != block:
            return index
    return len(first)
