"""Keys and values in 8 bits: what is stored, by both backends, and how far logits move."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import EngineError
from headrace.engine.layers.backend import AttentionMetadata, SharedPrefix
from headrace.engine.layers.cpu_backend import CpuBackend
from headrace.engine.layers.torch_backend import TorchBackend
from headrace.engine.loading.huggingface import open_folder
from headrace.engine.models.config import ModelConfig
from headrace.engine.quant.kv import dequantize_heads, quantize_heads
from headrace.engine.runner import load_runner
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
BLOCK = 16


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return open_folder(tiny.write_checkpoint(tmp_path / "model", head_dim=32)).config


@pytest.mark.parametrize("kind", KINDS)
def test_heads_come_back_within_their_steps(kind: str) -> None:
    heads = torch.randn(50, 3, 64) * torch.logspace(-6, 6, 50)[:, None, None]
    values, scales = quantize_heads(heads, KINDS[kind])
    error = (dequantize_heads(values, scales) - heads).abs()
    if kind == "int8":
        assert (error <= scales[..., None] * 0.5001).all()
    else:  # three bits behind the leading one
        assert (error <= heads.abs() * 2**-4 + scales[..., None] * 2**-10).all()


def step(tokens: int, contexts: list[int], shared: bool = False) -> AttentionMetadata:
    """Rows whose last `tokens` tokens are new; with `shared` all but the first have two blocks in
    common, computed before."""
    width = -(-max(contexts) // BLOCK)
    tables = np.arange(len(contexts) * width, dtype=np.int32).reshape(len(contexts), width)
    prefixes: tuple[SharedPrefix, ...] = ()
    if shared:
        tables[1:, :2] = tables[0, -2:] = 18, 19
        prefixes = (SharedPrefix(np.arange(1, len(contexts)), 2),)
    positions = np.concatenate([np.arange(length - tokens, length) for length in contexts])
    rows = np.repeat(np.arange(len(contexts)), tokens)
    slots = tables[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return AttentionMetadata(
        block_size=BLOCK,
        positions=positions,
        slots=slots,
        query_starts=np.arange(0, tokens * len(contexts) + 1, tokens, dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=tables,
        prefixes=prefixes,
    )


def stored(cpu: torch.Tensor, layout: str) -> torch.Tensor:
    """The CPU's layout as the torch backend has it: [block, token, head, ...]."""
    order = {"key": (0, 3, 1, 2), "value": (0, 2, 1, 3), "scale": (0, 2, 1)}[layout]
    return cpu.permute(order)


@pytest.mark.parametrize("kind", KINDS)
def test_both_backends_store_the_same_values_and_attend_alike(
    kind: str, config: ModelConfig
) -> None:
    """Two blocks of a prefix, then 40 tokens of three sequences, two of them behind that prefix;
    one key is huge, one token is all zeros."""
    device = torch.device("cpu")
    prefix = step(32, [32])
    prefix = replace(prefix, block_tables=prefix.block_tables + 18, slots=prefix.slots + 18 * BLOCK)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    rows = [torch.randn(32, width), torch.randn(120, width)]
    rows[1][3, config.num_heads * config.head_dim] = 1e4
    rows[1][7] = 0
    results, pools = [], []
    for backend in (CpuBackend(config, 128), TorchBackend(config, 128, torch.float32, device)):
        kv = backend.allocate_kv(config, 20, BLOCK, KINDS[kind])[0]
        for metadata, qkv in zip((prefix, step(40, [40, 72, 90], shared=True)), rows, strict=True):
            plan = backend.prepare(metadata)
            query = backend.rope_and_store(qkv.clone(), kv, plan, None)
            result = backend.attention(query, kv, plan, None)
        results.append(result)
        pools.append(kv)
    ours, theirs = pools
    assert ours.key.dtype == theirs.key.dtype == KINDS[kind]
    for layout, a, b in (
        ("key", ours.key.float(), theirs.key.float()),
        ("value", ours.value.float(), theirs.value.float()),
    ):
        equal = (stored(a, layout) == b).float().mean()
        # Rotated keys may differ in their last bit, so one in thousands is rounded the other way.
        assert equal > 0.998 if layout == "key" else equal == 1, (layout, equal)
    torch.testing.assert_close(stored(ours.key_scale, "scale"), theirs.key_scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(stored(ours.value_scale, "scale"), theirs.value_scale)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=2e-2)
    assert (results[0] - results[1]).abs().mean() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_in_a_key_is_not_hidden(kind: str, config: ModelConfig) -> None:
    compiled = CpuBackend(config, 128)
    metadata = step(40, [40])
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(40, width)
    qkv[20, -1] = torch.nan
    kv = compiled.allocate_kv(config, 20, BLOCK, KINDS[kind])[0]
    plan = compiled.prepare(metadata)
    query = compiled.rope_and_store(qkv, kv, plan, None)
    out = compiled.attention(query, kv, plan, None)
    assert out[20:].isnan().any(dim=1).all()


