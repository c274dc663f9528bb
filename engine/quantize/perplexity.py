"""Perplexity of the model before and after, on one text, while the layers pass by: both sets of
weights are never in memory as a whole."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.models.config import ModelConfig
from headrace.engine.quantize.block import LayerFloats, Texts

_ROWS = 256


class Perplexity:
    """One text under one set of weights. Every token but the first of each sequence counts."""

    def __init__(
        self, config: ModelConfig, sequences: Sequence[Sequence[int]], embedding: Tensor
    ) -> None:
        self._config = config
        self._texts = Texts(config, sequences)
        self._texts.embed(embedding)

    def advance(self, layer: LayerFloats) -> None:
        self._texts.advance(layer, self._config)

    def result(self, final_norm: Tensor, head: Tensor) -> float:
        """`head` [vocabulary, hidden]; what has no token in the tokenizer is cut off."""
        texts, total, count, start = self._texts, 0.0, 0, 0
        for length in texts.lengths:
            states = texts.states[start : start + length - 1]
            targets = texts.token_ids[start + 1 : start + length]
            normed = texts.backend.rms_norm(states, final_norm, self._config.rms_norm_eps)
            for first in range(0, len(normed), _ROWS):
                logprobs = torch.log_softmax(normed[first : first + _ROWS] @ head.T, dim=-1)
                wanted = targets[first : first + _ROWS, None]
                total -= float(logprobs.gather(1, wanted).sum())
            count += length - 1
            start += length
        return math.exp(total / count)
