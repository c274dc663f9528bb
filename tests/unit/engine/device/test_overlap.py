"""Overlapped steps: the next one is launched before the tokens of the one before are known. Many
steps with preemption and reuse of blocks and rows, which give what steps one by one give.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from delayed_device import LateRunner, freed_blocks_are_poison
from device_engines import Answers, answers, config, on_cpu, on_device, request, tokens_of
from reference_kernels import use_references
from toy import ToyTokenizer

from headrace.engine.engine import Engine
from headrace.engine.layers import triton_backend
from headrace.engine.runner import load_runner
from headrace.engine.sequence import Sequence


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("overlap") / "model", "qwen3")


TIGHT = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 13 * 16 * 1024,  # two layers, two heads of 32 floats
    "max_model_len": 64,
}


def crowd() -> list[Sequence]:
    """Thirty requests for eight places and too few blocks: preemption, reuse, all kinds of ends."""
    requests = []
    for index in range(30):
        prompt = [(index * 31 + 7 * k) % 250 for k in range(3 + 4 * (index % 9))]
        # An end that may come at any time: the scheduler must guess the length.
        params: dict[str, Any] = {"stop_token_ids": (tiny.IM_END,)}
        if index % 3:
            params |= {"temperature": 0.9, "top_p": 0.9, "logprobs": index % 2}
        if index % 5 == 2:
            params |= {"logit_bias": {50 + index: 5.0}, "min_tokens": 4}
        penalty = {"repetition_penalty": 1.2} if index % 4 == 1 else {}
        requests.append(
            request(str(index), prompt, 16 + index % 13, seed=index, **params, **penalty)
        )
    return requests


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_overlapped_steps_give_the_tokens_of_steps_one_by_one(
    model: Path, prefix_caching: bool
) -> None:
    """A CPU runner behind handles that compute late. 12 blocks of 16 tokens for eight sequences of
    up to 63 make the scheduler preempt; without prefix caching a freed block is NaN at once, while
    the step in flight has not even begun."""
    settings = {**TIGHT, "enable_prefix_caching": prefix_caching}
    expected = answers(on_cpu(model, **settings), crowd())
    chosen = config(model, **settings)
    runner = load_runner(chosen)
    late = LateRunner(runner)
    runner.steps_in_flight = 1
    engine = Engine.of(chosen, runner, ToyTokenizer())
    engine.runner = late
    engine._scheduler.predictor.average = 1.0  # admits too many
    for seq in crowd():
        engine.add(seq)
    found: Answers = {}
    if prefix_caching:
        preempted = collect(engine, found)
    else:
        with freed_blocks_are_poison(engine, list(runner._cache.layers)) as freed:
            preempted = collect(engine, found)
        assert len(freed) > 30
    assert tokens_of(found) == tokens_of(expected)
    assert late.most == 2 and preempted > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_rows_on_the_device_follow_preemption_and_reuse(
    model: Path, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same crowd through the device's own rows, buffers, graphs and sampler, on a device that
    is late, with the kernels' references in their place; after a warm-up, which leaves nothing."""
    settings = {**TIGHT, "enable_prefix_caching": prefix_caching}
    expected = answers(on_cpu(model, **settings), crowd())
    if not torch.cuda.is_available():
        use_references(monkeypatch)
    monkeypatch.setattr(triton_backend, "SHARED_TOKENS", 1)
    engine, _ = on_device(model, monkeypatch, **settings)
    engine.runner.warm_up()
    engine._scheduler.predictor.average = 1.0
    for seq in crowd():
        engine.add(seq)
    found: Answers = {}
    if prefix_caching:
        preempted = collect(engine, found)
    else:
        with freed_blocks_are_poison(engine, list(engine.runner._cache.layers)):
            preempted = collect(engine, found)
    assert tokens_of(found) == tokens_of(expected)
    assert preempted > 0
    for name, (_, _, logprobs) in expected.items():
        for ours, theirs in zip(found[name][2], logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def collect(engine: Engine, found: Answers) -> int:
    preempted = 0
    while engine.has_unfinished:
        output = engine.step()
        engine.check_integrity()
        preempted += output.stats.num_preemptions
        for seq in output.finished:
            failure = "" if seq.failure is None else seq.failure.code
            found[seq.request_id] = (seq.output_token_ids, failure, seq.logprobs)
    return preempted


def test_a_block_freed_too_early_would_be_noticed(model: Path) -> None:
    """The poison works: blocks given back while a step in flight reads them are NaN there."""
    chosen = config(model, enable_prefix_caching=False)
    runner = load_runner(chosen)
    runner.steps_in_flight = 1
    engine = Engine.of(chosen, runner, ToyTokenizer())
    engine.runner = LateRunner(runner)
    engine.add(request("read", [1, 2, 3], 6))
    with freed_blocks_are_poison(engine, list(runner._cache.layers)):
        for _ in range(3):
            engine.step()
        blocks = engine._scheduler.blocks
        blocks._pool.release(list(blocks._tables[1].blocks))
        found: Answers = {}
        while not found:
            for seq in engine.step().finished:
                found[seq.request_id] = (seq.output_token_ids, str(seq.failure), [])
            if len(found) == 0 and engine.num_unfinished == 0:
                break
    assert "non_finite_logits" in found["read"][1]
