"""Logits and greedy tokens against Transformers' own, on checkpoints that Transformers saved and
GGUF files that llama.cpp's tools wrote. Expected values lie beside the weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.engine.config import EngineConfig
from headrace.engine.runner import ModelRunner, load_runner

DATA = Path(__file__).parents[1] / "data"
FAMILIES = sorted(path.name for path in (DATA / "families").iterdir())
GGUF = sorted(path.name for path in (DATA / "gguf").iterdir())
BACKENDS = ("cpu", "torch")


def load(model: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    if backend == "torch":
        monkeypatch.setenv("HEADRACE_BACKEND", "torch")
    runner = load_runner(
        EngineConfig(str(model), dtype="float32", kv_cache_memory_bytes=1 << 23, num_threads=1)
    )
    assert runner.backend_name == backend
    return runner


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1e-4 (logits have a standard deviation of 2.5), whole and in chunks of 7: each feature
    (rope scaling, window, biases, head norms, tied head) moves them by 0.5 or more when ignored."""
    folder = DATA / "families" / name
    runner = load(folder, backend, monkeypatch)
    expected = load_file(folder / "expected.safetensors")
    tokens = expected["input_ids"][0].tolist()
    for chunk in (512, 7):
        torch.testing.assert_close(
            runner.logits(tokens, chunk), expected["logits"][0], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DATA / "families" / name
    runner = load(folder, "cpu", monkeypatch)
    expected = load_file(folder / "expected.safetensors")
    tokens = expected["input_ids"][0].tolist()
    for wanted in expected["greedy_8"].flatten().tolist():
        assert int(runner.logits(tokens)[-1].argmax()) == wanted
        tokens.append(wanted)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_logits_equal_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantization errors are in the expected values too, so only rounding is left."""
    folder = DATA / "gguf" / name
    runner = load(folder / "model.gguf", "cpu", monkeypatch)
    expected = load_file(folder / "expected.safetensors")
    torch.testing.assert_close(
        runner.logits(expected["input_ids"][0].tolist()), expected["logits"][0], atol=1e-4, rtol=0
    )
