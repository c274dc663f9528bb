"""Both backends against a plain attention that knows no blocks: random mixes of decodes and chunks,
head counts, windows and shared prefixes; stale and NaN-filled slots must not show."""

from dataclasses import dataclass

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from headrace.engine.layers.backend import (
    AttentionMetadata,
    Backend,
    HeadNorms,
    LayerKV,
    SharedPrefix,
)
from headrace.engine.layers.cpu_backend import CpuBackend
from headrace.engine.layers.rope import rope_table
from headrace.engine.layers.torch_backend import TorchBackend, merge_attention
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.registry import read_config

MAX_LEN = 400


def config(heads: int, kv_heads: int, head_dim: int, qk_norm: bool = False) -> ModelConfig:
    return read_config(
        tiny.tiny_config(
            "qwen3" if qk_norm else "llama",
            hidden_size=heads * head_dim,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
        )
    )


def backend_of(name: str, model: ModelConfig) -> Backend:
    if name == "cpu":
        return CpuBackend(model, MAX_LEN)
    return TorchBackend(model, MAX_LEN, torch.float32, torch.device("cpu"))


@dataclass
class Case:
    """Rows of (computed before, computed now), the first `group` of which share `shared` blocks."""

    rows: list[tuple[int, int]]
    block_size: int = 16
    group: int = 0
    shared: int = 0


def tables_of(case: Case, generator: np.random.Generator) -> list[list[int]]:
    """Block ids of each row, scattered over the pool; block 0 stays unused."""
    free = list(1 + generator.permutation(400))
    common = [int(free.pop()) for _ in range(case.shared)]
    tables = []
    for index, (before, now) in enumerate(case.rows):
        table = list(common) if index < case.group else []
        while len(table) * case.block_size < before + now:
            table.append(int(free.pop()))
        tables.append(table)
    return tables


