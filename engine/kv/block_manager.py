"""Block tables of sequences: grows them, shares computed prefixes, and gives blocks back in time.

A sequence's table is opened with what the prefix cache has, grown as its tokens come, committed to
the cache block by block once computed, and closed when it ends or is preempted. Blocks that a step
in flight still reads are given back after that step. Nothing here decides who may run.
"""

from collections import Counter, deque
from collections.abc import Sequence as Seq

from headrace.engine.errors import EngineError
from headrace.engine.kv.block_pool import Block, BlockPool
from headrace.engine.kv.prefix_cache import (
    NO_MATCH,
    TOKEN_BYTES,
    Parent,
    PrefixCache,
    PrefixMatch,
    chain_key,
    root_key,
    token_content,
)
from headrace.engine.sequence import Sequence


class BlockTable:
    """The blocks of one sequence in order. `num_committed`: leading blocks known to the cache;
    `parent` and `key`: the entry that the next committed block continues."""

    __slots__ = ("block_ids", "blocks", "key", "num_committed", "parent")

    def __init__(self, salt: bytes) -> None:
        self.blocks: list[Block] = []
        self.block_ids: list[int] = []
        self.num_committed = 0
        self.parent: Parent = salt
        self.key = root_key(salt)


def tokens_between(seq: Sequence, start: int, end: int) -> list[int]:
    """Tokens [start, end) of prompt and output as one list."""
    prompt = seq.prompt_token_ids
    size = len(prompt)
    if end <= size:
        return prompt[start:end]
    if start >= size:
        return seq.output_token_ids[start - size : end - size]
    return prompt[start:] + seq.output_token_ids[: end - size]


