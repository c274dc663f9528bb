"""Quantized checkpoints that are damaged, mislabelled or of a kind that is not run: each is refused
by name, and what its own content tells is believed over its label."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.errors import CheckpointError, EngineError
from headrace.engine.runner import ModelRunner, load_runner

DATA = Path(__file__).parents[2] / "data" / "quant"
Q_PROJ = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


def load(folder: Path, quantization: str | None = None) -> ModelRunner:
    return load_runner(
        EngineConfig(
            str(folder),
            dtype="float32",
            quantization=quantization,
            kv_cache_memory_bytes=1 << 22,
            num_threads=1,
        )
    )


def altered(
    tmp_path: Path,
    name: str,
    config: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], None] | None = None,
) -> Path:
    """A copy whose quantization_config has other values (None removes one) and whose tensors were
    changed."""
    folder = tmp_path / name
    shutil.copytree(DATA / name, folder)
    values = json.loads((folder / "config.json").read_bytes())
    for key, value in (config or {}).items():
        if value is None:
            values["quantization_config"].pop(key, None)
        else:
            values["quantization_config"][key] = value
    (folder / "config.json").write_text(json.dumps(values))
    if tensors is not None:
        found = load_file(folder / "model.safetensors")
        tensors(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


GPTQ = "gptq-4b-g32-asym"


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (GPTQ, {"quant_method": "quip"}, "quantization method 'quip' is not supported"),
        (GPTQ, {"bits": 5}, "GPTQ with 5 bits"),
        (GPTQ, {"bits": None}, "quantization_config: bits is missing"),
        (GPTQ, {"bits": "four"}, "bits is 'four'; an integer is needed"),
        (GPTQ, {"checkpoint_format": "marlin"}, "GPTQ format 'marlin' is not supported"),
        (GPTQ, {"group_size": 24}, "groups of 24 are no multiple of 32"),
        (GPTQ, {"group_size": 64}, r"qzeros has shape .*; the config needs"),
        (GPTQ, {"bits": 8}, r"qweight has shape .*; the config needs"),
        (GPTQ, {"quant_method": "awq"}, "AWQ checkpoint_format 'gptq' is not supported"),
        ("awq-g32-qwen2", {"bits": 8}, "AWQ with 8 bits"),
        ("awq-g32-qwen2", {"version": "gemv"}, "AWQ version 'gemv' is not supported"),
        ("bnb-fp4", {"bnb_4bit_quant_type": "af4"}, "'af4' is not supported"),
        ("bnb-fp4", {"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit"),
        ("bnb-fp4", {"bnb_4bit_quant_type": "nf4"}, "missing|unexpected"),
        ("bnb-fp4", {"bnb_4bit_use_double_quant": True}, "nested_absmax"),
        ("bnb-fp4", {"bnb_4bit_quant_storage": "bfloat16"}, "'bfloat16' is not supported"),
        ("ct-w8a16", {"config_groups": {}}, "config_groups is missing"),
        ("torchao-int8wo", {"quant_type": "Float8"}, "torchao Float8 is not supported"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_name(
    name: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(altered(tmp_path, name, config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 3}, "3-bit int weights"),
        ({"type": "float", "num_bits": 4}, "4-bit float weights"),
        ({"strategy": "tensor_group"}, "strategy 'tensor_group'"),
        ({"num_bits": None}, "weights: num_bits is missing"),
    ],
)
def test_compressed_tensors_of_another_kind_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    groups = json.loads((DATA / "ct-w8a16" / "config.json").read_bytes())
    groups = groups["quantization_config"]["config_groups"]
    groups["group_0"]["weights"].update(change)
    with pytest.raises(CheckpointError, match=message):
        load(altered(tmp_path, "ct-w8a16", {"config_groups": groups}))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (GPTQ, f"{Q_PROJ}.scales"),
        (GPTQ, f"{Q_PROJ}.g_idx"),
        ("awq-g32-qwen2", f"{Q_PROJ}.qzeros"),
        ("bnb-fp4", f"{Q_PROJ}.weight.absmax"),
        ("bnb-int8", f"{Q_PROJ}.SCB"),
        ("bnb-nf4-dq-qwen2", f"{Q_PROJ}.weight.nested_absmax"),
        ("ct-fp8-block", f"{Q_PROJ}.weight_scale"),
        ("ct-w8a8-int8-dynamic", f"{Q_PROJ}.weight_scale"),
        ("ct-w4a16-asym-qwen2", f"{Q_PROJ}.weight_zero_point"),
        ("torchao-int8wo", f"{Q_PROJ}._weight_scale"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    def remove(tensors: Tensors) -> None:
        del tensors[tensor]

    with pytest.raises(CheckpointError, match=rf"{tensor} missing"):
        load(altered(tmp_path, name, tensors=remove))


def test_a_missing_quant_state_is_named(tmp_path: Path) -> None:
    def remove(tensors: Tensors) -> None:
        del tensors[f"{Q_PROJ}.weight.quant_state.bitsandbytes__fp4"]

    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}.*quant_state.* missing"):
        load(altered(tmp_path, "bnb-fp4", tensors=remove))


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.qweight"] = tensors[f"{Q_PROJ}.qweight"][:-1].clone()

    def retype(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.qweight"] = tensors[f"{Q_PROJ}.qweight"].float()

    def uneven(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.g_idx"][0] = 1

    def unjson(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight.quant_state.bitsandbytes__fp4"][0] = ord("x")

    for index, (name, change, message) in enumerate(
        [
            (GPTQ, cut, r"q_proj\.qweight has shape"),
            (GPTQ, retype, r"q_proj\.qweight has dtype F32; I32 is needed"),
            (GPTQ, uneven, r"q_proj\.g_idx: its groups do not have 32 columns each"),
            ("bnb-fp4", unjson, r"q_proj: bitsandbytes quant_state is damaged"),
        ]
    ):
        with pytest.raises(CheckpointError, match=message):
            load(altered(tmp_path / str(index), name, tensors=change))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = altered(tmp_path, GPTQ)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(folder)


def test_integers_without_a_quantization_config_are_not_taken_for_floats(tmp_path: Path) -> None:
    folder = altered(tmp_path, "bnb-int8")
    values = json.loads((folder / "config.json").read_bytes())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"has dtype \w+, where floats .* are needed"):
        load(folder)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("int5", "quantization 'int5' is not supported; at load: int8, int8-dynamic"),
        ("int4-g48", "groups of 48 are not run"),
        ("awq", r"'awq' is not what gptq-4b-g32-asym holds \(gptq\)"),
        ("gguf", r"'gguf' is not what gptq-4b-g32-asym holds \(gptq\)"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(asked: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        load(DATA / GPTQ, asked)


@pytest.mark.parametrize(
    ("name", "label"), [(GPTQ, "gptq_v2"), ("gptq-4b-g32-asym-v2", "gptq"), (GPTQ, None)]
)
def test_zero_points_are_told_apart_by_content_not_by_label(
    name: str, label: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of version 1 labelled as version 2 are common; read by the label, logits move by 7."""
    folder = altered(tmp_path, name, {"checkpoint_format": label, "format": label})
    expected = load_file(folder / "expected.safetensors")
    with caplog.at_level(logging.WARNING):
        logits = load(folder).logits(expected["input_ids"][0].tolist())
    torch.testing.assert_close(logits, expected["logits_dequant"][0], atol=2e-3, rtol=0)
    assert ("the zero points are version" in caplog.text) == (label is not None)


@pytest.mark.parametrize("scheme", ["int8-dynamic+head", "int4-g32", "nf4"])
def test_a_quantized_checkpoint_can_be_quantized_anew(scheme: str) -> None:
    """Logits stay near those of the checkpoint's own weights."""
    expected = load_file(DATA / GPTQ / "expected.safetensors")
    runner = load(DATA / GPTQ, scheme)
    assert runner.quantization == scheme
    difference = runner.logits(expected["input_ids"][0].tolist()) - expected["logits_dequant"][0]
    assert difference.std() < (0.2 if scheme.startswith("int8") else 0.8)
