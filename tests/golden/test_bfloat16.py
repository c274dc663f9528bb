"""bfloat16 weights on the CPU: matmuls in 16 bits, everything between them in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.engine.config import EngineConfig
from headrace.engine.runner import load_runner

FAMILIES = Path(__file__).resolve().parents[1] / "data" / "families"


@pytest.mark.parametrize("family", ["smollm-tied", "qwen3"])
def test_bfloat16_keeps_the_fast_kernels_and_stays_near_float32(family: str) -> None:
    """Two layers with logits of standard deviation 2.5: 16-bit products move a logit by a few
    hundredths (8 bits of mantissa: 2**-8 of each product), a wrong cast by far more."""
    expected = load_file(FAMILIES / family / "expected.safetensors")
    runner = load_runner(
        EngineConfig(model=str(FAMILIES / family), dtype="bfloat16", kv_cache_memory_bytes=1 << 24)
    )
    assert runner.backend_name == "cpu"
    assert runner.dtype == "bfloat16"
    logits = runner.logits(expected["input_ids"][0].tolist())
    difference = (logits - expected["logits"][0]).abs()
    assert torch.isfinite(logits).all()
    assert 0 < difference.mean() < 0.03
    assert difference.max() < 0.25