@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.05), ("fp8", 0.25)])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_logits_stay_near_those_of_float_keys(
    kind: str, limit: float, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "torch":
        monkeypatch.setenv("HEADRACE_BACKEND", "torch")
    folder = tiny.write_checkpoint(tmp_path / "model", head_dim=32)
    tokens = [(7 * index) % 256 for index in range(100)]
    runners = [
        load_runner(
            EngineConfig(
                str(folder), kv_cache_dtype=dtype, kv_cache_memory_bytes=1 << 21, num_threads=1
            )
        )
        for dtype in ("auto", kind)
    ]
    exact, quantized = (runner.logits(tokens, 33) for runner in runners)
    difference = (exact - quantized).std() / exact.std()
    assert 1e-4 < difference < limit
    # 32 bytes and a scale against 128 bytes for each head.
    assert runners[1].num_blocks > 3.4 * runners[0].num_blocks
    assert runners[0].fingerprint != runners[1].fingerprint


def test_an_engine_with_8_bit_keys_finds_its_prefixes(tmp_path: Path) -> None:
    """Cached blocks hold 8 bits too: a prompt answered from them gets the same tokens."""
    folder = tiny.write_checkpoint(tmp_path / "model", head_dim=32)
    engine = Engine.load(
        EngineConfig(
            str(folder), kv_cache_dtype="int8", kv_cache_memory_bytes=1 << 21, num_threads=1
        )
    )
    prompt = [(11 * index) % 256 for index in range(64)]
    answers = []
    for index in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        sequence = Sequence(str(index), list(prompt), params)
        engine.add(sequence)
        while engine.has_unfinished:
            engine.step()
        answers.append(list(sequence.output_token_ids))
    assert answers[0] == answers[1] and len(answers[0]) == 8


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_many_decodes_behind_a_prefix_attend_as_plain_torch_does(
    kind: str | None, deterministic: bool, config: ModelConfig
) -> None:
    """40 rows of one new token: tiles of few queries, claimed with all heads of a token, over one
    to four chunks of keys; half of the rows behind a prefix of 96 keys. Large scores, so that the
    softmax's reference moves more than once."""
    device = torch.device("cpu")
    contexts = [1 + (37 * row) % 230 for row in range(20)] + [97 + 7 * row for row in range(20)]
    width = -(-max(contexts) // BLOCK)
    tables = np.random.default_rng(0).permutation(len(contexts) * width).astype(np.int32)
    tables = tables.reshape(len(contexts), width)
    tables[20:, :6] = tables[20, :6]
    last = np.array(contexts) - 1
    rows = np.arange(len(contexts))
    metadata = AttentionMetadata(
        block_size=BLOCK,
        positions=last.astype(np.int64),
        slots=tables[rows, last // BLOCK].astype(np.int64) * BLOCK + last % BLOCK,
        query_starts=np.arange(len(contexts) + 1, dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=tables,
        prefixes=(SharedPrefix(np.arange(20, 40), 6),),
    )
    dtype = torch.float32 if kind is None else KINDS[kind]
    compiled = CpuBackend(config, 512, deterministic)
    plain = TorchBackend(config, 512, torch.float32, device)
    ours = compiled.allocate_kv(config, tables.size, BLOCK, dtype)[0]
    theirs = plain.allocate_kv(config, tables.size, BLOCK, dtype)[0]
    for name, order in (("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3))):
        heads = torch.randn(getattr(theirs, name).shape) * (6 if name == "key" else 1)
        if kind is None:
            values = heads
        else:
            values, scales = quantize_heads(heads, dtype)
            getattr(theirs, f"{name}_scale").copy_(scales)
            getattr(ours, f"{name}_scale").copy_(scales.permute(0, 2, 1))
        getattr(theirs, name).copy_(values)
        getattr(ours, name).copy_(values.permute(order))
    qkv = torch.randn(len(contexts), (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    results = []
    for backend, kv in ((compiled, ours), (plain, theirs)):
        plan = backend.prepare(metadata)
        query = backend.rope_and_store(qkv.clone(), kv, plan, None)
        results.append(backend.attention(query, kv, plan, None))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_keys_are_int8_beside_int8_activations_unless_floats_are_asked_for(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", head_dim=32)

    def bytes_of(**settings: str) -> int:
        config = EngineConfig(str(folder), kv_cache_memory_bytes=1 << 20, num_threads=1, **settings)
        return load_runner(config).kv_bytes_per_token

    floats, bytes_ = bytes_of(), bytes_of(kv_cache_dtype="int8")
    assert floats > 3.4 * bytes_
    assert bytes_of(quantization="int8-dynamic") == bytes_
    assert bytes_of(quantization="int8-dynamic+head") == bytes_
    assert bytes_of(quantization="int8-dynamic", kv_cache_dtype="float") == floats
    assert bytes_of(quantization="int8") == floats


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    match = "kv_cache_dtype 'int4' is not one of auto, float, int8, fp8"
    with pytest.raises(EngineError, match=match):
        load_runner(EngineConfig(str(folder), kv_cache_dtype="int4"))
