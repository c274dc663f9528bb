"""Planned memory against what the engine really allocates on this machine."""

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import write_checkpoint

from headrace.engine.config import EngineConfig
from headrace.engine.planner.hardware import this_cpu
from headrace.engine.planner.kv import kv_bytes_per_token
from headrace.engine.planner.memory import Settings, plan_memory
from headrace.engine.planner.resolve import resolve
from headrace.engine.planner.schemes import parse_scheme
from headrace.engine.planner.weights import weight_bytes
from headrace.engine.runner import load_runner

KV = 24 << 20


def tensor_bytes() -> int:
    """Bytes behind all live tensors, each storage once; packed weights have no storage to ask."""
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) is torch.Tensor:
            if item.is_mkldnn:
                sizes[id(item)] = item.numel() * item.element_size()
            else:
                storage = item.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_tensors_of_a_loaded_model_are_those_planned(
    tmp_path: Path, family: str, tied: bool
) -> None:
    """Weights, the packed copy of a tied head, rotary tables and KV: to 2 %.

    The weights are 50 MB, so that the engine's small buffers do not decide.
    """
    folder = write_checkpoint(
        tmp_path / "model",
        family,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=tied,
    )
    gc.collect()
    before = tensor_bytes()
    config = EngineConfig(str(folder), dtype="float32", kv_cache_memory_bytes=KV, max_num_seqs=4)
    runner = load_runner(config)
    gc.collect()
    allocated = tensor_bytes() - before
    model, scheme = resolve(str(folder)), parse_scheme("fp32")
    settings = Settings(kv_cache_memory=KV, max_num_seqs=4)
    weights = weight_bytes(model.shape, scheme, 4).total
    card = replace(this_cpu(), memory=1 << 40, flops={"fp32": 1e12, "bf16": 1e11})
    plan = plan_memory(model.shape, scheme, weights, card, settings)
    assert plan.kv == KV
    assert allocated == pytest.approx(plan.weights + plan.tables + plan.kv, rel=0.02)
    tokens = (runner.num_blocks + 1) * runner.block_size
    assert runner.kv_cache_bytes == tokens * kv_bytes_per_token(model.shape, "fp32")


MEASURE = """
import random, resource, sys
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence
model, kv, seqs, budget = sys.argv[1], *map(int, sys.argv[2:])
engine = Engine.load(EngineConfig(model, dtype="float32", kv_cache_memory_bytes=kv,
                                  max_num_seqs=seqs, max_num_batched_tokens=budget))
length = kv // (45 * 1024) // seqs - 24
for i in range(2 * seqs):
    prompt = [random.Random(i).randrange(1000, 40000) for _ in range(length)]
    engine.add(Sequence(str(i), prompt, SamplingParams(max_tokens=8, temperature=0.0)))
while engine.has_unfinished:
    engine.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.model
@pytest.mark.skipif(
    "HEADRACE_MEASURE" not in os.environ, reason="loads a model for a minute: HEADRACE_MEASURE=1"
)
@pytest.mark.parametrize(("mib", "seqs", "budget"), [(128, 16, 512), (512, 64, 2048)])
def test_peak_memory_of_a_working_process_is_the_one_planned(
    mib: int, seqs: int, budget: int
) -> None:
    """SmolLM2-135M in float32 with its KV pool full: resident memory at its peak, to 5 %."""
    from headrace.engine.loading.source import resolve_model

    path = resolve_model("smollm2-135m-instruct")
    arguments = [str(path), str(mib << 20), str(seqs), str(budget)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    shape, scheme = resolve(str(path)).shape, parse_scheme("fp32")
    settings = Settings(kv_cache_memory=mib << 20, max_num_seqs=seqs, max_num_batched_tokens=budget)
    card = replace(this_cpu(), memory=1 << 40, flops={"fp32": 1e12, "bf16": 1e11})
    plan = plan_memory(shape, scheme, weight_bytes(shape, scheme, 4).total, card, settings)
    assert int(done.stdout) == pytest.approx(plan.process, rel=0.05)
