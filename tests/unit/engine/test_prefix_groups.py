"""Rows with common leading blocks."""

import itertools
import random

from headrace.engine.prefix_groups import prefix_groups


def saving(groups):
    return sum((len(group.seq_ids) - 1) * group.num_shared_blocks for group in groups)


def as_sets(groups):
    return {(frozenset(group.seq_ids), group.num_shared_blocks) for group in groups}


def test_rows_with_one_prefix_are_one_group():
    tables = [(n, [7, 8, 9, 100 + n]) for n in range(4)]
    assert as_sets(prefix_groups(tables)) == {(frozenset(range(4)), 3)}


def test_several_groups_and_loners_in_one_batch():
    tables = [(1, [7, 8, 1]), (2, [7, 8, 2]), (3, [5, 6]), (4, [5, 6, 4]), (5, [9]), (6, [])]
    assert as_sets(prefix_groups(tables)) == {
        (frozenset({1, 2}), 2),
        (frozenset({3, 4}), 2),
    }


def test_a_common_header_does_not_hide_deeper_groups():
    """Four rows share 1 block, two pairs share 10: two groups save 20 reads, one would save 3."""
    long = [list(range(10, 20)), list(range(30, 40))]
    tables = [(n, [0, *long[n % 2], 100 + n]) for n in range(4)]
    assert as_sets(prefix_groups(tables)) == {(frozenset({0, 2}), 11), (frozenset({1, 3}), 11)}


def test_a_deeper_pair_does_not_break_up_a_large_group():
    """Ten rows share 8 blocks (72 reads saved); two of them share 12 (12 saved)."""
    tables = [(n, [*range(8), 100 + n]) for n in range(8)]
    tables += [(n, [*range(8), 50, 51, 52, 53, 100 + n]) for n in (8, 9)]
    assert as_sets(prefix_groups(tables)) == {(frozenset(range(10)), 8)}


def test_a_deep_pair_is_taken_out_and_the_others_stay_together():
    """Five rows share 1 block, two more share 12: 12 + 4 reads saved."""
    tables = [(n, [0, 100 + n]) for n in range(5)]
    tables += [(n, [*range(12), 100 + n]) for n in (5, 6)]
    assert as_sets(prefix_groups(tables)) == {
        (frozenset(range(5)), 1),
        (frozenset({5, 6}), 12),
    }


def test_no_partition_saves_more():
    """Against every partition of up to six random tables."""
    rng = random.Random(5)
    for _ in range(100):
        size = rng.randint(2, 6)
        tables = []
        for n in range(size):
            table = [rng.choice([0, 0, 0, 1]) for _ in range(rng.randint(0, 8))]
            tables.append((n, [number(table[: end + 1]) for end in range(len(table))]))
        assert saving(prefix_groups(tables)) == max(
            sum(value(part) for part in parts) for parts in partitions(tables)
        )


def number(path):
    """One block for each path through a tree, as prefix sharing makes them."""
    return int("1" + "".join(map(str, path)), 2)


def value(part):
    shared = sum(
        1 for column in zip(*(table for _, table in part), strict=False) if len(set(column)) == 1
    )
    return (len(part) - 1) * shared


def partitions(items):
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for chosen in itertools.combinations(rest, size):
            left = [item for item in rest if item not in chosen]
            for others in partitions(left):
                yield [[first, *chosen], *others]
