"""A whole evaluation: the reference once, then one candidate after the other until one holds."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.evaluate.compare import Comparison, compare
from headrace.engine.evaluate.measure import Measured, Progress, measure
from headrace.engine.evaluate.questions import Question
from headrace.engine.evaluate.text import TextReader
from headrace.engine.evaluate.variant import Variant
from headrace.engine.evaluate.verdict import Limits, Verdict, judge


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate. `failure`: why it could not run at all; then there is nothing else."""

    variant: Variant
    comparison: Comparison | None = None
    verdict: Verdict | None = None
    failure: str | None = None

    @property
    def holds(self) -> bool:
        return self.verdict is not None and self.verdict.holds


@dataclass(frozen=True, slots=True)
class Work:
    """What every variant is put to. `text` None: no text is read; `machine`: settings that all
    variants share."""

    questions: Sequence[Question]
    text: str | None
    text_tokens: int
    machine: EngineConfig
    limits: Limits


def evaluate(
    reference: Variant,
    candidates: Sequence[Variant],
    work: Work,
    progress: Progress = lambda *_: None,
) -> Iterator[Tried]:
    """Each candidate in order, up to the first that holds. Models are loaded one after the other.

    Raises what loading the reference raises; a candidate that cannot be loaded has failed.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-verify-") as folder:
        reader = None
        if work.text is not None:
            reader = TextReader(work.text, work.text_tokens, Path(folder))
        measured = measure(
            *(reference, work.machine, work.questions, reader), first=True, progress=progress
        )
        for candidate in candidates:
            tried = _try(measured, candidate, work, reader, progress)
            yield tried
            if tried.holds:
                return


def _try(
    reference: Measured,
    candidate: Variant,
    work: Work,
    reader: TextReader | None,
    progress: Progress,
) -> Tried:
    try:
        measured = measure(
            *(candidate, work.machine, work.questions, reader), first=False, progress=progress
        )
    except EngineError as error:
        return Tried(candidate, failure=str(error))
    comparison = compare(reference, measured, 1 - work.limits.significance)
    return Tried(candidate, comparison, judge(comparison, work.limits))
