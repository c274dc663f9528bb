"""Question files: each bad line by its number, and the 50 questions that come with Headrace."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.evaluate.errors import EvaluateError
from headrace.engine.evaluate.questions import DEFAULT, load_questions
from headrace.engine.evaluate.scorers import Choice, Contains, Exact, Numeric
from headrace.engine.evaluate.text import DEFAULT as TEXT
from headrace.engine.evaluate.text import read_text

GOOD = {"prompt": "2 + 2 =", "score": {"type": "numeric", "answer": 4}}


def write(path: Path, *lines: Any) -> Path:
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded))
    return path


def test_lines_become_questions(tmp_path: Path) -> None:
    chat = {
        "id": 7,
        "category": "sums",
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "max_tokens": 5,
        "score": {"type": "exact", "answer": "4"},
    }
    file = write(
        tmp_path / "q.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r", b"", chat
    )
    plain, asked = load_questions(file, max_tokens=64)
    assert (plain.id, plain.prompt, plain.max_tokens) == ("line-1", "2 + 2 =", 64)
    assert (asked.id, asked.category, asked.max_tokens) == ("7", "sums", 5)
    assert asked.prompt is None and asked.messages[0]["content"] == "2 + 2?"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: no JSON"),
        (b"[1]", "line 2: not a JSON object"),
        (b"\xff\xfe", "line 2: not UTF-8 (byte 1)"),
        (b"[" * 100_000, "line 2: nested too deeply"),
        ({"score": GOOD["score"]}, 'line 2: one of "prompt" and "messages"'),
        (
            {**GOOD, "messages": [{"role": "user", "content": "x"}]},
            'one of "prompt" and "messages"',
        ),
        ({**GOOD, "prompt": ""}, "prompt is empty"),
        ({**GOOD, "prompt": 5}, "prompt is 5; a string is needed"),
        ({"messages": [], "score": GOOD["score"]}, "at least one message"),
        ({"messages": [{"role": "user"}], "score": GOOD["score"]}, '"role" and "content"'),
        (
            {"messages": [{"role": "bot", "content": "x"}], "score": GOOD["score"]},
            "messages[0].role is 'bot'; one of system, user, assistant",
        ),
        ({**GOOD, "max_tokens": 0}, "max_tokens is 0; a whole number above 0"),
        ({**GOOD, "max_token": 5}, "max_token: not known here; known: category"),
        ({"prompt": "x"}, "score is None; an object"),
        ({**GOOD, "score": {"type": "exact"}}, "line 2: score.answer is missing"),
        ({**GOOD, "id": "line-1"}, "line 2: id 'line-1' stands in line 1 too"),
    ],
)
def test_a_bad_line_is_named_with_what_to_do(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluateError) as caught:
        load_questions(write(tmp_path / "q.jsonl", GOOD, line))
    assert message in str(caught.value)


def test_all_bad_lines_are_named_at_once_up_to_ten(tmp_path: Path) -> None:
    with pytest.raises(EvaluateError) as caught:
        load_questions(write(tmp_path / "q.jsonl", *[b"{"] * 13))
    text = str(caught.value)
    assert "13 unusable lines" in text and "line 10:" in text and "and 3 more" in text
    assert "line 11:" not in text


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluateError, match="no question in it"):
        load_questions(write(tmp_path / "q.jsonl", b"", b"  "))
    with pytest.raises(EvaluateError, match="cannot be read"):
        load_questions(tmp_path / "missing.jsonl")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(EvaluateError, match="is empty"):
        read_text(tmp_path / "empty.txt")


def test_the_shipped_questions_are_fifty_of_four_kinds_in_two_languages() -> None:
    questions = load_questions()
    kinds = Counter(question.category for question in questions)
    assert len(questions) == 50
    assert set(kinds) == {"classification", "extraction", "arithmetic", "instructions"}
    assert min(kinds.values()) >= 12
    chinese = sum("\u4e00" <= c <= "\u9fff" for c in DEFAULT.read_text(encoding="utf-8"))
    assert chinese > 300
    assert len(read_text(TEXT)) > 3000


def test_the_shipped_right_answers_are_scored_as_right() -> None:
    """Where the answer can be written down from the question file alone."""
    rows = [json.loads(line) for line in DEFAULT.read_text(encoding="utf-8").splitlines()]
    tried = 0
    for row, question in zip(rows, load_questions(), strict=True):
        spec, scorer = row["score"], question.scorer
        if isinstance(scorer, Choice):
            values = [-1.0 if text == spec["answer"] else -9.0 for text in spec["choices"]]
            assert scorer.score(values).correct, question.id
        elif isinstance(scorer, Numeric):
            assert scorer.score(f"3 + 4 = 7\nAnswer: {spec['answer']}").correct, question.id
            assert not scorer.score(f"Answer: {spec['answer'] + 1}").correct, question.id
        elif isinstance(scorer, Exact):
            assert scorer.score(scorer.answers[0]).correct, question.id
            assert not scorer.score("I do not know").correct, question.id
        elif isinstance(scorer, Contains):
            assert not scorer.score("").correct, question.id
        elif spec["type"] == "json_schema":
            assert scorer.score(_example(spec)).correct, question.id
            assert not scorer.score("{}").correct, question.id
        else:
            continue
        tried += 1
    assert tried > 40


def _example(spec: dict[str, Any]) -> str:
    """The expected values, with anything of the right type for what is not compared."""
    properties = spec["schema"]["properties"]
    value = {name: "" for name in properties if properties[name].get("type") == "string"}
    return json.dumps({**value, **spec["expected"]})
