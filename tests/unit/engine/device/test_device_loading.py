"""What a device is asked before a model runs on it: its type, its memory, what is refused."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from device_engines import needs_interpreter
from toy import ToyTokenizer, drain, greedy

from headrace.engine.accelerator import HostAccelerator, Memory
from headrace.engine.config import EngineConfig
from headrace.engine.device_loading import StepBytes, pool_bytes, step_bytes
from headrace.engine.engine import Engine
from headrace.engine.errors import EngineError
from headrace.engine.kv.cache import allocate
from headrace.engine.layers.backend import SharedPrefix
from headrace.engine.layers.triton_backend import TritonBackend, prefix_arrays
from headrace.engine.loading.random_weights import random_checkpoint
from headrace.engine.machine import choose_cuda_dtype, choose_device
from headrace.engine.models.decoder import load_decoder
from headrace.engine.runner import build_runner
from headrace.engine.shared_prefix_crossover import NEVER, crossover, measured_crossover

GIB = 1 << 30
AMPERE, TURING, VOLTA = (8, 0), (7, 5), (7, 0)


def test_the_pool_gets_what_weights_others_and_the_widest_step_leave() -> None:
    """80 GiB, 0.9 of it ours: 72. In use are 20 (weights and other processes), a step takes 3, 70
    graphs at 4 MiB take 0.27: 48.7 GiB are left."""
    memory = Memory(free=60 * GIB, total=80 * GIB)
    assert pool_bytes(memory, 0.9, 3 * GIB, 70 << 22) == 72 * GIB - 23 * GIB - (70 << 22)


def test_a_pool_that_is_short_is_empty_and_not_negative() -> None:
    assert pool_bytes(Memory(free=1 * GIB, total=16 * GIB), 0.9, 2 * GIB) == 0


@pytest.mark.parametrize(
    ("chosen", "stored", "capability", "wanted"),
    [
        ("auto", "bfloat16", AMPERE, torch.bfloat16),
        ("auto", "float16", AMPERE, torch.float16),
        ("auto", "float32", AMPERE, torch.bfloat16),
        ("auto", "bfloat16", TURING, torch.float16),
        ("auto", "float32", TURING, torch.float16),
        ("float32", "bfloat16", TURING, torch.float32),
        ("bfloat16", "float16", AMPERE, torch.bfloat16),
    ],
)
def test_below_8_0_it_is_float16(
    chosen: str, stored: str, capability: tuple[int, int], wanted: torch.dtype
) -> None:
    """A T4 has no bfloat16: it is emulated there, many times slower."""
    assert choose_cuda_dtype(chosen, stored, capability) is wanted


def test_what_a_device_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"bfloat16 needs compute capability 8\.0.*has 7\.5"):
        choose_cuda_dtype("bfloat16", "bfloat16", TURING)
    with pytest.raises(EngineError, match=r"7\.0 is not supported"):
        choose_cuda_dtype("auto", "float16", VOLTA)
    with pytest.raises(EngineError, match="'gpu' is not supported"):
        choose_device("gpu")
    with pytest.raises(EngineError, match=r"cuda:7.*is not there"):
        choose_device("cuda:7")


def test_auto_takes_a_cuda_device_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert choose_device("auto") == torch.device("cuda", 0)


@needs_interpreter
def test_the_widest_steps_run_before_there_is_a_pool() -> None:
    """Two rows of five tokens and two decodes at full length, all on one block."""
    checkpoint = random_checkpoint(tiny.tiny_config("llama", max_position_embeddings=40))
    config = EngineConfig("m", max_num_seqs=2, max_num_batched_tokens=9)
    device = torch.device("cpu")
    backend = TritonBackend(checkpoint.config, 40, torch.float32, device)
    with torch.inference_mode():
        decoder = load_decoder(checkpoint, backend, torch.float32, device)
    with np.errstate(all="ignore"):
        taken = step_bytes(config, checkpoint.config, decoder, backend, 40, HostAccelerator())
    assert taken == StepBytes(0, 0)  # a CPU's is not measured


@needs_interpreter
@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        ({"num_attention_heads": 34, "num_key_value_heads": 2}, {}, "17 query heads"),
        ({"head_dim": 8}, {}, "head_dim 8"),
        ({}, {"block_size": 24}, "block_size 24"),
        ({}, {"kv_cache_dtype": "int8"}, "kv_cache_dtype int8"),
        ({}, {"deterministic": True, "quantization": "int8"}, "deterministic=True .* int8"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(
    overrides: dict[str, int],
    settings: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_BACKEND", "triton")
    checkpoint = random_checkpoint(tiny.tiny_config("llama", **overrides))
    chosen = EngineConfig("m", device="cpu", kv_cache_memory_bytes=1 << 20, **settings)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=message):
        build_runner(chosen, checkpoint)


@needs_interpreter
def test_on_a_cpu_the_kernels_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(EngineError, match="TRITON_INTERPRET=1"):
        build_runner(EngineConfig("m", device="cpu"), random_checkpoint(tiny.tiny_config()))


@needs_interpreter
def test_what_runs_is_said_when_it_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which attention, which matmul, which graphs: in the log and on the engine."""
    monkeypatch.setenv("HEADRACE_BACKEND", "triton")
    config = EngineConfig("m", device="cpu", kv_cache_memory_bytes=1 << 20, max_num_seqs=4)
    with caplog.at_level(logging.INFO, "headrace.engine"):
        runner = build_runner(config, random_checkpoint(tiny.tiny_config()))
    info = Engine.of(config, runner, ToyTokenizer()).info
    for part in ("Triton paged attention", "matmul: torch on the CPU", "5 for decodes of up to 4"):
        assert part in info
    assert info in caplog.text


