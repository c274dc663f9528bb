"""Text files as token sequences: what calibrates, and what quality is measured on.

A file is plain text, or JSONL (`.jsonl`) whose lines have `text`, `prompt` or `messages`, or are
lines of an OpenAI batch with such a `body`. Knows no model.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.errors import EngineError, RequestError
from headrace.engine.tokenizer import Tokenizer

DEFAULT = "default"
"""The calibration text that comes with the package."""

_FEWEST_SEQUENCES = 2
_SHARED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class TextTokens:
    """A text's tokens, cut into sequences. `digest`: of the sequences; `available`: how many tokens
    the text has."""

    name: str
    sequences: Sequence[Sequence[int]]
    available: int
    digest: str

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


def calibration_tokens(
    file: Path | None, tokenizer: Tokenizer, samples: int, length: int
) -> TextTokens:
    """Up to `samples` sequences of `length` tokens, evenly spaced over the text. None: the default
    text. Raises EngineError."""
    name = DEFAULT if file is None else str(file)
    tokens = _tokens(_default_text() if file is None else _read(file), file, tokenizer)
    whole = list(_windows(tokens, tokenizer, length, partial=False))
    if len(whole) < _FEWEST_SEQUENCES:
        raise EngineError(
            f"calibration text {name}: {len(tokens)} tokens are too few: at least"
            f" {_FEWEST_SEQUENCES} sequences of {length} are needed; give more text, or a smaller"
            " --sequence-length"
        )
    count = min(samples, len(whole))
    chosen = [whole[index * len(whole) // count] for index in range(count)]
    return TextTokens(name, chosen, len(tokens), _digest(chosen))


def evaluation_tokens(
    file: Path, tokenizer: Tokenizer, length: int, calibration: TextTokens | None
) -> TextTokens:
    """The whole text in sequences of `length`, the last may be shorter. Raises EngineError, also
    where the text is part of the calibration text."""
    tokens = _tokens(_read(file), file, tokenizer)
    sequences = list(_windows(tokens, tokenizer, length, partial=True))
    if not sequences:
        raise EngineError(f"text {file}: {len(tokens)} tokens are too few to measure perplexity on")
    if calibration is not None and _overlap(sequences, calibration.sequences):
        raise EngineError(
            f"text {file} and calibration text {calibration.name} share a passage: perplexity on"
            " what a model was fitted to says nothing; give another text"
        )
    return TextTokens(str(file), sequences, len(tokens), _digest(sequences))


def _windows(
    tokens: Sequence[int], tokenizer: Tokenizer, length: int, partial: bool
) -> Iterator[list[int]]:
    head = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id else []
    step = length - len(head)
    for start in range(0, len(tokens), step):
        window = [*head, *tokens[start : start + step]]
        if len(window) == length or (partial and len(window) > 1):
            yield window


def _overlap(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> bool:
    known = set(_grams(second))
    return any(gram in known for gram in _grams(first))


def _grams(sequences: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    for tokens in sequences:
        for start in range(len(tokens) - _SHARED_TOKENS + 1):
            yield tuple(tokens[start : start + _SHARED_TOKENS])


def _digest(sequences: Sequence[Sequence[int]]) -> str:
    return hashlib.blake2b(json.dumps(sequences).encode(), digest_size=16).hexdigest()


def _default_text() -> str:
    return (Path(__file__).with_name("data") / "calibration.txt").read_text(encoding="utf-8")


def _read(file: Path) -> str:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise EngineError(f"text {file} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"text {file} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise EngineError(f"text {file} is empty")
    return text


def _tokens(text: str, file: Path | None, tokenizer: Tokenizer) -> list[int]:
    if file is None or file.suffix.lower() != ".jsonl":
        return tokenizer.encode(text, add_special_tokens=False)
    tokens: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            tokens += _line_tokens(line, f"text {file}, line {number}", tokenizer)
    return tokens


def _line_tokens(line: str, where: str, tokenizer: Tokenizer) -> list[int]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise EngineError(f"{where}: no JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = value["body"]
    if not isinstance(value, dict):
        raise EngineError(f"{where}: an object is needed")
    messages = value.get("messages")
    if messages is not None:
        try:
            text: Any = tokenizer.render_chat(messages, add_generation_prompt=False)
        except (RequestError, TypeError, ValueError) as error:
            raise EngineError(f"{where}: messages cannot be rendered: {error}") from error
    else:
        text = value.get("text", value.get("prompt"))
    if not isinstance(text, str):
        raise EngineError(f"{where}: text, prompt or messages is needed")
    return tokenizer.encode(text, add_special_tokens=False)
