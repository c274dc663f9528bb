"""The sequences that wait, ordered so that those with a common prefix follow each other.

They lie in a compressed trie over the prefix-cache keys of their full blocks: a node stands for a
prefix that at least two of them share, and what follows it is nobody else's. Taking goes through
one subtree until it is empty, so groups are contiguous and groups within groups too. Among groups,
the one with the most output per prompt token to compute goes first (long decodes then run beside
the later prefills); among single sequences the longest answer, so that the tail is short.

Two tries take turns: what arrives after the first was opened waits in the second, so nobody is
overtaken for ever. Adding costs O(blocks), taking O(depth) and a heap step; nothing here is done
for every waiting sequence in every step. Knows keys and expected lengths, not blocks.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import count


class Waiter:
    """A place in the queue. `keys`: prefix-cache keys of the full blocks of its tokens.

    `expected_output` and `num_tokens` are in tokens. `hold_until`: the step from which it is no
    longer held back for a prefix in flight; None until it is first held.
    """

    __slots__ = ("expected_output", "gone", "hold_until", "keys", "node", "num_tokens", "seq_id")

    def __init__(
        self, seq_id: int, keys: list[bytes], num_tokens: int, expected_output: int
    ) -> None:
        self.seq_id = seq_id
        self.keys = keys
        self.num_tokens = num_tokens
        self.expected_output = expected_output
        self.hold_until: int | None = None
        self.node: PrefixNode | None = None
        self.gone = False


class PrefixNode:
    """A prefix of `depth` blocks that several waiting sequences share (the root: of none).

    `pin` is the holder's handle on its cached blocks, if it has one; opaque here.
    """

    __slots__ = (
        "active",
        "children",
        "depth",
        "groups",
        "hold_until",
        "keys",
        "output_tokens",
        "parent",
        "pin",
        "rank",
        "rest_tokens",
        "shared_tokens",
        "size",
        "waiters",
    )

    def __init__(self, parent: "PrefixNode | None", keys: list[bytes], shared_tokens: int) -> None:
        self.parent = parent
        self.keys = keys
        self.depth = len(keys)
        self.shared_tokens = shared_tokens
        self.hold_until: int | None = None
        self.pin: int | None = None
        self.size = 0
        self.output_tokens = 0
        self.rest_tokens = 0
        self.rank = 0.0
        self.active: PrefixNode | None = None
        self.children: dict[bytes, PrefixNode | Waiter] = {}
        """By the first key after this prefix: a deeper shared prefix, or one sequence alone."""
        self.groups: list[tuple[float, int, PrefixNode]] = []
        self.waiters: list[tuple[int, int, Waiter]] = []

    @property
    def worth(self) -> float:
        """Expected output tokens for each prompt token still to compute when the parent's prefix
        is there; the tokens that deeper groups share count as if they were there as well."""
        parent = self.parent.shared_tokens if self.parent else 0
        return self.output_tokens / (self.shared_tokens - parent + self.rest_tokens + 1)


class _Trie:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = PrefixNode(None, [], 0)
        self.opened = False
        self._tie = count()

    def add(self, waiter: Waiter) -> None:
        node = self.root
        keys = waiter.keys
        while node.depth < len(keys):
            key = keys[node.depth]
            other = node.children.get(key)
            if other is None:
                node.children[key] = waiter
                break
            if isinstance(other, PrefixNode):
                common = _common(other.keys, keys, node.depth)
                if common == other.depth:
                    node = other
                    continue
                node = self._split(node, key, other, common)
                continue
            common = _common(other.keys, keys, node.depth)
            inner = PrefixNode(node, keys[:common], common * self.block_size)
            node.children[key] = inner
            self._move(other, node, inner)
            node = inner
        self._place(waiter, node)

    def _split(self, node: PrefixNode, key: bytes, lower: PrefixNode, common: int) -> PrefixNode:
        """Put a node of `common` blocks between `node` and its child `lower`."""
        inner = PrefixNode(node, lower.keys[:common], common * self.block_size)
        inner.hold_until = lower.hold_until
        node.children[key] = inner
        inner.children[lower.keys[common]] = lower
        lower.parent = inner
        inner.size = lower.size
        inner.output_tokens = lower.output_tokens
        inner.rest_tokens = lower.rest_tokens
        if node.active is lower:
            node.active = inner
            inner.active = lower
        self._rank(lower)
        self._rank(inner)
        return inner

    def _move(self, waiter: Waiter, upper: PrefixNode, node: PrefixNode) -> None:
        """Sink a waiter from the node that it lies in into one just made below."""
        if node.depth < len(waiter.keys):
            node.children[waiter.keys[node.depth]] = waiter
        node.hold_until = waiter.hold_until
        self._count(upper, waiter, -1)
        self._place(waiter, node)

    def _place(self, waiter: Waiter, node: PrefixNode) -> None:
        waiter.node = node
        heapq.heappush(node.waiters, (-waiter.expected_output, waiter.seq_id, waiter))
        self._count(node, waiter, 1)

    def _count(self, node: PrefixNode, waiter: Waiter, sign: int) -> None:
        rest = waiter.num_tokens - node.shared_tokens
        above: PrefixNode | None = node
        while above is not None:
            above.size += sign
            above.output_tokens += sign * waiter.expected_output
            above.rest_tokens += sign * rest
            if above.size and abs(above.worth - above.rank) > 0.25 * above.rank:
                self._rank(above)
            above = above.parent

    def _rank(self, node: PrefixNode) -> None:
        """File the node under its present worth; entries of another rank are out of date. Small
        changes are let be, so that a group of thousands doesn't file thousands of entries."""
        if node.parent is not None:
            node.rank = node.worth
            heapq.heappush(node.parent.groups, (-node.rank, next(self._tie), node))

    def remove(self, waiter: Waiter) -> list[int]:
        """Take a waiter out. Returns the pins of nodes that became empty."""
        node = waiter.node
        assert node is not None
        waiter.gone = True
        if node.depth < len(waiter.keys):
            node.children.pop(waiter.keys[node.depth], None)
        self._count(node, waiter, -1)
        pins = []
        while node.size == 0 and node.parent is not None:
            if node.pin is not None:
                pins.append(node.pin)
                node.pin = None
            parent = node.parent
            parent.children.pop(node.keys[parent.depth], None)
            if parent.active is node:
                parent.active = None
            node = parent
        waiter.node = None
        return pins

    def first(self, held: set[PrefixNode]) -> Waiter | None:
        return self._first(self.root, held)

    def _first(self, node: PrefixNode, held: set[PrefixNode]) -> Waiter | None:
        while True:
            if node in held or not node.size:
                return None
            active = node.active
            if active is not None and active not in held and active.size:
                found = self._first(active, held)
                if found is not None:
                    return found
            group = self._top_group(node, held)
            single = self._top_waiter(node)
            if group is None:
                return single
            if single is not None and self._worth(single, node) > group.rank:
                return single
            found = self._first(group, held)
            if found is not None:
                node.active = group
                return found
            held.add(group)

    def _worth(self, waiter: Waiter, node: PrefixNode) -> float:
        return waiter.expected_output / (waiter.num_tokens - node.shared_tokens + 1)

    def _top_group(self, node: PrefixNode, held: set[PrefixNode]) -> PrefixNode | None:
        """The best child that is not held. Out-of-date heap entries are dropped on the way."""
        aside = []
        found = None
        while node.groups:
            entry = node.groups[0]
            group = entry[2]
            if group.parent is not node or not group.size or -entry[0] != group.rank:
                heapq.heappop(node.groups)
            elif group in held:
                aside.append(heapq.heappop(node.groups))
            else:
                found = group
                break
        for entry in aside:
            heapq.heappush(node.groups, entry)
        return found

    def _top_waiter(self, node: PrefixNode) -> Waiter | None:
        while node.waiters:
            waiter = node.waiters[0][2]
            if waiter.gone or waiter.node is not node:
                heapq.heappop(node.waiters)
            else:
                return waiter
        return None