def test_a_random_checkpoint_is_the_same_each_time_and_runs() -> None:
    values = tiny.tiny_config("qwen3")
    found = []
    for seed in (0, 0, 1):
        checkpoint = random_checkpoint(values, seed=seed)
        config = EngineConfig("m", device="cpu", kv_cache_memory_bytes=1 << 20)
        engine = Engine.of(config, build_runner(config, checkpoint), ToyTokenizer())
        engine.add(greedy(range(9), 6))
        found.append((checkpoint.fingerprint, drain(engine)[0].output_token_ids))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0] and found[0][1] != found[2][1]


def test_prefixes_are_read_once_when_that_spares_enough() -> None:
    """Three rows of six share 32 blocks of 16: two of them are spared 512 keys, 170 for each row
    of the step."""
    prefix = SharedPrefix(np.array([2, 3, 5], dtype=np.int64), 32)
    assert prefix_arrays([prefix], 6, 16, 171) is None
    assert prefix_arrays([], 6, 16, 0) is None
    found = prefix_arrays([prefix], 6, 16, 170)
    assert found is not None
    offsets, members, lens, longest = found
    assert offsets.tolist() == [0, 3] and members.tolist() == [2, 3, 5]
    assert lens.tolist() == [0, 0, 512, 512, 0, 512] and longest == 512


@pytest.mark.parametrize(
    ("gains", "wanted"),
    [
        ({128: -1, 256: 1, 512: 2}, 256),
        ({128: 1, 256: -1, 512: 2}, 512),  # what is faster at 128 only was luck
        ({128: -2, 256: -1, 512: 0}, NEVER),
        ({128: 1, 256: 1, 512: 1}, 128),
    ],
)
def test_the_crossover_is_where_it_pays_from_then_on(gains: dict[int, int], wanted: int) -> None:
    found = crossover(lambda length: 10.0 + gains[length], lambda _: 10.0, list(gains))
    assert found == wanted


@needs_interpreter
def test_the_crossover_is_measured_on_the_pool_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows on 128 shared tokens, apart and together, each timed once under the interpreter; a
    stopped clock makes the second the faster one."""
    checkpoint = random_checkpoint(tiny.tiny_config("llama"))
    config = EngineConfig("m", max_num_seqs=2, kv_cache_memory_bytes=17 * 8192)
    backend = TritonBackend(checkpoint.config, 256, torch.float32, torch.device("cpu"))
    cache = allocate(config, checkpoint.config, backend, torch.float32, torch.device("cpu"))
    took = iter((1.0, 2.0))
    device = HostAccelerator()

    def seconds(work: Callable[[], None]) -> float:
        work()
        return next(took)

    monkeypatch.setattr(device, "seconds", seconds)
    with np.errstate(all="ignore"):
        found = measured_crossover(device, backend, checkpoint.config, cache, config)
    assert found == 64  # one of two rows is spared 128


def test_the_model_is_named_after_its_folder_not_its_path(tmp_path: Path) -> None:
    config = EngineConfig(str(tmp_path / "Tiny"), device="cpu", kv_cache_memory_bytes=1 << 20)
    assert build_runner(config, random_checkpoint(tiny.tiny_config())).model_name == "tiny"
