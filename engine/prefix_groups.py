"""Groups the rows of a batch by the physical blocks that begin their tables.

Attention can then read a group's common blocks once for all its rows. Knows block ids only.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headrace.engine.batch import PrefixGroup, ScheduledRow

Table = tuple[int, list[int]]
"""A sequence's id and the blocks, all computed, that lie wholly before what it computes now."""


class PrefixGrouper:
    """The groups of each step's rows, found anew only when the rows have changed or a prompt is
    under way. Shared blocks lie wholly before every row's first token to compute.

    `block_ids`: the table of a sequence.
    """

    def __init__(self, block_size: int, block_ids: Callable[[int], list[int]]) -> None:
        self._block_size = block_size
        self._block_ids = block_ids
        self._rows: list[int] = []
        self._groups: list[PrefixGroup] = []

    def groups(self, rows: Seq[ScheduledRow]) -> list[PrefixGroup]:
        if len(rows) < 2:
            return []
        ids = [row.seq_id for row in rows]
        if ids == self._rows:
            return self._groups
        size = self._block_size
        self._groups = prefix_groups(
            [
                (row.seq_id, self._block_ids(row.seq_id)[: row.num_computed_tokens // size])
                for row in rows
            ]
        )
        settled = all(row.num_scheduled_tokens == 1 for row in rows)
        self._rows = ids if settled else []
        return self._groups

    def forget(self) -> None:
        """Tables have changed behind the same rows."""
        self._rows = []


@dataclass(slots=True)
class _Node:
    """Rows with `depth` common blocks: those that go on alone, and subsets with more in common.

    `best`: for each worth of a row that is left to a group above, the most that can be made of the
    rows here, and whether they make a group of their own.
    """

    depth: int
    rows: list[int] = field(default_factory=list)
    children: list["_Node"] = field(default_factory=list)
    best: dict[int, tuple[int, bool]] = field(default_factory=dict)


def prefix_groups(tables: Seq[Table]) -> list[PrefixGroup]:
    """Disjoint groups that save the most block reads: (rows - 1) * shared blocks, summed.

    Four system prompts behind one common template header make four groups, not one of the header;
    rows that share no more than the header make a fifth beside them.
    """
    groups: list[PrefixGroup] = []
    for members in _by_block(tables, 0)[1]:
        node = _tree(members)
        _value(node, 0)
        _collect(node, 0, groups)
    return groups


def _tree(members: Seq[Table]) -> _Node:
    blocks = [table[1] for table in members]
    node = _Node(_common_length(min(blocks), max(blocks)))
    node.rows, parts = _by_block(members, node.depth)
    node.children = [_tree(part) for part in parts]
    return node


def _by_block(tables: Seq[Table], depth: int) -> tuple[list[int], list[list[Table]]]:
    """The rows that go on alone after `depth`, and the others by their block there."""
    by_block: dict[int, list[Table]] = {}
    alone = []
    for table in tables:
        if len(table[1]) > depth:
            by_block.setdefault(table[1][depth], []).append(table)
        else:
            alone.append(table[0])
    parts = []
    for part in by_block.values():
        if len(part) > 1:
            parts.append(part)
        else:
            alone.append(part[0][0])
    return alone, parts


def _value(node: _Node, above: int) -> int:
    """Blocks that the rows here share, in all, less what each of their groups reads itself, if a
    row that is in no group here shares `above` blocks with a group further up."""
    known = node.best.get(above)
    if known is None:
        together = node.depth * (len(node.rows) - 1)
        together += sum(_value(child, node.depth) for child in node.children)
        apart = above * len(node.rows) + sum(_value(child, above) for child in node.children)
        known = node.best[above] = (max(together, apart), together > apart)
    return known[0]


def _collect(node: _Node, above: int, groups: list[PrefixGroup]) -> list[int]:
    """Append the chosen groups; returns the rows that are left to a group further up."""
    grouped = node.best[above][1]
    inner = node.depth if grouped else above
    rows = list(node.rows)
    for child in node.children:
        rows.extend(_collect(child, inner, groups))
    if not grouped:
        return rows
    groups.append(PrefixGroup(tuple(rows), node.depth))
    return []


def _common_length(first: list[int], last: list[int]) -> int:
    """Of the smallest and the largest of a set of lists: the length common to all of them."""
    for index, block in enumerate(first):
        if index >= len(last) or last[index] != block:
            return index
    return len(first)
