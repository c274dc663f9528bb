"""Prompts that torch attends instead of our kernel: which rows, the same results, no wait for the
device, and the lengths from which it pays, measured."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from attention_cases import paged_batch
from device_engines import needs_interpreter, on_cpu, on_device, request, tokens_of
from kernel_support import DEVICE, assert_close, empty_is_poison
from reference_kernels import use_references
from triton_interpreter import repair

from headrace.engine import prefill_attention_choice
from headrace.engine.accelerator import HostAccelerator
from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.kv.cache import allocate
from headrace.engine.layers import triton_backend
from headrace.engine.layers.backend import LayerKV
from headrace.engine.layers.prompt_attention import (
    MOST_KEYS,
    NEVER,
    PromptLengths,
    PromptRow,
    copied_bytes,
    divide,
)
from headrace.engine.layers.triton_backend import TritonBackend, TritonPlan
from headrace.engine.loading.random_weights import random_checkpoint
from headrace.engine.prefill_attention_choice import measured, prompt_lengths
from headrace.engine.sequence import Sequence
from headrace.kernels.paged_attention import paged_attention_reference
from headrace.kernels.shared_prefix_attention import PrefixGroups

FORCED = PromptLengths(fresh=1, behind=1)


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    with np.errstate(all="ignore"):  # exp(-inf) and its like are meant
        yield


def rows_of(lengths: list[tuple[int, int]]) -> tuple[Any, Any]:
    queries, keys = np.array(lengths, dtype=np.int32).T
    return np.concatenate(([0], np.cumsum(queries))).astype(np.int32), keys.copy()


def test_long_rows_are_torchs_and_the_bounds_are_of_the_others() -> None:
    """Prompts from 8 tokens on, chunks behind context from 16 on; the rest is bounded by 15 new
    tokens and 40 keys."""
    starts, keys = rows_of([(1, 40), (8, 8), (7, 7), (15, 30), (16, 90), (1, 1)])
    found = divide(starts, keys, PromptLengths(fresh=8, behind=16))
    assert found.prompts == (PromptRow(1, 1, 9, 8), PromptRow(4, 31, 47, 90))
    assert found.context_lens.tolist() == [40, 0, 7, 30, 0, 1]
    assert found.context_lens.dtype == np.int32
    assert (found.longest_query, found.longest) == (15, 40)
    assert keys.tolist() == [40, 8, 7, 30, 90, 1]


def test_nothing_is_torchs_unless_it_was_chosen() -> None:
    starts, keys = rows_of([(1, 40), (4096, 4096)])
    found = divide(starts, keys, PromptLengths())
    assert found.prompts == () and found.context_lens is keys
    assert (found.longest_query, found.longest) == (4096, 4096)


def test_single_tokens_and_contexts_beyond_what_is_set_aside_stay_ours() -> None:
    starts, keys = rows_of([(1, 1), (1, 900), (64, MOST_KEYS + 1), (64, MOST_KEYS)])
    found = divide(starts, keys, FORCED)
    assert [row.row for row in found.prompts] == [3]
    assert (found.longest_query, found.longest) == (64, MOST_KEYS + 1)


def test_a_step_of_prompts_alone_leaves_the_kernel_nothing() -> None:
    found = divide(*rows_of([(5, 5), (2, 30)]), FORCED)
    assert len(found.prompts) == 2
    assert (found.longest_query, found.longest) == (0, 0)


def test_the_copies_of_a_row_are_counted() -> None:
    """Qwen3-8B's shape: 8 KV heads and 32 heads of 128, two bytes each. 16,384 keys and values are
    64 MiB, 2,048 tokens' results 16 MiB; a longer context is never copied."""
    config = random_checkpoint(
        tiny.tiny_config(
            "qwen3",
            num_hidden_layers=1,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        )
    ).config
    for keys in (MOST_KEYS, 10 * MOST_KEYS):
        assert copied_bytes(2048, keys, config, torch.bfloat16) == 80 << 20


