"""Every scorer, also with answers that try to pass for right ones."""

from typing import Any

import pytest

from headrace.engine.evaluate.score import Score
from headrace.engine.evaluate.scorers import Choice, final_number, read_scorer


def score(answer: str, /, **spec: Any) -> Score:
    scorer = read_scorer(spec)
    assert not isinstance(scorer, Choice)
    return scorer.score(answer)


@pytest.mark.parametrize(
    ("answer", "options", "right"),
    [
        ("Paris", {}, True),
        ("  Paris\n", {}, True),
        ("paris", {}, False),
        ("PARIS.", {"ignore_case": True, "ignore_punctuation": True}, True),
        ("Paris, or Lyon", {"ignore_punctuation": True}, False),
        ("The answer is Paris", {}, False),
        ("", {}, False),
    ],
)
def test_exact_takes_the_whole_answer(answer: str, options: dict[str, Any], right: bool) -> None:
    assert score(answer, type="exact", answer="Paris", **options).correct is right


def test_exact_knows_several_answers_and_composed_letters() -> None:
    assert score("北京。", type="exact", answer=["北京", "北京市"], ignore_punctuation=True).correct
    assert score("Zu\u0308rich", type="exact", answer="Zürich").correct
    assert score("STRASSE", type="exact", answer="Straße", ignore_case=True).correct


@pytest.mark.parametrize(
    ("answer", "spec", "right"),
    [
        ("A dog and a CAT.", {"all": ["cat", "dog"]}, True),
        ("A dog.", {"all": ["cat", "dog"]}, False),
        ("concatenate", {"answer": "cat"}, True),
        ("concatenate", {"answer": "cat", "words": True}, False),
        ("the cat's tail", {"answer": "cat", "words": True}, True),
        ("a cat", {"answer": "Cat", "ignore_case": False}, False),
        ("it is Dutch, not German", {"all": ["German"], "none": ["Dutch"]}, False),
        ("yes", {"any": ["yes", "ja"]}, True),
        ("no", {"any": ["yes", "ja"]}, False),
        ("", {"none": ["water"]}, True),
        ("老师，早上好", {"all": ["老师"]}, True),
    ],
)
def test_contains(answer: str, spec: dict[str, Any], right: bool) -> None:
    assert score(answer, type="contains", **spec).correct is right


def test_regex_is_searched_or_matches_all() -> None:
    assert score("x 12 y", type="regex", pattern=r"\d+").correct
    assert not score("x 12 y", type="regex", pattern=r"\d+", whole=True).correct
    assert score(" 12\n", type="regex", pattern=r"\d+", whole=True).correct
    assert score("YES", type="regex", pattern="yes", ignore_case=True).correct


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("42", 42),
        ("17 + 25 = 42", 42),
        ("Answer: 42. I used 3 steps", 42),
        ("Answer: 17 + 25 = 42", 42),
        ("First answer: 5\nWait.\n**Answer:** 6", 6),
        ("I have 3 apples and 2 pears, so 5.", 5),
        ("1,234,567 people", 1234567),
        ("1,2,3", 3),
        ("-7", -7),
        ("10-12", 12),
        ("5 - -3 = 8", 8),
        ("about −2.5 degrees", -2.5),
        ("1.5e3", 1500),
        ("3/4", 0.75),
        ("答案：３０元", 30),
        ("一共是 19 个。答案：19", 19),
        ("$26.00 remain", 26),
        ("x2 = 9 and B12", 12),
        ("none", None),
        ("1/0", None),
        ("", None),
    ],
)
def test_the_number_that_an_answer_ends_on(answer: str, number: float | None) -> None:
    assert final_number(answer) == number


def test_numeric_within_a_tolerance() -> None:
    assert score("3.14", type="numeric", answer=3.14159, tolerance=0.01).correct
    assert not score("3.2", type="numeric", answer=3.14159, tolerance=0.01).correct
    assert not score("4.2", type="numeric", answer=42).correct
    assert score("0.30000000000000004", type="numeric", answer=0.3).correct
    assert not score("inf", type="numeric", answer=1).correct


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "right", "valid"),
    [
        ('{"name": "Ada", "age": 36}', True, True),
        ('```json\n{"name": "Ada", "age": 36}\n```', True, True),
        ('Here it is: {"name": "Ada", "age": 36}', False, False),
        ('{"name": "Ada", "age": "36"}', False, True),
        ('{"name": "Ada", "age": true}', False, True),
        ('{"name": "Ada", "age": -1}', False, True),
        ('{"name": "Ada", "age": 36, "x": 1}', False, True),
        ('{"name": "Ada"}', False, True),
        ('{"name": "Ada", "age": 36', False, False),
        ('{"name": "Ada", "age": 36,}', False, False),
        ('{"name": "Bob", "name": "Ada", "age": 36}', False, False),
        ('{"name": "Ada", "age": NaN}', False, False),
        ("{'name': 'Ada', 'age': 36}", False, False),
        ('{"name": "Ada", "age": 36}{"name": "Ada", "age": 36}', False, False),
        ("[" * 100_000, False, False),
        ("", False, False),
    ],
)
def test_json_is_valid_and_of_the_schema(answer: str, right: bool, valid: bool) -> None:
    found = score(answer, type="json_schema", schema=SCHEMA)
    assert (found.correct, found.json_valid) == (right, valid)


