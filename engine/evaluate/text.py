"""Probabilities of given text: perplexity, and how far two models' distributions lie apart.

The first model's log-probabilities go to a file, since both models never lie in memory together.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.engine.evaluate.errors import EvaluateError
from headrace.engine.evaluate.loaded import Loaded

DEFAULT = Path(__file__).with_name("data") / "text.txt"
WINDOW = 512
"""Tokens read as one context; the first of each has nothing before it and is not scored."""
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class TextScore:
    """`nll`: negative natural-log probability of all scored tokens together; `num_bytes`: of the
    text that they stand for."""

    nll: float
    num_tokens: int
    num_bytes: int

    @property
    def perplexity(self) -> float:
        """A token; comparable between models with one tokenizer only."""
        mean = self.nll / self.num_tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Comparable between all models."""
        return self.nll / math.log(2) / max(self.num_bytes, 1)


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one model's next-token distributions from another's, over the same contexts.

    KL in nats, of the candidate from the reference: sum of p_ref (ln p_ref - ln p_cand).
    `top_agreement`: share of positions at which both put the same token first.
    """

    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top_agreement: float


@dataclass(slots=True)
class TextReader:
    """Reads one text with one model after the other. `tokens`: at most so many of it are read."""

    text: str
    tokens: int
    folder: Path
    _windows: list[list[int]] = field(default_factory=list)
    _width: int = 0

    @property
    def _kept(self) -> Path:
        return self.folder / "logprobs.float32"

    def first(self, loaded: Loaded) -> TextScore:
        """Score the text and keep the model's log-probabilities."""
        self._windows = windows(loaded, self.text, self.tokens)
        self._width = loaded.runner.vocab_size
        nll = 0.0
        with self._kept.open("wb") as file:
            for logprobs, targets in self._read(loaded, self._windows):
                logprobs.cpu().numpy().tofile(file)
                nll -= _chosen(logprobs, targets)
        return self._score(loaded, nll, self._windows)

    def second(self, loaded: Loaded) -> tuple[TextScore, Distance | None]:
        """Score the text and compare with what `first` kept; no distance between models whose
        tokens differ."""
        own = windows(loaded, self.text, self.tokens)
        width = loaded.runner.vocab_size
        if own != self._windows or self._width != width:
            nll = sum(-_chosen(*pair) for pair in self._read(loaded, own))
            return self._score(loaded, nll, own), None
        nll, same = 0.0, 0
        divergences = []
        with self._kept.open("rb") as file:
            for logprobs, targets in self._read(loaded, own):
                nll -= _chosen(logprobs, targets)
                ours = logprobs.cpu()
                kept = np.fromfile(file, np.float32, ours.numel())
                theirs = torch.from_numpy(kept).view(-1, width)
                divergences.append(kl_divergence(theirs, ours))
                same += int((theirs.argmax(1) == ours.argmax(1)).sum())
        found = torch.cat(divergences)
        distance = Distance(
            kl_mean=float(found.mean()),
            kl_median=float(found.quantile(0.5)),
            kl_p99=float(found.quantile(0.99)),
            kl_max=float(found.max()),
            top_agreement=same / len(found),
        )
        return self._score(loaded, nll, own), distance

    def _read(self, loaded: Loaded, own: list[list[int]]) -> Iterator[tuple[Tensor, list[int]]]:
        for window in own:
            position = 1
            for logits in loaded.runner.logits_in_chunks(window[:-1], _CHUNK):
                yield torch.log_softmax(logits, dim=-1), window[position : position + len(logits)]
                position += len(logits)

    def _score(self, loaded: Loaded, nll: float, own: list[list[int]]) -> TextScore:
        scored = [token for window in own for token in window[1:]]
        num_bytes = sum(len(loaded.engine.tokenizer.text_bytes(token)) for token in scored)
        return TextScore(nll, len(scored), num_bytes)


def windows(loaded: Loaded, text: str, limit: int) -> list[list[int]]:
    """The text's first `limit` tokens in pieces that fit the model. Raises EvaluateError."""
    tokenizer = loaded.engine.tokenizer
    ids: list[int] = tokenizer.encode(text, False)[:limit]
    start = [tokenizer.bos_token_id] if tokenizer.adds_bos else []
    step = min(WINDOW, loaded.engine.limits.max_model_len) - len(start)
    found = [[*start, *ids[i : i + step]] for i in range(0, len(ids), step)]
    found = [window for window in found if len(window) > 1]
    if not found:
        raise EvaluateError(
            f"the text has {len(ids)} tokens; at least 2 are needed, and some hundreds to mean much"
        )
    return found


def kl_divergence(reference: Tensor, candidate: Tensor) -> Tensor:
    """Float64 [rows] of two log-probabilities [rows, vocab], in nats."""
    wide = reference.double()
    gap = wide - candidate.double()
    # A token that the reference rules out (log-probability -inf) adds nothing.
    return torch.where(wide == -math.inf, 0.0, wide.exp() * gap).sum(1).clamp(min=0.0)


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluateError(f"text {path} cannot be read: {error}") from error
    if not text.strip():
        raise EvaluateError(f"text {path} is empty; give some hundred words, or --text-tokens 0")
    return text


def _chosen(logprobs: Tensor, targets: Sequence[int]) -> float:
    wanted = torch.tensor(targets, device=logprobs.device)[:, None]
    return float(logprobs.gather(1, wanted).double().sum())
