"""What a model answered, and what can be told of answers without knowing the question."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.evaluate.score import Score

_NGRAM = 4
LOOPING = 0.5
"""Share of repeated 4-grams from which an answer counts as going round in circles."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`token_ids` is empty for a choice, which is read from probabilities. `failure`: why there is
    none; it counts as wrong."""

    question: str
    category: str
    score: Score
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    failure: str | None = None

    @property
    def generated(self) -> bool:
        return bool(self.finish_reason)


def repetition(token_ids: Sequence[int]) -> float:
    """Share of 4-grams that stood there before, 0 to 1; 0 for fewer than two of them."""
    count = len(token_ids) - _NGRAM + 1
    if count < 2:
        return 0.0
    distinct = {tuple(token_ids[i : i + _NGRAM]) for i in range(count)}
    return 1 - len(distinct) / count


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers share until they part."""
    length = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        length += 1
    return length
