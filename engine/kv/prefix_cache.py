"""Finds computed blocks by what they hold: hash-chained keys, compared token by token on a hit.

The key of a block is a 128-bit hash of its parent's key and its token ids; the first block's parent
is the salt (model, adapter or tenant). So a key stands for the whole prefix up to and including its
block, and looking up a prefix is one dictionary access a block. A key alone is never trusted: a hit
must hold the same token ids and continue the very entry that the walk came from, so that even equal
keys of different prefixes can't serve each other's KV. Nothing here counts references or knows
sequences.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b

from headrace.engine.kv.block_pool import Block

KEY_BYTES = 16
TOKEN_BYTES = 4

Parent = int | bytes
"""What an entry continues: another entry's serial, or the salt at the root."""


def token_content(token_ids: Seq[int]) -> bytes:
    """Token ids as 32-bit integers, the form in which they are hashed and compared."""
    return array("I", token_ids).tobytes()


def chain_key(parent_key: bytes, content: bytes) -> bytes:
    """Key of a block with `content` after the prefix that `parent_key` stands for."""
    return blake2b(parent_key + content, digest_size=KEY_BYTES).digest()


def root_key(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=KEY_BYTES, person=b"headrace-salt").digest()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that hold the beginning of a token list.

    `num_tokens`: tokens that need not be computed, at most all but the last one, whose logits are
    wanted. `serials` name the entries as they were found, so that a block that was reused since
    can be told from one that was not.
    """

    blocks: tuple[Block, ...] = ()
    serials: tuple[int, ...] = ()
    num_tokens: int = 0


NO_MATCH = PrefixMatch()


class PrefixCache:
    """Entries: blocks of `block_size` computed tokens. One block per key."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._entries: dict[bytes, Block] = {}
        self._last_serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def keys_of(self, token_ids: Seq[int], salt: bytes) -> list[bytes]:
        """Keys of the full blocks of `token_ids`. Linear in their number."""
        content = token_content(token_ids)
        size = self.block_size * TOKEN_BYTES
        key = root_key(salt)
        keys = []
        for start in range(0, len(content) - size + 1, size):
            key = chain_key(key, content[start : start + size])
            keys.append(key)
        return keys

    def match(self, token_ids: Seq[int], keys: Seq[bytes], salt: bytes) -> PrefixMatch:
        """The longest cached prefix of `token_ids`, whose full blocks have `keys`."""
        parent: Parent = salt
        blocks: list[Block] = []
        content = b""
        size = self.block_size * TOKEN_BYTES
        for index, key in enumerate(keys):
            block = self._entries.get(key)
            if block is None:
                break
            if not content:
                content = token_content(token_ids)
            if (
                block.parent != parent
                or block.content != content[index * size : (index + 1) * size]
            ):
                break
            blocks.append(block)
            parent = block.serial
        if not blocks:
            return NO_MATCH
        num_tokens = min(len(blocks) * self.block_size, len(token_ids) - 1)
        return PrefixMatch(tuple(blocks), tuple(block.serial for block in blocks), num_tokens)

    def insert(self, block: Block, key: bytes, parent: Parent, content: bytes) -> int:
        """Make a computed block findable; the serial of the entry that stands for it.

        If an equal entry exists, it stays and `block` remains its holder's own. An entry of the
        same key that continues something else, or holds other tokens, gives way: it can't be
        reached by this prefix, and the newer one is likelier to be asked for.
        """
        known = self._entries.get(key)
        if known is not None:
            if known is block or (known.parent == parent and known.content == content):
                return known.serial
            self.forget(known)
        if block.key is not None:
            self.forget(block)
        self._last_serial += 1
        block.key, block.parent, block.content = key, parent, content
        block.serial = self._last_serial
        self._entries[key] = block
        return block.serial

    def forget(self, block: Block) -> None:
        """The block's content is gone, or must not be used again."""
        if block.key is None:
            return
        del self._entries[block.key]
        block.key, block.parent, block.serial, block.content = None, b"", 0, b""

    def entries(self) -> list[tuple[bytes, Block]]:
        """All entries. O(entries): for checks."""
        return list(self._entries.items())
