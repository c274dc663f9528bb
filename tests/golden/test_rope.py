"""Cosines and sines of every rope type against Transformers' rotary embedding."""

from typing import Any

import pytest
import tiny
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.engine.layers.rope import rope_table
from headrace.engine.models.registry import read_config

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.75,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.5,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_tables_equal_transformers(name: str, head_dim: int) -> None:
    values = tiny.tiny_config(rope_parameters=CASES[name], head_dim=head_dim)
    config = read_config(values)
    ours_cos, ours_sin = rope_table(config.rope, head_dim, 900)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**values))
    cos, sin = theirs(torch.zeros(1), torch.arange(900)[None])
    half = head_dim // 2
    torch.testing.assert_close(ours_cos, cos[0, :, :half], atol=2e-6, rtol=0)
    torch.testing.assert_close(ours_sin, sin[0, :, :half], atol=2e-6, rtol=0)


def test_dynamic_scaling_is_what_token_by_token_decoding_gives() -> None:
    """Position p is rotated as Transformers does it when the sequence has p + 1 tokens."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    values = tiny.tiny_config(rope_parameters=parameters, max_position_embeddings=64)
    config = read_config(values)
    ours_cos, ours_sin = rope_table(config.rope, 16, 200)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**values))
    for position in (0, 5, 63, 64, 65, 100, 199):
        cos, sin = theirs(torch.zeros(1), torch.tensor([[position]]))
        torch.testing.assert_close(ours_cos[position], cos[0, 0, :8], atol=2e-6, rtol=0)
        torch.testing.assert_close(ours_sin[position], sin[0, 0, :8], atol=2e-6, rtol=0)


def test_old_and_new_spellings_mean_the_same() -> None:
    """Transformers 5: rope_parameters; 4: rope_theta and rope_scaling; older still: type."""
    scaling = {key: value for key, value in CASES["llama3"].items() if key != "rope_theta"}
    new = read_config(tiny.tiny_config(rope_parameters=CASES["llama3"]))
    old = read_config(
        tiny.tiny_config(rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling)
    )
    kind = scaling.pop("rope_type")
    oldest = read_config(
        tiny.tiny_config(
            rope_parameters=None, rope_theta=500000.0, rope_scaling={"type": kind, **scaling}
        )
    )
    assert new.rope == old.rope == oldest.rope
