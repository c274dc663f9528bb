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
from device_engines import answers, mixed_requests, on_cpu, on_device, request, tokens_of
from safetensors.torch import load_file, save_file
from triton_interpreter import repair

from headrace.engine.layers import triton_backend
from headrace.engine.sequence import Sequence


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("device") / "model", "qwen3")


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    with np.errstate(all="ignore"):  # exp(-inf) and its like are meant
        yield


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
    assert device.num_late > 5 or torch.cuda.is_available()  # it was not done at once


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
    monkeypatch.setattr(triton_backend, "SHARED_TOKENS", 16)
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


@pytest.mark.parametrize(
    ("family", "dtype", "length", "tolerance"),
    [
        ("mistral", "float32", 40, 1e-3),
        ("qwen2", "float16", 9, 0.05),
        ("llama", "bfloat16", 9, 0.5),
    ],
)
def test_logits_are_near_the_cpu_s_in_every_type(
    family: str,
    dtype: str,
    length: int,
    tolerance: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sliding window of 24 on 40 tokens, biases, and both 16-bit types, whose rounding (2**-11
    and 2**-8 of logits of up to 8) adds up over two layers."""
    if not torch.cuda.is_available():
        repair()
    folder = tiny.write_checkpoint(tmp_path / "model", family)
    prompt = [(13 * k) % 250 for k in range(length)]
    expected = on_cpu(folder).runner.logits(prompt)
    engine, _ = on_device(folder, monkeypatch, dtype=dtype)
    found = engine.runner.logits(prompt)
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < tolerance
