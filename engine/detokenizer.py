"""Turns token ids into text one token at a time; the pieces put together are the text of the whole.

Every token stands for bytes, of which a character may need several tokens. Bytes that do not yet
make a character are held back; bytes that never will become U+FFFD, one for each maximal broken
part, as when the whole is decoded at once. Knows no vocabulary but through `TokenBytes`.
"""

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """The bytes that a token adds to the text; empty for special tokens."""

    def text_bytes(self, token_id: int) -> bytes: ...


_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One sequence's decoder."""

    __slots__ = ("_decoder", "_vocabulary")

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._vocabulary = vocabulary
        self._decoder = _utf8(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known, beyond what was returned before."""
        return self._decoder.decode(self._vocabulary.text_bytes(token_id))

    def finish(self) -> str:
        """No more tokens: what was held back. An unfinished character is one U+FFFD."""
        return self._decoder.decode(b"", final=True)