BATCHES = {
    "mixed": [(1, 33), (25, 25), (1, 0), (7, 71), (16, 16), (2, 50), (1, 1)],
    "prompts_alone": [(3, 3), (20, 20), (9, 41)],
    "decodes_alone": [(1, 5), (1, 30)],
}


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "lengths", "dtype", "heads", "head_dim"),
    [
        ("mixed", FORCED, torch.float32, (4, 2), 64),
        ("mixed", PromptLengths(fresh=20), torch.bfloat16, (7, 1), 80),
        ("mixed", PromptLengths(behind=7), torch.float16, (2, 2), 128),
        ("prompts_alone", FORCED, torch.float32, (16, 1), 64),
        ("decodes_alone", FORCED, torch.float32, (4, 2), 64),
    ],
)
def test_every_row_gets_what_the_formula_says(
    name: str,
    lengths: PromptLengths,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    """Prompts, chunks, decodes and a padding row in one step; what no sequence has written holds
    NaN, in the cache and in what is allocated."""
    repair()
    q_heads, kv_heads = heads
    batch = paged_batch(
        BATCHES[name], q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16,
        dtype=dtype,
    )  # fmt: skip
    config = random_checkpoint(
        tiny.tiny_config(
            num_hidden_layers=1,
            num_attention_heads=q_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
        )
    ).config
    backend = TritonBackend(config, 128, dtype, DEVICE)
    with empty_is_poison(), torch.inference_mode():
        found = backend.attention(
            batch.q, LayerKV(batch.k_cache, batch.v_cache), plan_of(batch, lengths), None
        )
    expected = paged_attention_reference(*batch.tensors, scale=batch.scale)
    assert_close(found, expected.flatten(1), dtype)


@needs_interpreter
def test_decodes_share_a_prefix_beside_a_member_that_is_torchs() -> None:
    """Rows 0, 2 and 3 share 32 keys; row 2 is in prefill and its context is 0 for the kernel."""
    shared = [([0, 2, 3], 32)]
    batch = paged_batch(
        [(1, 40), (5, 5), (9, 41), (1, 33)], q_heads=4, kv_heads=2, head_dim=64, block_size=16,
        dtype=torch.float32, shared=shared,
    )  # fmt: skip
    backend = TritonBackend(
        random_checkpoint(tiny.tiny_config(num_hidden_layers=1, head_dim=64)).config,
        *(128, torch.float32, DEVICE),
    )

    def tensor(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    groups = PrefixGroups(tensor(0, 3), tensor(0, 2, 3), tensor(32, 0, 32, 32), 32)
    plan = plan_of(batch, FORCED, groups)
    assert [row.row for row in plan.prompts] == [1, 2]
    with empty_is_poison(), torch.inference_mode():
        found = backend.attention(batch.q, LayerKV(batch.k_cache, batch.v_cache), plan, None)
    expected = paged_attention_reference(*batch.tensors, scale=batch.scale)
    assert_close(found, expected.flatten(1), torch.float32)


def plan_of(batch: Any, lengths: PromptLengths, groups: PrefixGroups | None = None) -> TritonPlan:
    rows = divide(batch.query_start_loc.numpy(), batch.seq_lens.numpy(), lengths)
    nothing = torch.zeros(0, dtype=torch.int64)
    return TritonPlan(
        positions=nothing,
        slots=nothing,
        query_starts=batch.query_start_loc,
        context_lens=torch.from_numpy(rows.context_lens),
        block_tables=batch.block_tables,
        max_query_len=rows.longest_query,
        max_context_len=rows.longest,
        groups=groups,
        prompts=rows.prompts,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("prompts") / "model", "qwen3")


def waves() -> list[list[Sequence]]:
    """Fresh prompts and one in pieces; then others that begin with what the first have left in the
    cache, while those decode."""
    prompt = [(7 * k) % 250 for k in range(40)]
    first = [
        request("fresh", [3, 1, 4, 1, 5], 4),
        request("pieces", prompt, 3, logprobs=2),
        request("single", [9], 3, seed=1, temperature=0.8, top_p=0.9),
    ]
    return [first, [request("hit", [*prompt[:32], 8, 8, 8], 2, logprobs=2)]]


def answers_of_waves(engine: Any) -> Any:
    found = {}
    first, second = waves()
    for seq in first:
        engine.add(seq)
    steps = 0
    while engine.has_unfinished:
        for seq in engine.step().finished:
            found[seq.request_id] = (seq.output_token_ids, str(seq.failure or ""), seq.logprobs)
        engine.check_integrity()
        steps += 1
        if steps == 2:
            for seq in second:
                engine.add(seq)
    return found


@pytest.mark.parametrize("kernels", ["interpreted", "references"])
def test_the_engine_s_tokens_are_the_cpu_engine_s(
    kernels: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the late device, whose launches and submitted work may not wait: every row with more
    than one new token is torch's, prompts, chunks and the rest behind a prefix hit."""
    if kernels == "references":
        if torch.cuda.is_available():
            pytest.skip("the kernels themselves run here")
        use_references(monkeypatch)
    expected = answers_of_waves(on_cpu(model))
    taken: list[PromptRow] = []
    attend = triton_backend.attend_prompts

    def counted(*args: Any) -> None:
        taken.extend(args[3])
        attend(*args)

    monkeypatch.setattr(triton_backend, "attend_prompts", counted)
    engine, device = on_device(model, monkeypatch, prefill_attention="sdpa")
    found = answers_of_waves(engine)
    assert tokens_of(found) == tokens_of(expected)
    for name in ("pieces", "hit"):
        for ours, theirs in zip(found[name][2], expected[name][2], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    seen = {(row.end - row.start, row.keys) for row in taken}
    assert (5, 5) in seen  # a prompt
    assert any(keys == 40 and tokens < 40 for tokens, keys in seen)  # the last piece of one
    assert (3, 35) in seen  # behind 32 cached tokens
    assert "torch SDPA for prompts" in str(engine.runner.info)
    assert device.num_late > 5 or torch.cuda.is_available()


@needs_interpreter
def test_logits_of_one_prompt_are_near_the_cpu_s(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path that may wait builds its plan itself."""
    prompt = [(13 * k) % 250 for k in range(21)]
    expected = on_cpu(model).runner.logits(prompt)
    use_references(monkeypatch)
    engine, _ = on_device(model, monkeypatch, prefill_attention="sdpa")
    assert float((engine.runner.logits(prompt) - expected).abs().max()) < 1e-3


@needs_interpreter
@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3", {"deterministic": True}, "deterministic=True"),
        ("mistral", {}, "sliding windows"),
    ],
)
def test_where_torchs_attention_would_be_wrong_it_is_refused_or_left_alone(
    family: str, settings: dict[str, Any], message: str
) -> None:
    checkpoint = random_checkpoint(tiny.tiny_config(family))
    backend = TritonBackend(checkpoint.config, 64, torch.float32, torch.device("cpu"))
    monitor = (HostAccelerator(), backend, checkpoint.config, None)
    forced = EngineConfig("m", prefill_attention="sdpa", **settings)
    with pytest.raises(EngineError, match=message):
        prompt_lengths(*monitor, forced, 64)  # type: ignore[arg-type]
    for choice in ("auto", "triton"):
        config = EngineConfig("m", prefill_attention=choice, **settings)  # type: ignore[arg-type]
        assert prompt_lengths(*monitor, config, 64) == PromptLengths()  # type: ignore[arg-type]


@needs_interpreter
def test_the_lengths_are_measured_on_the_pool_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts of 4, 8, 16 and 32 tokens; torch's attention takes 10 whatever the length, ours a
    tick a token of the step, but chunks of 16 behind 48 are the longest that fit 64 keys and ours
    wins there. Each is run once, under the interpreter, on a pool of 20 blocks."""
    monkeypatch.setattr(prefill_attention_choice, "LENGTHS", (4, 8, 16, 32))
    checkpoint = random_checkpoint(tiny.tiny_config("llama"))
    config = EngineConfig(
        "m", max_num_seqs=2, max_num_batched_tokens=32, kv_cache_memory_bytes=21 * 8192
    )
    backend = TritonBackend(checkpoint.config, 64, torch.float32, torch.device("cpu"))
    cache = allocate(config, checkpoint.config, backend, torch.float32, torch.device("cpu"))
    device, seen = HostAccelerator(), []
    attention = backend.attention

    def watched(query: torch.Tensor, kv: LayerKV, plan: TritonPlan, window: int | None) -> Any:
        seen.append((len(query), plan))
        return attention(query, kv, plan, window)

    def seconds(work: Callable[[], None]) -> float:
        work()
        tokens, plan = seen[-1]
        keys = plan.prompts[0].keys if plan.prompts else plan.max_context_len
        rows = len(plan.query_starts) - 1
        if plan.prompts:
            return 1e-5 * (10 if keys * rows == tokens else 100)
        return 1e-5 * tokens / rows

    monkeypatch.setattr(backend, "attention", watched)
    monkeypatch.setattr(device, "seconds", seconds)
    with caplog.at_level(logging.INFO, "headrace.engine"):
        found = measured(device, backend, checkpoint.config, cache, config, 64)
    assert found == PromptLengths(fresh=16, behind=NEVER)
    shapes = [(len(plan.query_starts) - 1, tokens) for tokens, plan in seen[::2]]
    assert shapes == [(2, 8), (2, 16), (2, 32), (1, 32), (2, 8), (2, 16), (2, 32)]
    assert "prompts, ours and torch's in microseconds: 4: 40 and 100" in caplog.text
    assert "16: 160 and 100" in caplog.text and "16: 160 and 1000" in caplog.text


def test_what_is_chosen_is_said_in_words() -> None:
    assert str(PromptLengths(512, 2048)) == (
        "torch SDPA for prompts of 512 and chunks behind context of 2048 tokens or more"
    )
    assert str(PromptLengths(behind=1024)) == (
        "torch SDPA for chunks behind context of 1024 tokens or more"
    )
    assert str(PromptLengths()) == "no torch SDPA"
