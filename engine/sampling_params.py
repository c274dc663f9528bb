"""What one sequence asks of the sampler: plain values, checked against a vocabulary by `check`."""

import math
from dataclasses import dataclass, field

from headrace.engine.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one sequence, in the field's usual names and ranges.

    `temperature` 0 is greedy (ties go to the lowest id). `top_k` 0 and `top_p` 1 and `min_p` 0
    switch the filter off. `seed` None: the caller's `Sequence.seed` serves. `logprobs` None: none;
    0: the sampled token's only; n: and the n most likely ones. `stop` strings end the text before
    the match; `stop_token_ids` end it before the token.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def check(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field that is out of range.

        `vocab_size` is the number of ids the tokenizer can produce, not the padded embedding.
        """
        self._at_least("max_tokens", self.max_tokens, 0)
        self._at_least("min_tokens", self.min_tokens, 0)
        self._at_least("top_k", self.top_k, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _out_of_range(
                "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        self._between("temperature", self.temperature, 0.0, 100.0)
        self._between("min_p", self.min_p, 0.0, 1.0)
        self._between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", self.top_p, "greater than 0 and at most 1")
        if not (0.0 < self.repetition_penalty < math.inf):
            raise _out_of_range("repetition_penalty", self.repetition_penalty, "greater than 0")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise _out_of_range("top_logprobs", self.logprobs, f"between 0 and {MAX_LOGPROBS}")
        for text in self.stop:
            if not text:
                raise RequestError("invalid_request", "stop: an empty string stops nothing", "stop")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise _out_of_range("stop_token_ids", token, f"between 0 and {vocab_size - 1}")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise _out_of_range("logit_bias", token, f"an id between 0 and {vocab_size - 1}")
            if not -100.0 <= bias <= 100.0:
                raise _out_of_range("logit_bias", bias, "between -100 and 100")

    @staticmethod
    def _at_least(name: str, value: int | None, low: int) -> None:
        if value is not None and value < low:
            raise _out_of_range(name, value, f"at least {low}")

    @staticmethod
    def _between(name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise _out_of_range(name, value, f"between {low:g} and {high:g}")


def _out_of_range(name: str, value: float, allowed: str) -> RequestError:
    return RequestError("invalid_request", f"{name} is {value}; it must be {allowed}", name)
