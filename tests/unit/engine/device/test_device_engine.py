"""The whole engine through the device's path: Triton kernels under the interpreter, graphs, steps
launched ahead, on a device that does nothing before it is waited for. Tokens are the CPU engine's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from delayed_device import (
    DelayedAccelerator,
    LateRunner,
    LaunchGuard,
    freed_blocks_are_poison,
)
from safetensors.torch import load_file, save_file
from toy import ToyTokenizer

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.layers import triton_backend
from headrace.engine.runner import load_runner
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence

Answers = dict[str, tuple[list[int], str, list[Any]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("device") / "model", "qwen3")


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    with np.errstate(all="ignore"):  # exp(-inf) and its like are meant
        yield


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
    """An engine on a late device whose launches may not wait."""
    device = DelayedAccelerator(warm)
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


def test_cold_chunked_and_sampled_requests_get_the_cpu_engine_s_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five requests in four places: prompts in pieces beside decodes, decodes of four, three, two
    rows in graphs of four and two, penalties counted on the device."""
    expected = answers(on_cpu(model), mixed_requests())
    engine, device = on_device(model, monkeypatch)
    found = answers(engine, mixed_requests())
    assert tokens_of(found) == tokens_of(expected)
    for name in ("changed", "free"):
        for ours, theirs in zip(found[name][2], expected[name][2], strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert device.num_late > 5  # it was not done at once


def test_a_shared_prefix_is_read_once_and_changes_no_token(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests on 32 shared tokens, and one without; in graphs for three and four rows."""
    prefix = [(5 * k) % 250 for k in range(32)]

    def requests() -> list[Sequence]:
        tails = ([1], [2, 3], [4, 5, 6])
        rest = [request(str(len(tail)), [*prefix, *tail], 3, seed=1) for tail in tails]
        return [*rest, request("alone", [8, 9], 2)]

    expected = answers(on_cpu(model, max_num_batched_tokens=64), requests())
    monkeypatch.setattr(triton_backend, "SHARED_TOKENS", 32)
    calls = []
    shared = triton_backend.shared_prefix_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[6].prefix_lens.clone())
        return shared(*args, **kwargs)

    monkeypatch.setattr(triton_backend, "shared_prefix_attention", counted)
    engine, _ = on_device(model, monkeypatch, max_num_batched_tokens=64)
    assert tokens_of(answers(engine, requests())) == tokens_of(expected)
    together = [sum(1 for keys in lens.tolist() if keys == 32) for lens in calls]
    assert max(together) == 3


def test_eager_steps_and_steps_one_at_a_time_give_the_same_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(on_cpu(model), mixed_requests()[2:4])
    engine, _ = on_device(model, monkeypatch, enforce_eager=True, async_scheduling=False)
    assert tokens_of(answers(engine, mixed_requests()[2:4])) == tokens_of(expected)
    assert "none (enforce_eager)" in str(engine.runner.info)


def test_a_sequence_with_nan_fails_alone_though_its_next_step_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding of id 200 is NaN: the second prompt fails; its next step is under way by then
    and is thrown away. The third takes over its blocks. Graphs are warmed up with padding only."""
    folder = tiny.write_checkpoint(tmp_path / "model", "qwen3")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][200] = torch.nan
    save_file(weights, folder / "model.safetensors")

    def requests() -> list[Sequence]:
        prompts = {"well": [1, 2, 3], "sick": [4, 200], "later": [7, 8]}
        return [request(name, prompt, 3) for name, prompt in prompts.items()]

    expected = tokens_of(answers(on_cpu(folder, max_num_seqs=2), requests()))
    engine, _ = on_device(folder, monkeypatch, warm=True, max_num_seqs=2)
    assert tokens_of(answers(engine, requests())) == expected
    assert expected["sick"][1] == "non_finite_logits" and not expected["later"][1]


def test_deterministic_answers_do_not_depend_on_the_batch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request alone, and beside two others and in pieces: its log-probabilities are the
    same numbers, not only near."""
    prompt = [(11 * k) % 250 for k in range(20)]

    def asked() -> Sequence:
        return request("asked", prompt, 3, seed=5, temperature=0.7, top_p=0.8, logprobs=2)

    engine, _ = on_device(model, monkeypatch, deterministic=True)
    alone = answers(engine, [asked()])
    others = [request("a", [1, 2, 3, 4, 5, 6, 7], 4), request("b", [9], 4, seed=3, temperature=1.0)]
    beside = answers(engine, [*others, asked()])
    assert beside["asked"] == alone["asked"]
    assert "batch-invariant" in str(engine.runner.info)


# --- overlap on the CPU's own kernels: many steps, in no time --------------------------------


def crowd() -> list[Sequence]:
    """Thirty requests for eight places and too few blocks: preemption, reuse, all kinds of ends."""
    requests = []
    for index in range(30):
        prompt = [(index * 31 + 7 * k) % 250 for k in range(3 + 4 * (index % 9))]
        # An end that may come at any time: the scheduler must guess the length.
        params: dict[str, Any] = {"stop_token_ids": (tiny.IM_END,)}
        if index % 3:
            params |= {"temperature": 0.9, "top_p": 0.9}
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
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": prefix_caching,
        "kv_cache_memory_bytes": 13 * 16 * 1024,  # two layers, two heads of 32 floats
        "max_model_len": 64,
    }
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
