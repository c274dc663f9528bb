"""Loads one variant with the real engine, puts everything to it, and lets it go again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.engine.config import EngineConfig
from headrace.engine.evaluate.answers import Answer
from headrace.engine.evaluate.ask import ask
from headrace.engine.evaluate.loaded import Loaded
from headrace.engine.evaluate.process_memory import give_back, peak_memory
from headrace.engine.evaluate.questions import Question
from headrace.engine.evaluate.text import Distance, TextReader, TextScore
from headrace.engine.evaluate.variant import Variant
from headrace.engine.models.decoder import WeightMemory

Progress = Callable[[str, int, int], None]
"""What is done, how much of it, of how much."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds and bytes. `tokens_per_second`: output tokens of all texts in one batch.
    `peak_bytes`: by how much the process (on a GPU: its tensors) grew from before loading."""

    load_seconds: float
    seconds: float
    output_tokens: int
    weights: WeightMemory
    kv_bytes_per_token: int
    peak_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant's answers. `text` and `distance` None: no text was read, or it is the first."""

    variant: Variant
    quantization: str
    dtype: str
    backend: str
    answers: list[Answer]
    cost: Cost
    text: TextScore | None = None
    distance: Distance | None = None

    @property
    def num_right(self) -> int:
        return sum(answer.score.correct for answer in self.answers)


def measure(
    variant: Variant,
    machine: EngineConfig,
    questions: Sequence[Question],
    reader: TextReader | None,
    *,
    first: bool,
    progress: Progress = lambda *_: None,
) -> Measured:
    """`first`: the text's probabilities are kept, else compared with those kept.

    Raises CheckpointError or EngineError when the variant cannot be loaded.
    """
    with peak_memory() as peak:
        started = time.perf_counter()
        loaded = Loaded.load(variant.config(machine))
        runner = loaded.runner
        runner.warm_up()
        load_seconds = time.perf_counter() - started
        total = len(questions)
        asked = ask(loaded, questions, lambda done: progress(variant.label, done, total))
    text = distance = None
    if reader is not None:
        progress(f"{variant.label}: text", total, total)
        if first:
            text = reader.first(loaded)
        else:
            text, distance = reader.second(loaded)
    cost = Cost(
        load_seconds=load_seconds,
        seconds=asked.seconds,
        output_tokens=asked.output_tokens,
        weights=runner.weight_memory,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        peak_bytes=peak.device_bytes or peak.extra_bytes,
    )
    measured = Measured(
        variant,
        runner.quantization,
        runner.dtype,
        runner.backend_name,
        asked.answers,
        cost,
        text,
        distance,
    )
    del loaded, runner
    give_back()
    return measured