def metadata_of(
    case: Case, rows: list[tuple[int, int]], tables: list[list[int]], prefixes: bool
) -> AttentionMetadata:
    size = case.block_size
    positions = np.concatenate([np.arange(before, before + now) for before, now in rows])
    row_of = np.repeat(np.arange(len(rows)), [now for _, now in rows])
    padded = np.zeros((len(rows), max(map(len, tables))), dtype=np.int32)
    for index, table in enumerate(tables):
        padded[index, : len(table)] = table
    slots = padded[row_of, positions // size].astype(np.int64) * size + positions % size
    starts = np.concatenate(([0], np.cumsum([now for _, now in rows])))
    groups = [SharedPrefix(np.arange(case.group), case.shared)] if prefixes and case.group else []
    return AttentionMetadata(
        block_size=size,
        positions=positions.astype(np.int64),
        slots=slots,
        query_starts=starts.astype(np.int32),
        context_lens=np.array([before + now for before, now in rows], dtype=np.int32),
        block_tables=padded,
        prefixes=groups,
    )


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, model: ModelConfig) -> Tensor:
    """x [positions from 0, heads, head_dim]."""
    cos, sin = rope_table(model.rope, model.head_dim, len(x))
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def plain_attention(
    qkv: Tensor, model: ModelConfig, window: int | None, norms: HeadNorms | None
) -> Tensor:
    """The whole sequence at once, float64: [tokens, heads * head_dim]."""
    heads = qkv.double().view(len(qkv), -1, model.head_dim)
    q, k, v = heads.split((model.num_heads, model.num_kv_heads, model.num_kv_heads), dim=1)
    if norms is not None:
        q = normed(q, norms.query.double(), model.rms_norm_eps)
        k = normed(k, norms.key.double(), model.rms_norm_eps)
    q, k = rotated(q, model), rotated(k, model)
    k, v = (x.repeat_interleave(model.group_size, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * model.head_dim**-0.5
    row, column = torch.arange(len(q))[:, None], torch.arange(len(q))[None]
    hidden = column > row
    if window is not None:
        hidden |= column <= row - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1).float()


CASES = {
    "decodes": Case([(0, 1), (1, 1), (15, 1), (16, 1), (200, 1), (333, 1)]),
    "one long chunk": Case([(0, 300)]),
    "chunks and decodes": Case([(40, 1), (0, 37), (64, 64), (17, 5), (99, 1), (130, 50)]),
    "blocks of 32": Case([(40, 1), (0, 37), (96, 33)], block_size=32),
    "a group of decodes": Case([(130, 1), (100, 1), (97, 1), (200, 1)], group=3, shared=6),
    "a group of chunks": Case([(96, 40), (160, 1), (100, 9), (0, 20)], group=3, shared=6),
    "a group of one block": Case([(16, 1), (17, 1)], group=2, shared=1),
}
SHAPES = {
    "GQA 3": config(9, 3, 64),
    "MHA": config(2, 2, 32),
    "MQA 4": config(4, 1, 16),
    "GQA 7": config(7, 1, 128),
    "odd width": config(2, 1, 80),
    "head norms": config(4, 2, 32, qk_norm=True),
}


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_paged_attention_equals_plain_attention(
    kind: str, name: str, shape: str, window: int | None
) -> None:
    """Keys and values go in through `rope_and_store` in two steps (what was computed before, then
    this step), so rope, store and attention are checked together. Tolerance 2e-5 on values near 1:
    base-2 exponentials with a relative error of 2e-7 and sums of up to 383 terms."""
    case, model = CASES[name], SHAPES[shape]
    generator = np.random.default_rng(len(name) + model.num_heads)
    torch.manual_seed(int(generator.integers(1 << 30)))
    backend = backend_of(kind, model)
    kv = backend.allocate_kv(model, 401, case.block_size, torch.float32)[0]
    kv.key.fill_(torch.nan)
    kv.value.fill_(torch.nan)
    norms = None
    if model.qk_norm:
        norms = HeadNorms(torch.rand(model.head_dim) + 0.5, torch.rand(model.head_dim) + 0.5)
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    tables = tables_of(case, generator)
    common = torch.randn(case.shared * case.block_size, width)
    sequences = []
    for index, (before, now) in enumerate(case.rows):
        values = torch.randn(before + now, width)
        if index < case.group:
            values[: len(common)] = common
        sequences.append(values)

    past = [(0, before) for before, _ in case.rows if before]
    past_tables = [table for table, (before, _) in zip(tables, case.rows, strict=True) if before]
    if past:
        plan = backend.prepare(metadata_of(case, past, past_tables, prefixes=False))
        stored = torch.cat(
            [
                values[:before].clone()
                for values, (before, _) in zip(sequences, case.rows, strict=True)
            ]
        )
        backend.rope_and_store(stored, kv, plan, norms)
    plan = backend.prepare(metadata_of(case, case.rows, tables, prefixes=True))
    step = torch.cat(
        [values[before:] for values, (before, _) in zip(sequences, case.rows, strict=True)]
    )
    query = backend.rope_and_store(step.clone(), kv, plan, norms)
    out = backend.attention(query, kv, plan, window)
    wanted = torch.cat(
        [
            plain_attention(values, model, window, norms)[before:]
            for values, (before, _) in zip(sequences, case.rows, strict=True)
        ]
    )
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=0)


def test_a_group_s_keys_are_read_through_one_table_only() -> None:
    """The second row's table is wrong where the group covers it; only its own blocks are read."""
    model = SHAPES["GQA 3"]
    backend = CpuBackend(model, MAX_LEN)
    kv = backend.allocate_kv(model, 50, 16, torch.float32)[0]
    kv.key.normal_()
    kv.value.normal_()
    case = Case([(64, 1), (70, 1)], group=2, shared=4)
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    query = torch.randn(2, 15 * 64)

    def attend(second: list[int]) -> Tensor:
        plan = backend.prepare(metadata_of(case, case.rows, [tables[0], second], prefixes=True))
        return backend.attention(query, kv, plan, None)

    assert torch.equal(attend(tables[1]), attend([9, 9, 9, 9, 6]))
    assert not torch.equal(attend(tables[1]), attend([1, 2, 3, 4, 7]))


