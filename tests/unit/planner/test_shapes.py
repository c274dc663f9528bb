"""Shapes from config.json, against the parameter counts of Transformers' own models."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.engine.planner import catalog
from headrace.engine.planner.config import shape_from_config
from headrace.engine.planner.errors import PlanError

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32}),
    ("mistral", {"head_dim": 32, "sliding_window": 8}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 24}),
    ("qwen3", {"attention_bias": True}),
    ("gemma", {"head_dim": 32}),
    ("gemma2", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 32}),
    ("phi3", {"pad_token_id": 0}),
    ("phi", {"num_key_value_heads": 4}),
    ("mixtral", {"num_local_experts": 4}),
    (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
    ),
]


@pytest.mark.parametrize(("model_type", "more"), FAMILIES)
def test_parameters_equal_those_of_transformers(model_type: str, more: dict[str, Any]) -> None:
    """To the last one, biases, norms and routers included."""
    config = {**BASE, **more}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    expected = sum(p.numel() for p in model.parameters())
    shape = shape_from_config(model.config.to_dict(), "oracle")
    assert shape.num_params == expected
    assert shape_from_config({**config, "model_type": model_type}, "typed").num_params == expected


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "mistral", "qwen2"])
def test_windows_are_those_of_transformers(model_type: str) -> None:
    """`layer_types` as Transformers fills it, and the family's own rule where it is left out."""
    more = {"num_hidden_layers": 12, "sliding_window": 16, "head_dim": 16}
    more |= {"use_sliding_window": True, "max_window_layers": 5} if model_type == "qwen2" else {}
    config = {**BASE, **more, "model_type": model_type}
    full = AutoConfig.for_model(**config).to_dict()
    shape = shape_from_config(config, "typed")
    assert shape.windows == shape_from_config(full, "oracle").windows
    assert any(w == 16 for w in shape.windows)
    if "layer_types" in full:
        sliding = [t == "sliding_attention" for t in full["layer_types"]]
        assert [w is not None for w in shape.windows] == sliding


def test_qwen2_ignores_its_window_unless_told_to_use_it() -> None:
    config = {**BASE, "model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}
    assert shape_from_config(config, "x").windows == ()


def test_head_dim_of_the_config_wins_over_the_quotient() -> None:
    """Qwen3-4B: 32 heads of 128 make 4096, not its hidden size of 2560."""
    shape = catalog.shape("Qwen3-4B")
    assert (shape.head_dim, shape.q_size, shape.hidden_size) == (128, 4096, 2560)


def test_a_multimodal_config_is_read_through_its_text_part() -> None:
    text = {**BASE, "model_type": "gemma3_text", "head_dim": 32}
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 7}}
    shape = shape_from_config(outer, "x")
    assert shape.num_params == shape_from_config(text, "x").num_params
    assert "text part" in shape.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"hidden_size": 65}, "no multiple of num_attention_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "must list 3 layers"),
    ],
)
def test_a_wrong_config_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        shape_from_config({**BASE, "model_type": "llama", **change}, "bad")


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Qwen/Qwen2-7B-Instruct", "Qwen2-7B"),
        ("qwen2.5-0.5b", "Qwen2.5-0.5B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("google/gemma-2-2b-it", "Gemma-2-2B"),
        ("microsoft/Phi-3-mini-4k-instruct", "Phi-3-mini-4k"),
        ("smollm2-135m-instruct", "SmolLM2-135M"),
        ("Qwen3-4B-Instruct-2507", "Qwen3-4B"),
    ],
)
def test_published_names_are_found(typed: str, name: str) -> None:
    found = catalog.find(typed)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("typed", ["Qwen2-14B", "Llama-3", "", "gpt-5"])
def test_a_model_that_does_not_exist_is_not_guessed(typed: str) -> None:
    assert catalog.find(typed) is None
