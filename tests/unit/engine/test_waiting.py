"""The order in which waiting sequences are taken, and what that costs."""

import random

import pytest

from headrace.engine.waiting import Waiter, WaitingQueue

SIZE = 4


def waiter(seq_id, prefix, output=10, tokens=None):
    """`prefix`: names of blocks, e.g. "abc"; keys are chained, as the cache's are."""
    keys = [prefix[: end + 1].encode() for end in range(len(prefix))]
    return Waiter(seq_id, keys, tokens or SIZE * len(prefix) + 1, output)


def queue(*waiters):
    waiting = WaitingQueue(SIZE)
    for each in waiters:
        waiting.add(each)
    return waiting


def take_all(waiting):
    order = []
    while (first := waiting.first()) is not None:
        waiting.take(first.seq_id)
        waiting.end_step()
        order.append(first.seq_id)
    return order


def test_groups_are_contiguous_and_so_are_groups_within_groups():
    """Two system prompts behind one header, with few-shot variants, added all mixed up."""
    prefixes = ["hAAx", "hBBp", "hAAy", "hBBq", "hAAx", "hBBp", "hAAy", "hBBq"]
    waiting = queue(*(waiter(n, p + chr(0x100 + n)) for n, p in enumerate(prefixes)))
    order = [prefixes[n] for n in take_all(waiting)]
    for depth in (3, 4):
        seen = [p[:depth] for p in order]
        runs = [p for p, q in zip(seen, [None, *seen], strict=False) if p != q]
        assert len(runs) == len(set(runs)), f"a group was left and entered again: {order}"


def test_decode_heavy_groups_go_first():
    """Same prompts; b's answers are ten times as long."""
    waiting = queue(
        *(waiter(n, "aaaa" + chr(0x100 + n), output=10) for n in range(3)),
        *(waiter(n, "bbbb" + chr(0x100 + n), output=100) for n in range(3, 6)),
    )
    assert set(take_all(waiting)[:3]) == {3, 4, 5}


def test_a_shared_prefix_counts_once_in_what_a_group_costs():
    """a: 10 answers of 10 for 40 shared + 10 x 5 own tokens; b alone: 14 for 45. Without sharing a
    would look worse (10 for 45) than b (14 for 45)."""
    group = [waiter(n, "a" * 10 + chr(0x100 + n), output=10) for n in range(10)]
    alone = waiter(99, "b" * 11, output=14)
    assert take_all(queue(alone, *group))[-1] == 99


def test_long_answers_go_first_within_a_group():
    lengths = {1: 5, 2: 50, 3: 20, 4: 50}
    waiting = queue(*(waiter(n, f"aa{n}", output=out) for n, out in lengths.items()))
    assert take_all(waiting) == [2, 4, 3, 1]


def test_equal_ones_go_in_order_of_arrival():
    waiting = queue(*(waiter(n, "ab") for n in range(5)))
    assert take_all(waiting) == list(range(5))


def test_whoever_arrives_after_the_queue_was_opened_overtakes_nobody_in_it():
    """A stream of long answers, one after the other for ever, doesn't starve a short one."""
    waiting = queue(*(waiter(n, f"{n}", output=1) for n in range(5)))
    waiting.take(waiting.first().seq_id)
    order = []
    for n in range(10, 20):
        waiting.add(waiter(n, chr(n), output=1000))
        first = waiting.first()
        waiting.take(first.seq_id)
        order.append(first.seq_id)
    assert set(order[:4]) < set(range(5))


def test_preempted_sequences_go_before_all_and_the_last_put_back_first():
    waiting = queue(waiter(1, "a"))
    for n in (2, 3):
        waiting.put_front(waiter(n, "b", output=0))
    assert take_all(waiting) == [3, 2, 1]


def test_holding_back_holds_all_that_share_the_block_and_nobody_else():
    waiting = queue(*(waiter(n, "aaa" + chr(0x100 + n)) for n in range(5)), waiter(9, "b", 1))
    first = waiting.first()
    assert first.seq_id != 9
    assert waiting.hold(first, 2, step=1, max_delay=8)
    assert waiting.first().seq_id == 9
    waiting.take(9)
    assert waiting.first() is None
    waiting.end_step()
    assert waiting.first() is not None


def test_a_block_beyond_the_shared_part_holds_back_one():
    waiting = queue(*(waiter(n, f"aa{n}") for n in range(3)))
    first = waiting.first()
    assert waiting.hold(first, 2, step=1, max_delay=8)
    assert waiting.first().seq_id != first.seq_id
    waiting.end_step()
    assert waiting.first().seq_id == first.seq_id


def test_holding_back_ends_after_the_bound():
    waiting = queue(*(waiter(n, "aa" + chr(0x100 + n)) for n in range(3)))
    held = 0
    for step in range(1, 20):
        if not waiting.hold(waiting.first(), 1, step, max_delay=5):
            break
        held += 1
        waiting.end_step()
    assert held == 5


def test_pins_of_a_prefix_come_back_with_its_last_child():
    waiting = queue(*(waiter(n, "aa" + chr(0x100 + n)) for n in range(3)))
    node = waiting.first().node
    node.pin = 77
    assert waiting.take(0) == []
    assert waiting.remove(2) == []
    assert waiting.take(1) == [77]


@pytest.mark.parametrize("seed", range(20))
def test_everybody_is_taken_once_whatever_is_added_removed_and_held(seed):
    rng = random.Random(seed)
    waiting = WaitingQueue(SIZE)
    alive, taken, next_id = set(), [], 0
    for step in range(300):
        for _ in range(rng.randint(0, 2)):
            prefix = "".join(rng.choice("ab") for _ in range(rng.randint(0, 6)))
            if rng.random() < 0.1:
                waiting.put_front(waiter(next_id, prefix))
            else:
                waiting.add(waiter(next_id, prefix, rng.randint(1, 50)))
            alive.add(next_id)
            next_id += 1
        if alive and rng.random() < 0.2:
            gone = rng.choice(sorted(alive))
            waiting.remove(gone)
            alive.discard(gone)
        for _ in range(rng.randint(0, 3)):
            first = waiting.first()
            if first is None:
                break
            index = rng.randrange(7)
            if index < len(first.keys) and waiting.hold(first, index, step, max_delay=3):
                continue
            waiting.take(first.seq_id)
            assert first.seq_id in alive
            alive.discard(first.seq_id)
            taken.append(first.seq_id)
        waiting.end_step()
        assert len(waiting) == len(alive)
    rest = take_all(waiting)
    assert set(rest) == alive and len(rest) == len(alive)
    assert len(taken) == len(set(taken))


def test_taking_looks_at_no_more_nodes_with_10_000_waiting_than_with_100(monkeypatch):
    """Counted, not timed: the cost of a step must not grow with the number that wait."""
    looks = []
    for count in (100, 10_000):
        waiting = queue(*(waiter(n, f"s{n % 10}-{n:05d}", n % 7 + 1) for n in range(count)))
        for _ in range(20):
            waiting.take(waiting.first().seq_id)
        seen = []

        def counting(node, held, _seen=seen, _top=waiting._now._top_group):
            _seen.append(node)
            return _top(node, held)

        monkeypatch.setattr(waiting._now, "_top_group", counting)
        for _ in range(50):
            waiting.take(waiting.first().seq_id)
        looks.append(len(seen))
    assert looks[1] <= looks[0] * 1.2
