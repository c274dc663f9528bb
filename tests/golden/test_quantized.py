"""Quantized checkpoints that the formats' own tools wrote, against those tools' own values.

Expected values lie beside the weights: `dequant.*` are weights as the tool's code dequantizes them,
`logits_dequant` Transformers' float32 forward with all of them, `logits` the tool's own forward.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.loading.source import open_checkpoint
from headrace.engine.models.decoder import head_spec, layer_specs
from headrace.engine.quant.choose import choose_scheme
from headrace.engine.quant.scheme import FloatSource
from headrace.engine.runner import ModelRunner, load_runner

DATA = Path(__file__).parents[1] / "data" / "quant"
NAMES = sorted(path.name for path in DATA.iterdir())
INTEGER_ACTIVATIONS = ("bnb-int8", "ct-w8a8-int8-dynamic")
ROUNDED_BY_THE_TOOL = ("torchao-int8wo",)
"""torchao's products are bfloat16; ours keep what the scales hold."""


def load(name: str, quantization: str | None = None) -> ModelRunner:
    return load_runner(
        EngineConfig(
            str(DATA / name),
            dtype="float32",
            quantization=quantization,
            kv_cache_memory_bytes=1 << 22,
            num_threads=1,
        )
    )


def expected_of(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    expected = load_file(DATA / name / "expected.safetensors")
    return expected, json.loads((DATA / name / "README.json").read_bytes())["tolerances"]


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_weights_equal_the_tool_s(name: str) -> None:
    checkpoint = open_checkpoint(DATA / name)
    layers = [spec for layer in layer_specs(checkpoint.config) for spec in layer]
    head = head_spec(checkpoint.config)
    floats = FloatSource(choose_scheme(checkpoint, None, layers, head), [*layers, head])
    expected, tolerances = expected_of(name)
    modules = [key.removeprefix("dequant.") for key in expected if key.startswith("dequant.")]
    assert modules
    for module in modules:
        theirs = expected[f"dequant.{module}"]
        ours = floats.load(f"{module}.weight")
        if name in ROUNDED_BY_THE_TOOL:
            ours = ours.bfloat16().float()
        assert (ours - theirs).abs().max() <= tolerances["dequant_abs"], module


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_dequantized_weights_equal_transformers(name: str) -> None:
    """Layout mistakes move them by 1.5 or more."""
    expected, tolerances = expected_of(name)
    logits = load(name, "float").logits(expected["input_ids"][0].tolist())
    difference = (logits - expected["logits_dequant"][0]).abs().max()
    key = "logits_abs" if name in ROUNDED_BY_THE_TOOL else "logits_dequant_abs"
    assert difference <= tolerances[key]


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_packed_weights_equal_the_tool_s(name: str) -> None:
    """As a batch and token by token: large batches go through tiles, small ones row by row."""
    expected, tolerances = expected_of(name)
    tokens = expected["input_ids"][0].tolist()
    runner = load(name)
    assert runner.quantization != "none"
    limit = tolerances["logits_abs"]
    if name not in INTEGER_ACTIVATIONS:
        limit = tolerances.get("logits_abs_if_activations_are_not_quantized", limit)
    for chunk in (512, 3):
        logits = runner.logits(tokens, chunk)
        difference = (logits - expected["logits"][0]).abs()
        assert difference.max() <= limit
        if name in INTEGER_ACTIVATIONS:
            assert difference.mean() <= tolerances.get("logits_mean_abs", limit / 4)
        elif name not in ROUNDED_BY_THE_TOOL:
            torch.testing.assert_close(logits, expected["logits_dequant"][0], atol=2e-3, rtol=0)
