"""Engines on a late device beside engines on the CPU, and requests that use everything."""

from pathlib import Path
from typing import Any

import pytest
import torch
from delayed_device import DelayedAccelerator, LaunchGuard
from toy import ToyTokenizer

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.runner import load_runner
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a CUDA device kernels are compiled, not interpreted"
)

Answers = dict[str, tuple[list[int], str, list[Any]]]


def config(model: Path, **settings: Any) -> EngineConfig:
    chosen: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "kv_cache_memory_bytes": 1 << 21,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "num_threads": 1,
        "deduplicate": False,
        **settings,
    }
    return EngineConfig(str(model), **chosen)


def on_cpu(model: Path, **settings: Any) -> Engine:
    chosen = config(model, **settings)
    return Engine.of(chosen, load_runner(chosen), ToyTokenizer())


def on_device(
    model: Path, monkeypatch: pytest.MonkeyPatch, warm: bool = False, **settings: Any
) -> tuple[Engine, DelayedAccelerator]:
    """An engine on a late device whose launches may not wait; where there is a CUDA device, on that
    one, its kernels compiled."""
    device = DelayedAccelerator(warm)
    if torch.cuda.is_available():
        chosen = config(model, **{**settings, "device": "cuda"})
        return Engine.of(chosen, load_runner(chosen), ToyTokenizer()), device
    monkeypatch.setenv("HEADRACE_BACKEND", "triton")
    monkeypatch.setattr("headrace.engine.accelerator.HostAccelerator", lambda: device)
    chosen = config(model, **settings)
    runner = load_runner(chosen)
    engine = Engine.of(chosen, runner, ToyTokenizer())
    engine.runner = LaunchGuard(runner, device)
    return engine, device


def request(name: str, prompt: list[int], count: int, seed: int = 0, **params: Any) -> Sequence:
    settings = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params}
    seq = Sequence(name, list(prompt), SamplingParams(**settings))
    seq.seed = seed
    return seq


def answers(engine: Engine, requests: list[Sequence]) -> Answers:
    for seq in requests:
        engine.add(seq)
    found = {}
    while engine.has_unfinished:
        for seq in engine.step().finished:
            failure = "" if seq.failure is None else seq.failure.code
            found[seq.request_id] = (seq.output_token_ids, failure, seq.logprobs)
        engine.check_integrity()
    return found


def tokens_of(found: Answers) -> dict[str, tuple[list[int], str]]:
    return {name: answer[:2] for name, answer in found.items()}


def mixed_requests() -> list[Sequence]:
    """Cold prompts, one longer than a step's budget, and every kind of sampling; later ones come
    while earlier ones decode."""
    return [
        request("greedy", [3, 1, 4, 1, 5], 5),
        request("chunked", [(7 * k) % 250 for k in range(40)], 3),
        request("top", [9, 8, 7], 5, seed=11, temperature=1.0, top_k=20, top_p=0.9),
        request(
            "changed",
            [5, 5, 6, 6],
            4,
            seed=12,
            temperature=0.8,
            min_p=0.02,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            presence_penalty=0.2,
            logit_bias={17: 4.0, 18: -3.0},
            min_tokens=3,
            logprobs=3,
        ),
        request("free", [2, 7, 1, 8, 2, 8], 3, seed=13, temperature=1.0, logprobs=0),
    ]
