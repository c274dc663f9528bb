"""Questions from a JSONL file: what is asked, and how the answer is scored.

A line: `{"messages": [...], "score": {"type": "exact", "answer": "Paris"}}`, or `"prompt": "..."`
instead of messages; optional are `id`, `category` and `max_tokens`. Knows no model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.evaluate.errors import EvaluateError
from headrace.engine.evaluate.fields import Fields
from headrace.engine.evaluate.scorers import Choice, Scorer, read_scorer

DEFAULT = Path(__file__).with_name("data") / "questions.jsonl"
_MOST_SHOWN = 10
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` is given to the model as it is, without a chat template; None: `messages` are."""

    id: str
    messages: tuple[dict[str, str], ...]
    prompt: str | None
    scorer: Scorer | Choice
    max_tokens: int
    category: str = ""


def load_questions(path: Path = DEFAULT, max_tokens: int = 128) -> list[Question]:
    """All questions of the file. `max_tokens`: for those that name none.

    EvaluateError names every line that cannot be used (the first ten of them).
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EvaluateError(f"questions {path} cannot be read: {error.strerror}") from error
    found: list[Question] = []
    problems: list[str] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = read_question(_object(line), f"line-{number}", max_tokens)
            if question.id in lines_of:
                raise ValueError(f"id {question.id!r} stands in line {lines_of[question.id]} too")
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        lines_of[question.id] = number
        found.append(question)
    if problems:
        raise EvaluateError(_listed(path, problems))
    if not found:
        raise EvaluateError(
            f"questions {path}: no question in it; one JSON object a line is needed"
        )
    return found


def read_question(row: dict[str, Any], default_id: str, max_tokens: int) -> Question:
    """One line's object. ValueError says what is wrong with it."""
    fields = Fields(row)
    if fields.has("prompt") == fields.has("messages"):
        raise ValueError('one of "prompt" and "messages" is needed')
    prompt = fields.text("prompt") if fields.has("prompt") else None
    if prompt == "":
        raise ValueError("prompt is empty")
    messages = () if prompt is not None else _messages(fields.any("messages"))
    identifier = fields.any("id")
    question = Question(
        id=default_id if identifier is None else str(identifier),
        messages=messages,
        prompt=prompt,
        scorer=read_scorer(fields.any("score")),
        max_tokens=fields.count("max_tokens", max_tokens),
        category=fields.text("category", ""),
    )
    fields.any("prompt"), fields.any("messages")
    fields.done()
    return question


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("messages must be a list of at least one message")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(f'messages[{index}] must have "role" and "content" and nothing else')
        if message["role"] not in _ROLES:
            raise ValueError(
                f"messages[{index}].role is {message['role']!r}; one of {', '.join(_ROLES)}"
            )
        if not isinstance(message["content"], str):
            raise ValueError(f"messages[{index}].content must be a string")
    return tuple(value)


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"no JSON ({error}); one whole object a line is needed") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _listed(path: Path, problems: Sequence[str]) -> str:
    shown = "\n  ".join(problems[:_MOST_SHOWN])
    more = len(problems) - _MOST_SHOWN
    rest = f"\n  and {more} more lines" if more > 0 else ""
    return f"questions {path}: {len(problems)} unusable lines; mend or remove them\n  {shown}{rest}"
