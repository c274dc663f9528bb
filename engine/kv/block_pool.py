"""The pool of KV blocks: who holds one, and in which order free ones are reused.

Free blocks form a doubly linked list whose head is reused first, so the list is the eviction order
and a block in the middle can be taken out in O(1). A free block keeps its content until it is
reused. Nothing here knows hashes, sequences or torch; the three cache fields of a `Block` belong to
the PrefixCache.
"""

from collections.abc import Iterable, Iterator


class Block:
    """One physical block. `ref_count` 0: in the free list; one that is held is its own neighbour.

    `key`, `parent`, `serial` and `content` are written by the PrefixCache only: `key` None means
    that the block's content can't be found.
    """

    __slots__ = ("block_id", "content", "key", "next", "parent", "prev", "ref_count", "serial")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: bytes | None = None
        self.parent: int | bytes = b""
        self.serial = 0
        self.content = b""
        self.prev = self
        self.next = self

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.key is not None})"


class BlockPool:
    """Blocks 0 to num_blocks - 1; `dummy_block_id` (num_blocks) is beside them, never handed out.

    Padding rows of a batch point at the dummy block, so whatever they write hurts nobody.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least one block")
        self.num_blocks = num_blocks
        self.dummy_block_id = num_blocks
        self.num_free = 0
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._ends = Block(-1)
        for block in self.blocks:
            self._link(block, before=self._ends)

    def take(self, count: int) -> list[Block]:
        """The `count` blocks that were free longest, now held once each.

        A returned block may still have a `key`: the caller forgets it before writing.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free: check num_free first")
        taken = []
        for _ in range(count):
            block = self._ends.next
            self._unlink(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def hold(self, block: Block) -> None:
        """One more holder; a free block leaves the free list with its content."""
        if block.ref_count == 0:
            self._unlink(block)
        block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """One holder less for each, in the given order: of those that become free, the first is
        reused first. Blocks whose content can't be found again go before all others."""
        for block in blocks:
            if block.ref_count < 1:
                raise ValueError(f"{block} is released more often than it was held")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.key is None:
                    self._link(block, before=self._ends.next)
                else:
                    self._link(block, before=self._ends)

    def free_blocks(self) -> Iterator[Block]:
        """Free blocks, the one to be reused first at the front. O(blocks): for checks."""
        block = self._ends.next
        while block is not self._ends:
            yield block
            block = block.next

    def _link(self, block: Block, before: Block) -> None:
        after = before.prev
        block.prev, block.next = after, before
        after.next = before.prev = block
        self.num_free += 1

    def _unlink(self, block: Block) -> None:
        prev, following = block.prev, block.next
        prev.next, following.prev = following, prev
        block.prev = block.next = block
        self.num_free -= 1
