"""Two variants' answers side by side: what was lost and gained, and how sure that is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headrace.engine.evaluate.answers import LOOPING, Answer, common_prefix, repetition
from headrace.engine.evaluate.measure import Measured
from headrace.engine.evaluate.statistics import (
    detectable_difference,
    fewest_significant,
    mcnemar_exact,
    paired_interval,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Style:
    """How one variant writes. `json_valid`: of `json_asked` answers, None when JSON was never asked
    for. `looping`: share of answers of which half or more is repeated 4-grams."""

    mean_tokens: float
    cut_off: float
    repetition: float
    looping: float
    json_asked: int
    json_valid: float | None

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> "Style":
        written = [answer for answer in answers if answer.generated]
        asked = [a.score.json_valid for a in answers if a.score.json_valid is not None]
        repeated = [repetition(answer.token_ids) for answer in written]
        return cls(
            mean_tokens=_mean([len(answer.token_ids) for answer in written]),
            cut_off=_share(written, lambda answer: answer.finish_reason == "length"),
            repetition=_mean(repeated),
            looping=_share(repeated, lambda value: value >= LOOPING),
            json_asked=len(asked),
            json_valid=_mean(asked) if asked else None,
        )


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Right answers of the same `total` questions. `lost`: right before and wrong now; `gained`:
    the other way. `difference` and `interval` are of shares, candidate minus reference."""

    reference: int
    candidate: int
    lost: int
    gained: int
    total: int
    confidence: float

    @property
    def difference(self) -> float:
        return (self.gained - self.lost) / self.total

    @property
    def interval(self) -> tuple[float, float]:
        return paired_interval(self.gained, self.lost, self.total, self.confidence)

    @property
    def p_value(self) -> float:
        return mcnemar_exact(self.lost, self.gained)

    @property
    def fewest_lost(self) -> int:
        """Losses, none gained, from which on the test is significant."""
        return fewest_significant(1 - self.confidence)

    @property
    def detectable(self) -> float | None:
        """True loss that so many questions find four times out of five."""
        discordant = (self.lost + self.gained) / self.total
        return detectable_difference(self.total, discordant, 1 - self.confidence)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of written answers. `identical`: share that are the same token by token; `shared`: tokens
    until they part, as a share of the longer answer, mean."""

    identical: float
    shared: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """`by_category`: right answers of the reference and the candidate, and how many questions."""

    reference: Measured
    candidate: Measured
    accuracy: Accuracy
    by_category: dict[str, tuple[int, int, int]]
    reference_style: Style
    candidate_style: Style
    agreement: Agreement | None

    @property
    def perplexity_increase(self) -> float | None:
        """0.05: five percent more. None without text, and between different tokenizers."""
        ours, theirs = self.candidate.text, self.reference.text
        if ours is None or theirs is None or self.candidate.distance is None:
            return None
        return ours.perplexity / theirs.perplexity - 1

    @property
    def lost(self) -> list[tuple[Answer, Answer]]:
        return [(a, b) for a, b in self._pairs() if a.score.correct and not b.score.correct]

    @property
    def gained(self) -> list[tuple[Answer, Answer]]:
        return [(a, b) for a, b in self._pairs() if b.score.correct and not a.score.correct]

    def _pairs(self) -> list[tuple[Answer, Answer]]:
        return list(zip(self.reference.answers, self.candidate.answers, strict=True))


def compare(reference: Measured, candidate: Measured, confidence: float = 0.95) -> Comparison:
    """Both must have answered the same questions in the same order."""
    pairs = list(zip(reference.answers, candidate.answers, strict=True))
    lost = sum(a.score.correct and not b.score.correct for a, b in pairs)
    gained = sum(b.score.correct and not a.score.correct for a, b in pairs)
    by_category: dict[str, tuple[int, int, int]] = {}
    for a, b in pairs:
        before = by_category.get(a.category, (0, 0, 0))
        by_category[a.category] = (
            before[0] + a.score.correct,
            before[1] + b.score.correct,
            before[2] + 1,
        )
    return Comparison(
        reference,
        candidate,
        Accuracy(reference.num_right, candidate.num_right, lost, gained, len(pairs), confidence),
        by_category,
        Style.of(reference.answers),
        Style.of(candidate.answers),
        _agreement(pairs),
    )


def _agreement(pairs: Sequence[tuple[Answer, Answer]]) -> Agreement | None:
    written = [(a.token_ids, b.token_ids) for a, b in pairs if a.generated and b.generated]
    if not written:
        return None
    shared = [common_prefix(a, b) / max(len(a), len(b), 1) for a, b in written]
    return Agreement(_mean([a == b for a, b in written]), _mean(shared))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _share(values: Sequence[T], holds: Callable[[T], bool]) -> float:
    return _mean([holds(value) for value in values])
