"""Scorers: one answer's text in, right or wrong out, the same for every model.

Each is made from a question's `score` object and refuses at once what it could not score later.
`choice` has no text to score: the model's own probabilities decide (see `ask`).
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.engine.evaluate.fields import Fields
from headrace.engine.evaluate.json_scorer import JsonSchema
from headrace.engine.evaluate.score import Score


class Scorer(Protocol):
    def score(self, answer: str) -> Score: ...


@dataclass(frozen=True, slots=True)
class Exact:
    """The whole answer, without space around it, is one of `answers`."""

    answers: tuple[str, ...]
    ignore_case: bool = False
    ignore_punctuation: bool = False

    @classmethod
    def read(cls, fields: Fields) -> "Exact":
        answers = _needed(fields, "answer")
        return cls(answers, fields.boolean("ignore_case"), fields.boolean("ignore_punctuation"))

    def score(self, answer: str) -> Score:
        given = self._plain(answer)
        return Score.of(any(given == self._plain(known) for known in self.answers))

    def _plain(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text)
        if self.ignore_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True, slots=True)
class Contains:
    """All of `all_of`, one of `any_of` (if there are any), none of `none_of` stand in the answer.

    `words`: only as whole words ("cat" is not in "concatenate"); not for languages without spaces.
    """

    all_of: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()
    ignore_case: bool = True
    words: bool = False

    @classmethod
    def read(cls, fields: Fields) -> "Contains":
        found = cls(
            fields.texts("all") + fields.texts("answer"),
            fields.texts("any"),
            fields.texts("none"),
            fields.boolean("ignore_case", True),
            fields.boolean("words"),
        )
        if not (found.all_of or found.any_of or found.none_of):
            raise ValueError('score needs "answer", "all", "any" or "none" with texts to look for')
        return found

    def score(self, answer: str) -> Score:
        has = self._finder(answer)
        missing = [text for text in self.all_of if not has(text)]
        if missing:
            return Score.of(False, f"{missing[0]!r} is not in it")
        if self.any_of and not any(map(has, self.any_of)):
            return Score.of(False, "none of the texts is in it")
        unwanted = [text for text in self.none_of if has(text)]
        return Score.of(not unwanted, f"{unwanted[0]!r} is in it" if unwanted else "")

    def _finder(self, answer: str) -> Callable[[str], bool]:
        def plain(text: str) -> str:
            text = unicodedata.normalize("NFC", text)
            return text.casefold() if self.ignore_case else text

        whole = plain(answer)
        if not self.words:
            return lambda text: plain(text) in whole
        return lambda text: re.search(rf"(?<!\w){re.escape(plain(text))}(?!\w)", whole) is not None


@dataclass(frozen=True, slots=True)
class Regex:
    """The pattern (Python's syntax) is found in the answer; `whole`: matches all of it, space
    around it aside."""

    pattern: re.Pattern[str]
    whole: bool = False

    @classmethod
    def read(cls, fields: Fields) -> "Regex":
        text = fields.text("pattern")
        flags = re.IGNORECASE if fields.boolean("ignore_case") else 0
        try:
            pattern = re.compile(text, flags)
        except re.error as error:
            raise ValueError(f"score.pattern {text!r} is no regular expression: {error}") from None
        return cls(pattern, fields.boolean("whole"))

    def score(self, answer: str) -> Score:
        found = (
            self.pattern.fullmatch(answer.strip()) if self.whole else self.pattern.search(answer)
        )
        return Score.of(found is not None)


_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+(?![\d/]))?"
)
_RESULT = re.compile(r"answer|result|答案|结果|答[:：]", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|\.(?=\s|$)|。|；|;")


@dataclass(frozen=True, slots=True)
class Numeric:
    """The number that the answer ends on: the last one of the sentence after its last "answer",
    "result", "答案" or "结果", else the last one of all. `tolerance` is absolute."""

    answer: float
    tolerance: float = 0.0

    @classmethod
    def read(cls, fields: Fields) -> "Numeric":
        answer, tolerance = fields.number("answer"), fields.number("tolerance", 0.0)
        if not math.isfinite(answer) or not 0 <= tolerance < math.inf:
            raise ValueError("score.answer must be finite and score.tolerance at least 0")
        return cls(answer, tolerance)

    def score(self, answer: str) -> Score:
        given = final_number(answer)
        if given is None:
            return Score.of(False, "no number in it")
        slack = self.tolerance + 1e-9 * max(1.0, abs(self.answer))
        return Score.of(abs(given - self.answer) <= slack, f"read as {given:g}")


def final_number(answer: str) -> float | None:
    text = unicodedata.normalize("NFKC", answer)
    for marker in reversed(list(_RESULT.finditer(text))):
        rest = text[marker.end() :].lstrip(" :=*\n")
        sentence = _SENTENCE_END.split(rest, maxsplit=1)[0]
        numbers = _NUMBER.findall(sentence)
        if numbers:
            return _value(numbers[-1])
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _value(text: str) -> float | None:
    upper, _, lower = text.replace(",", "").replace("−", "-").partition("/")
    if not lower:
        return float(upper)
    return float(upper) / float(lower) if float(lower) else None


@dataclass(frozen=True, slots=True)
class Reference:
    """How many words it shares with a reference answer: F1 of words, of characters in languages
    without spaces, each counted as often as it occurs. Right from `threshold` on."""

    answer: str
    threshold: float = 0.5

    @classmethod
    def read(cls, fields: Fields) -> "Reference":
        answer, threshold = fields.text("answer"), fields.number("threshold", 0.5)
        if not _words(answer):
            raise ValueError("score.answer has no word")
        if not 0 < threshold <= 1:
            raise ValueError(f"score.threshold is {threshold:g}; it must be above 0 and at most 1")
        return cls(answer, threshold)

    def score(self, answer: str) -> Score:
        wanted, given = Counter(_words(self.answer)), Counter(_words(answer))
        shared = sum((wanted & given).values())
        value = 2 * shared / (wanted.total() + given.total())
        return Score(value >= self.threshold, value, f"F1 {value:.2f}")


_WORD = re.compile(r"[぀-ヿ㐀-鿿豈-﫿]|[^\W_぀-ヿ㐀-鿿豈-﫿]+")


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


@dataclass(frozen=True, slots=True)
class Choice:
    """The model's most probable continuation among `choices` is the right one. `normalize`: by
    log-probability a byte, so that short ones have no advantage."""

    choices: tuple[str, ...]
    answer: int
    normalize: bool = False

    @classmethod
    def read(cls, fields: Fields) -> "Choice":
        choices, answer = fields.texts("choices"), fields.any("answer")
        if len(choices) < 2:
            raise ValueError("score.choices needs two texts or more")
        if len(set(choices)) < len(choices):
            raise ValueError("score.choices has a text twice")
        if isinstance(answer, str) and answer in choices:
            answer = choices.index(answer)
        if isinstance(answer, bool) or not isinstance(answer, int):
            raise ValueError(f"score.answer is {answer!r}; it must be one of the choices")
        if not 0 <= answer < len(choices):
            raise ValueError(f"score.answer is {answer}; there are choices 0 to {len(choices) - 1}")
        return cls(choices, answer, fields.boolean("normalize"))

    def score(self, logprobs: list[float]) -> Score:
        """`logprobs`: the natural-log probability of each choice as a whole."""
        values = [
            value / len(text.encode()) if self.normalize else value
            for value, text in zip(logprobs, self.choices, strict=True)
        ]
        best = max(range(len(values)), key=values.__getitem__)
        return Score.of(best == self.answer, f"chose {self.choices[best]!r}")


_READERS: dict[str, Callable[[Fields], Any]] = {
    "exact": Exact.read,
    "contains": Contains.read,
    "regex": Regex.read,
    "numeric": Numeric.read,
    "choice": Choice.read,
    "json_schema": JsonSchema.read,
    "reference": Reference.read,
}


def read_scorer(spec: Any) -> Scorer | Choice:
    """A question's `score` object. ValueError says what is wrong with it."""
    known = ", ".join(_READERS)
    if not isinstance(spec, Mapping):
        raise ValueError(
            f'score is {spec!r:.60}; an object such as {{"type": "exact", ...}} is needed'
        )
    fields = Fields(spec, "score")
    kind = fields.text("type", "")
    if kind not in _READERS:
        raise ValueError(f"score.type is {kind!r}; known: {known}")
    scorer: Scorer | Choice = _READERS[kind](fields)
    fields.done()
    return scorer


def _needed(fields: Fields, key: str) -> tuple[str, ...]:
    texts = fields.texts(key)
    if not texts:
        raise ValueError(f"score.{key} is missing; a string or a list of strings is needed")
    return texts