@pytest.mark.parametrize("where", ["key", "value"])
def test_nan_reaches_the_row_that_reads_it_and_no_other(where: str) -> None:
    model = SHAPES["GQA 3"]
    backend = CpuBackend(model, MAX_LEN)
    kv = backend.allocate_kv(model, 50, 16, torch.float32)[0]
    kv.key.normal_()
    kv.value.normal_()
    poisoned: Tensor = getattr(kv, where)
    poisoned[7].fill_(torch.nan)
    case = Case([(20, 1), (40, 1), (5, 1)])
    plan = backend.prepare(metadata_of(case, case.rows, [[1, 2], [3, 7, 4], [5]], prefixes=False))
    out = backend.attention(torch.randn(3, 15 * 64), kv, plan, None)
    assert out.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("kind", ["cpu", "torch"])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_norms_and_gating_equal_their_formulas(kind: str, rows: int) -> None:
    torch.manual_seed(rows)
    backend = backend_of(kind, SHAPES["MHA"])
    x, delta, weight = torch.randn(rows, 72), torch.randn(rows, 72), torch.rand(72)
    wanted = normed((x + delta).double(), weight.double(), 1e-5).float()
    torch.testing.assert_close(backend.rms_norm(x + delta, weight, 1e-5), wanted)
    changed = x.clone()
    torch.testing.assert_close(backend.add_rms_norm(changed, delta, weight, 1e-5), wanted)
    assert torch.equal(changed, x + delta)
    gate_up = 4 * torch.randn(rows, 90)
    gate_up[0, :6] = torch.tensor([-200.0, -90.0, -88.0, 0.0, 90.0, 200.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = (gate * torch.sigmoid(gate) * up).float()
    torch.testing.assert_close(backend.silu_mul(gate_up), wanted, atol=1e-6, rtol=2e-6)


def test_merging_is_associative_and_takes_an_empty_side() -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(5, 8), 3 * torch.randn(5)) for _ in range(3)]
    (a, lse_a), (b, lse_b), (c, lse_c) = parts
    left = merge_attention(*merge_attention(a, lse_a, b, lse_b, torch.float32), c, lse_c, a.dtype)
    right = merge_attention(a, lse_a, *merge_attention(b, lse_b, c, lse_c, a.dtype), a.dtype)
    torch.testing.assert_close(left[0], right[0])
    torch.testing.assert_close(left[1], right[1])
    nothing = torch.full((5,), -torch.inf)
    torch.testing.assert_close(merge_attention(a, lse_a, b, nothing, a.dtype)[0], a)


def test_threads_share_the_work_and_change_nothing() -> None:
    """The same launch on one and on two threads: the same bits."""
    model = SHAPES["GQA 3"]
    case = CASES["a group of chunks"]
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(5)
            backend = CpuBackend(model, MAX_LEN)
            kv = backend.allocate_kv(model, 401, 16, torch.float32)[0]
            kv.key.normal_()
            kv.value.normal_()
            tables = tables_of(case, np.random.default_rng(3))
            plan = backend.prepare(metadata_of(case, case.rows, tables, prefixes=True))
            query = backend.rope_and_store(torch.randn(70, 15 * 64), kv, plan, None)
            outputs.append(backend.attention(query, kv, plan, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outputs)


def test_layouts_are_the_backend_s_own() -> None:
    model = SHAPES["GQA 3"]

    def shapes(kv: LayerKV) -> tuple[list[int], list[int]]:
        return list(kv.key.shape), list(kv.value.shape)

    cpu = backend_of("cpu", model).allocate_kv(model, 4, 16, torch.float32)[1]
    assert shapes(cpu) == ([4, 3, 64, 16], [4, 3, 16, 64])
    plain = backend_of("torch", model).allocate_kv(model, 4, 16, torch.float32)[1]
    assert shapes(plain) == ([4, 16, 3, 64], [4, 16, 3, 64])