class BlockManager:
    """Tables by `seq_id`, over one BlockPool and one PrefixCache."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(block_size)
        self._tables: dict[int, BlockTable] = {}
        self._retired: deque[tuple[int, list[Block]]] = deque()
        self._pins: dict[int, tuple[Block, ...]] = {}
        self._next_pin = 0

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1. Cached blocks that nobody holds are free."""
        return 1.0 - self._pool.num_free / self.num_blocks

    @property
    def num_retired(self) -> int:
        """Tables that are given up but kept for a step in flight."""
        return len(self._retired)

    @property
    def dummy_block_id(self) -> int:
        return self._pool.dummy_block_id

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def keys_of(self, seq: Sequence) -> list[bytes]:
        """Prefix-cache keys of the sequence's full blocks; empty with caching off."""
        if not self.enable_prefix_caching:
            return []
        return self._cache.keys_of(tokens_between(seq, 0, seq.num_tokens), seq.salt)

    def match(self, seq: Sequence, keys: Seq[bytes]) -> PrefixMatch:
        """What the cache has of the sequence's tokens; it may be gone by the next allocation."""
        if not keys:
            return NO_MATCH
        return self._cache.match(tokens_between(seq, 0, seq.num_tokens), keys, seq.salt)

    def cost(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks that `open` with this match and `num_tokens` would use up."""
        fresh = self.blocks_for(num_tokens) - len(match.blocks)
        return fresh + sum(1 for block in match.blocks if block.ref_count == 0)

    def open(self, seq: Sequence, match: PrefixMatch, num_tokens: int) -> int | None:
        """Give the sequence a table for `num_tokens` tokens that begins with the matched blocks.

        Returns how many tokens are already computed, or None (and nothing changed) when the pool
        has too few free blocks. Matched blocks that were reused since the look-up are not taken.
        """
        if seq.seq_id in self._tables:
            raise ValueError(f"sequence {seq.seq_id} has a table already")
        blocks: list[Block] = []
        last: tuple[int, bytes] | None = None
        for block, serial in zip(match.blocks, match.serials, strict=True):
            if block.key is None or block.serial != serial:
                break
            blocks.append(block)
            last = serial, block.key
        num_cached = min(len(blocks) * self.block_size, match.num_tokens)
        fresh = self.blocks_for(num_tokens) - len(blocks)
        idle = sum(1 for block in blocks if block.ref_count == 0)
        if fresh + idle > self._pool.num_free:
            return None
        table = BlockTable(seq.salt)
        for block in blocks:
            self._pool.hold(block)
        table.blocks = blocks
        table.block_ids = [block.block_id for block in blocks]
        if last is not None:
            table.num_committed = len(blocks)
            table.parent, table.key = last
        self._extend(table, fresh)
        self._tables[seq.seq_id] = table
        return num_cached

    def grow(self, seq_id: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens; False (and nothing changed) if the pool is short."""
        table = self._tables[seq_id]
        fresh = self.blocks_for(num_tokens) - len(table.blocks)
        if fresh <= 0:
            return True
        if fresh > self._pool.num_free:
            return False
        self._extend(table, fresh)
        return True

    def block_ids(self, seq_id: int) -> list[int]:
        """The sequence's block table, to be read only."""
        return self._tables[seq_id].block_ids

    def has_table(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def num_committed(self, seq_id: int) -> int:
        """Leading blocks of the table that the cache has, or had, an entry for."""
        return self._tables[seq_id].num_committed

    def commit(self, seq: Sequence, num_computed: int) -> int:
        """Tokens [0, num_computed) are computed: their full blocks can be found from now on.

        Returns how many leading blocks of the table are committed.
        """
        table = self._tables[seq.seq_id]
        full = num_computed // self.block_size
        if not self.enable_prefix_caching or full <= table.num_committed:
            return table.num_committed
        size = self.block_size
        start = table.num_committed * size
        content = token_content(tokens_between(seq, start, full * size))
        step = size * TOKEN_BYTES
        for offset, index in enumerate(range(table.num_committed, full)):
            piece = content[offset * step : (offset + 1) * step]
            table.key = chain_key(table.key, piece)
            table.parent = self._cache.insert(table.blocks[index], table.key, table.parent, piece)
        table.num_committed = full
        return full

    def close(self, seq_id: int, after_step: int | None = None, discard: bool = False) -> None:
        """Give up the table. Blocks go back from the tail, so that a prefix outlives its ends.

        `after_step`: a step in flight uses the blocks; they are held until `step_done` of it.
        `discard`: what they hold is not to be trusted (NaN) and can't be found any more.
        """
        table = self._tables.pop(seq_id)
        if discard:
            for block in table.blocks:
                self._cache.forget(block)
        if after_step is None:
            self._pool.release(reversed(table.blocks))
        else:
            self._retired.append((after_step, table.blocks))

    def step_done(self, step: int) -> None:
        """No step up to this one is in flight: give back what was kept for them."""
        while self._retired and self._retired[0][0] <= step:
            self._pool.release(reversed(self._retired.popleft()[1]))

    def pin(self, blocks: Seq[Block]) -> int:
        """Hold computed blocks for sequences that are still to come; a handle for `unpin`."""
        for block in blocks:
            self._pool.hold(block)
        self._next_pin += 1
        self._pins[self._next_pin] = tuple(blocks)
        return self._next_pin

    def unpin(self, handle: int) -> None:
        blocks = self._pins.pop(handle, None)
        if blocks is not None:
            self._pool.release(reversed(blocks))

    def unpin_all(self) -> bool:
        """Let go of every pin; whether there was one."""
        handles = list(self._pins)
        for handle in handles:
            self.unpin(handle)
        return bool(handles)

    def check_integrity(self) -> None:
        """free + cached + held = total, every count right; EngineError names what is not.

        O(blocks): for tests, and when idle.
        """
        holders: Counter[int] = Counter()
        for table in self._tables.values():
            holders.update(table.block_ids)
            if [block.block_id for block in table.blocks] != table.block_ids:
                raise EngineError("a table's ids differ from its blocks")
        for _, blocks in self._retired:
            holders.update(block.block_id for block in blocks)
        for pinned in self._pins.values():
            holders.update(block.block_id for block in pinned)
        free = list(self._pool.free_blocks())
        free_ids = {block.block_id for block in free}
        if len(free) != self._pool.num_free or len(free_ids) != len(free):
            raise EngineError(f"{len(free)} blocks in the free list, {self._pool.num_free} counted")
        cached = sum(1 for block in free if block.key is not None)
        blank = len(free) - cached
        held = sum(1 for block in self._pool.blocks if block.ref_count > 0)
        if blank + cached + held != self._pool.num_blocks:
            raise EngineError(
                f"{blank} free + {cached} cached + {held} held blocks are not {self.num_blocks}"
            )
        for block in self._pool.blocks:
            if block.ref_count != holders[block.block_id]:
                raise EngineError(f"{block} has {holders[block.block_id]} holders")
            if (block.ref_count == 0) != (block.block_id in free_ids):
                raise EngineError(f"{block} is both held and free, or neither")
            if block.key is None and block.content:
                raise EngineError(f"{block} holds content that can't be found")
        for key, block in self._cache.entries():
            if block.key != key:
                raise EngineError(f"{block} is filed under a key that is not its own")

    def _extend(self, table: BlockTable, count: int) -> None:
        for block in self._pool.take(count):
            self._cache.forget(block)
            table.blocks.append(block)
            table.block_ids.append(block.block_id)