def _common(first: list[bytes], second: list[bytes], start: int) -> int:
    """How many leading keys are equal; the first `start` are known to be."""
    limit = min(len(first), len(second))
    while start < limit and first[start] == second[start]:
        start += 1
    return start


class WaitingQueue:
    """Preempted sequences in front, last arrived first; then the open trie; then the next one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._front: deque[Waiter] = deque()
        self._now = _Trie(block_size)
        self._next = _Trie(block_size)
        self._home: dict[int, _Trie | None] = {}
        self._waiters: dict[int, Waiter] = {}
        self._held_nodes: set[PrefixNode] = set()
        self._held_waiters: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._waiters

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters.values())

    def add(self, waiter: Waiter) -> None:
        trie = self._next if self._now.opened else self._now
        trie.add(waiter)
        self._home[waiter.seq_id] = trie
        self._waiters[waiter.seq_id] = waiter

    def put_front(self, waiter: Waiter) -> None:
        self._front.appendleft(waiter)
        self._home[waiter.seq_id] = None
        self._waiters[waiter.seq_id] = waiter

    def first(self) -> Waiter | None:
        """The next in order that is not held back in this step."""
        while self._front and self._front[0].gone:
            self._front.popleft()
        if self._front:
            return self._front[0]
        if not self._now.root.size:
            self._now, self._next = self._next, _Trie(self._block_size)
        return self._now.first(self._held_nodes) or self._next.first(self._held_nodes)

    def take(self, seq_id: int) -> list[int]:
        """Take out the one that is admitted; as `remove`. Its trie counts as opened from now on."""
        trie = self._home[seq_id]
        if trie is not None:
            trie.opened = True
        return self.remove(seq_id)

    def remove(self, seq_id: int) -> list[int]:
        """Take it out, wherever it is. Returns the pins of prefixes that nobody waits for now."""
        waiter = self._waiters.pop(seq_id)
        trie = self._home.pop(seq_id)
        if trie is None:
            waiter.gone = True
            return []
        return trie.remove(waiter)

    def hold(self, waiter: Waiter, index: int, step: int, max_delay: int) -> bool:
        """Hold back, for this step, all that share the waiter's key at `index`.

        False, and nothing held, once they have been held for `max_delay` steps since the first.
        """
        home = waiter.node
        if home is None:
            return False
        group: PrefixNode | None = None
        above: PrefixNode | None = home
        while above is not None and above.depth > index:
            group, above = above, above.parent
        owner = waiter if group is None else group
        if owner.hold_until is None:
            owner.hold_until = step + max_delay
        if step >= owner.hold_until:
            return False
        if group is not None:
            self._held_nodes.add(group)
        else:
            heapq.heappop(home.waiters)
            self._held_waiters.append(waiter)
        return True

    def end_step(self) -> None:
        """What was held back in this step may be tried again in the next one."""
        self._held_nodes.clear()
        for waiter in self._held_waiters:
            if not waiter.gone and waiter.node is not None:
                entry = (-waiter.expected_output, waiter.seq_id, waiter)
                heapq.heappush(waiter.node.waiters, entry)
        self._held_waiters.clear()