def test_json_inside_of_text_counts_only_when_asked_for_and_is_not_valid() -> None:
    answer = 'Sure [1]! {"name": "Ada", "age": 36} That is all.'
    found = score(answer, type="json_schema", schema=SCHEMA, anywhere=True)
    assert not found.correct  # [1] is the first JSON value
    found = score(answer.replace("[1]", ""), type="json_schema", schema=SCHEMA, anywhere=True)
    assert found.correct and found.json_valid is False


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ('{"a": 1, "b": 2}', {"a": 1}, True),
        ('{"a": 1.0}', {"a": 1}, True),
        ('{"a": true}', {"a": 1}, False),
        ('{"a": 1}', {"a": True}, False),
        ('{"a": null}', {"a": None}, True),
        ("{}", {"a": None}, False),
        ('{"a": [1, 2]}', {"a": [2, 1]}, False),
        ('{"a": [1]}', {"a": [1, 2]}, False),
        ('{"a": {"b": "X  y"}}', {"a": {"b": "x y"}}, True),
        ('{"a": "1"}', {"a": 1}, False),
    ],
)
def test_json_has_the_expected_values(answer: str, expected: Any, right: bool) -> None:
    spec = {"type": "json_schema", "schema": True, "expected": expected, "ignore_case": True}
    assert score(answer, **spec).correct is right


def test_reference_counts_words_as_often_as_they_occur() -> None:
    """F1 of "the cat sat" and "the cat": 2 * 2 / 5."""
    spec = {"type": "reference", "answer": "The cat sat.", "threshold": 0.75}
    assert score("the cat", **spec).value == pytest.approx(0.8)
    assert not score("cat cat cat cat", **spec).correct
    assert not score("", **spec).correct
    assert score("今天天气很好", type="reference", answer="今天天气好", threshold=0.9).correct


def test_choice_takes_the_most_probable_and_can_weigh_by_length() -> None:
    spec = {"type": "choice", "choices": ["no", "certainly"], "answer": "certainly"}
    plain, weighed = read_scorer(spec), read_scorer({**spec, "normalize": True})
    assert isinstance(plain, Choice) and isinstance(weighed, Choice)
    assert not plain.score([-2.0, -3.0]).correct
    assert weighed.score([-2.0, -3.0]).correct
    assert plain.score([-3.0, -2.0]).correct


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "score is None; an object"),
        ({}, "score.type is ''; known: exact, contains"),
        ({"type": "fuzzy"}, "score.type is 'fuzzy'; known"),
        ({"type": "exact"}, "score.answer is missing"),
        ({"type": "exact", "answer": 5}, "score.answer is 5; a string"),
        ({"type": "exact", "answer": "a", "ignorecase": True}, "score.ignorecase: not known here"),
        ({"type": "contains"}, "texts to look for"),
        ({"type": "regex", "pattern": "("}, "no regular expression"),
        ({"type": "numeric", "answer": "5"}, "score.answer is '5'; a number"),
        ({"type": "numeric", "answer": True}, "score.answer is True; a number"),
        ({"type": "numeric", "answer": 1, "tolerance": -1}, "tolerance at least 0"),
        ({"type": "choice", "choices": ["a"], "answer": 0}, "two texts or more"),
        ({"type": "choice", "choices": ["a", "a"], "answer": 0}, "a text twice"),
        ({"type": "choice", "choices": ["a", "b"], "answer": "c"}, "one of the choices"),
        ({"type": "choice", "choices": ["a", "b"], "answer": 2}, "choices 0 to 1"),
        ({"type": "json_schema"}, "score.schema is None"),
        ({"type": "json_schema", "schema": {"type": "text"}}, "no JSON Schema"),
        ({"type": "json_schema", "schema": {"$ref": "http://x/y"}}, "only references inside"),
        ({"type": "reference", "answer": "..."}, "no word"),
        ({"type": "reference", "answer": "a", "threshold": 0}, "above 0"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_what_is_wrong(spec: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_scorer(spec)
    assert message in str(caught.value)
