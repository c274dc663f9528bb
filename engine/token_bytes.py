"""What bytes each token stands for, read from how a tokenizer decodes.

Knows two families: byte-level vocabularies, where every character of a token's spelling is a byte,
and SentencePiece ones, where `▁` is a space and `<0xE4>` a byte. An unknown kind of decoder is
refused at load, since text would come out wrong without any error.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

from headrace.engine.errors import CheckpointError


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the other
    bytes for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    alphabet.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return alphabet


CHAR_OF_BYTE = _byte_alphabet()
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of every token of one vocabulary, looked up once each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._replacements: list[tuple[str, str]] = []
        self.strips_first_space = False
        """Whether a text loses the space that its first token begins with."""
        for step in steps:
            kind = step["type"]
            if kind == "Replace" and "String" in step["pattern"]:
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Metaspace":
                self._replacements.append((step["replacement"], " "))
                self.strips_first_space = step.get("prepend_scheme", "always") != "never"
            elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
                self.strips_first_space = step["start"] == 1
            elif kind not in ("ByteLevel", "ByteFallback", "Fuse"):
                raise CheckpointError(f"tokenizer.json: decoder {json.dumps(step)} not supported")
        self._tokenizer = tokenizer
        self._special = {
            index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._cache: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, a special token's name included; empty for an id without a token."""
        known = self._cache.get(token_id)
        if known is None:
            spelling = self._tokenizer.id_to_token(token_id)
            known = self._cache[token_id] = b"" if spelling is None else self._decode(spelling)
        return known

    def _decode(self, spelling: str) -> bytes:
        if self._byte_level:
            found = [BYTE_OF_CHAR.get(char, -1) for char in spelling]
            return spelling.encode() if -1 in found else bytes(found)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(spelling)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            spelling = spelling.replace(old, new)
        return spelling.encode()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        raise CheckpointError("tokenizer.json has no decoder: how tokens make text is not known")
    steps = [json.loads(tokenizer.decoder.__getstate__())]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [
            inner
            for step in steps
            for inner in (step["decoders"] if step["type"] == "Sequence" else [step])
        ]
    return steps
