"""Text to token ids and back, from a Hugging Face folder or a GGUF file.

BOS is decided here and nowhere else: a prompt begins with exactly one where the model wants one,
whether the text, the chat template or the tokenizer writes it. Nothing here knows models or torch.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from headrace.engine.chat_template import ChatTemplate
from headrace.engine.errors import CheckpointError, RequestError
from headrace.engine.loading import gguf_tokenizer
from headrace.engine.loading.damage import blamed_on
from headrace.engine.loading.gguf_file import read_gguf
from headrace.engine.token_bytes import TokenBytes

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a checkpoint says of its tokenizer. `add_bos` None: as the backend itself does it."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None


class Tokenizer:
    """One model's tokenizer. `special_token_ids`: the ids of tokens that make no text, by name."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bytes = TokenBytes(parts.backend)
        self._no_bos = parts.add_bos is False
        self._template = (
            None
            if parts.chat_template is None
            else ChatTemplate(parts.chat_template, parts.special_tokens)
        )
        self.vocab_size = max(parts.backend.get_vocab().values()) + 1
        """One more than the greatest id; a model's embedding may have padding rows beyond."""
        bos = parts.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else parts.backend.token_to_id(bos)
        self.adds_bos = self._adds_bos(parts.add_bos)
        """Whether a prompt begins with BOS."""
        self.eos_token_ids = parts.eos_token_ids
        self.special_token_ids: dict[str, int] = {
            token.content: index
            for index, token in parts.backend.get_added_tokens_decoder().items()
            if token.special
        }

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens`: with what the model wants around a prompt (BOS)."""
        whole = add_special_tokens and not self._no_bos
        ids: list[int] = self._backend.encode(text, add_special_tokens=whole).ids
        return self._one_bos(ids) if add_special_tokens else ids

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation up to where the model answers.

        Raises RequestError `template_error`, also when the model has no template.
        """
        ids: list[int] = self._backend.encode(
            self.render_chat(messages, **kwargs), add_special_tokens=False
        ).ids
        return self._one_bos(ids)

    def render_chat(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> str:
        """The conversation as text."""
        if self._template is None:
            raise RequestError(
                "template_error",
                "the model has no chat template: send prompt instead of messages",
                "messages",
            )
        return self._template.render(list(messages), **kwargs)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that make no character become U+FFFD."""
        of = self.text_bytes if skip_special_tokens else self._bytes.bytes_of
        text = b"".join(map(of, ids)).decode("utf-8", errors="replace")
        return text[1:] if self._bytes.strips_first_space and text.startswith(" ") else text

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to an answer; none for special tokens."""
        return b"" if self._bytes.is_special(token_id) else self._bytes.bytes_of(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, a special token's name included."""
        return self._bytes.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """The same as text; a part of a character shows as U+FFFD."""
        return self._bytes.bytes_of(token_id).decode("utf-8", errors="replace")

    def _adds_bos(self, declared: bool | None) -> bool:
        if self.bos_token_id is None:
            return False
        if declared is not None:
            return declared
        return self.bos_token_id in self._backend.encode("", add_special_tokens=True).ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Exactly one BOS in front where the model wants one; otherwise what the text has."""
        bos = self.bos_token_id
        if bos is None or not self.adds_bos:
            return ids
        count = 0
        while count < len(ids) and ids[count] == bos:
            count += 1
        return ids if count == 1 else [bos, *ids[count:]]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file. Raises CheckpointError."""
    with blamed_on(path):
        return Tokenizer(_read_folder(path) if path.is_dir() else _read_gguf(path))


def _read_gguf(path: Path) -> TokenizerParts:
    metadata = read_gguf(path).metadata
    backend = gguf_tokenizer.build_tokenizer(metadata)
    roles = zip(_ROLES, ("bos", "eos", "unknown", "padding"), strict=True)
    special = {}
    for role, name in roles:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        token = None if index is None else backend.id_to_token(index)
        if token is not None:
            special[role] = token
    return TokenizerParts(
        backend,
        special,
        gguf_tokenizer.adds_bos(metadata),
        gguf_tokenizer.eos_token_ids(metadata),
        metadata.get("tokenizer.chat_template"),
    )


def _read_folder(path: Path) -> TokenizerParts:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: only tokenizers of that format are supported")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for whatever is wrong
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    names = {**_read_json(path / "special_tokens_map.json"), **config}
    special = {role: text for role in _ROLES if (text := _content(names.get(role))) is not None}
    known = [text for text in special.values() if backend.token_to_id(text) is not None]
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, normalized=False, special=True) for text in known]
    )
    eos: list[int] = []
    for source in (_read_json(path / "generation_config.json"), _read_json(path / "config.json")):
        value = source.get("eos_token_id")
        eos.extend([value] if isinstance(value, int) else value or [])
    if "eos_token" in special:
        index = backend.token_to_id(special["eos_token"])
        eos.extend([] if index is None else [index])
    return TokenizerParts(
        backend,
        special,
        config.get("add_bos_token"),
        tuple(dict.fromkeys(eos)),
        _folder_template(path, config),
    )


def _folder_template(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json's; of several named
    ones, `default`."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(path / "chat_template.json").get("chat_template")
    template = template if template is not None else config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _content(token: Any) -> str | None:
    """A special token is written as text, or as an object with its `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value
