"""What is run: config.json values of real models, the tiny ones of a rehearsal, and the requests.

Lengths come from a fixed seed. Knows no engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def qwen3_8b(dtype: str) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def qwen3_06b(dtype: str) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }


def tiny(dtype: str) -> dict[str, Any]:
    """For a rehearsal on a CPU: the same architecture, two small layers."""
    return _QWEN3 | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 510,
        "eos_token_id": 511,
        "dtype": dtype,
    }


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts as token ids, and how many tokens each must bring out."""

    prompts: Sequence[list[int]]
    max_tokens: Sequence[int]

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def longest(self) -> int:
        return max(len(p) + m for p, m in zip(self.prompts, self.max_tokens, strict=True))

    def head(self, count: int, most: int | None = None) -> "Work":
        """The first requests, with at most `most` tokens of output each."""
        limits = [m if most is None else min(m, most) for m in self.max_tokens[:count]]
        return Work(self.prompts[:count], limits)


def fixed(count: int, prompt: int, output: int, vocab_size: int) -> Work:
    """Equal lengths."""
    draw = random.Random(0)
    prompts = [_ids(draw, prompt, vocab_size) for _ in range(count)]
    return Work(prompts, [output] * count)


def mixed(count: int, low: int, high: int, vocab_size: int) -> Work:
    """Prompt and output lengths uniform from `low` to `high`."""
    draw = random.Random(0)
    prompts = [_ids(draw, draw.randint(low, high), vocab_size) for _ in range(count)]
    return Work(prompts, [draw.randint(low, high) for _ in range(count)])


def shared(count: int, prefix: int, own: int, output: int, vocab_size: int) -> Work:
    """One common beginning, then an end of each one's own."""
    draw = random.Random(0)
    head = _ids(draw, prefix, vocab_size)
    return Work([head + _ids(draw, own, vocab_size) for _ in range(count)], [output] * count)


def _ids(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size - 2) for _ in range(count)]
