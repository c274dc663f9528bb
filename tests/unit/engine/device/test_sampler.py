"""The sampler against a plain reference that sorts the whole vocabulary of one row at a time."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.engine import sampler as sampler_module
from headrace.engine.batch import NewRow, ScheduledBatch
from headrace.engine.input_batch import InputBatch
from headrace.engine.random_bits import uniforms
from headrace.engine.sampler import NUM_CANDIDATES, Sampled, Sampler
from headrace.engine.sampling_params import SamplingParams

VOCAB = 1000


@dataclasses.dataclass(frozen=True)
class Row:
    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 3)
    output: tuple[int, ...] = ()
    seed: int = 0
    sample_index: int = 0
    banned: tuple[int, ...] = ()


def sample(rows: list[Row], logits: Tensor, bitmask: Tensor | None = None) -> Sampled:
    batch = InputBatch(len(rows), 4096, 16, dummy_block=0)
    added = [
        NewRow(
            index,
            (*row.prompt, *row.output),
            len(row.prompt),
            row.params,
            row.seed,
            row.sample_index,
            row.banned,
        )
        for index, row in enumerate(rows)
    ]
    batch.update(ScheduledBatch(0, added, (), ()))
    slots = np.array([batch._slots[index] for index in range(len(rows))])
    return Sampler(batch).sample(logits.clone(), slots, bitmask)


def adjusted(row: Row, logits: Tensor) -> Tensor:
    """Bias, penalties and bans by their definitions, float64, one token after the other."""
    values = logits.double().clone()
    for token, bias in row.params.logit_bias.items():
        values[token] += bias
    for token in set(row.prompt + row.output):
        penalty = row.params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        count = row.output.count(token)
        values[token] -= row.params.frequency_penalty * count
        values[token] -= row.params.presence_penalty * (count > 0)
    if len(row.output) < row.params.min_tokens:
        values[list(row.banned)] = -math.inf
    return values


def kept_distribution(row: Row, logits: Tensor) -> Tensor:
    """Probabilities over the whole vocabulary after all filters, float64."""
    params = row.params
    scaled = adjusted(row, logits) / params.temperature
    keep = torch.ones(len(scaled), dtype=torch.bool)
    if params.top_k:
        keep &= scaled >= scaled.sort(descending=True).values[min(params.top_k, len(scaled)) - 1]
    if params.top_p < 1:
        probabilities = scaled.masked_fill(~keep, -math.inf).softmax(0)
        order = probabilities.argsort(descending=True)
        before = probabilities[order].cumsum(0) - probabilities[order]
        last = order[int((before < params.top_p).sum()) - 1]
        keep &= scaled >= scaled[last]
    if params.min_p:
        probabilities = scaled.softmax(0)
        keep &= probabilities >= params.min_p * probabilities.max()
    return scaled.masked_fill(~keep, -math.inf).softmax(0)


def reference(row: Row, logits: Tensor) -> int:
    if row.params.temperature == 0:
        return int(adjusted(row, logits).argmax())
    key = (row.seed, row.sample_index, len(row.prompt) + len(row.output))
    noise = uniforms(*(np.array([part], dtype=np.uint64) for part in key))[0]
    running = kept_distribution(row, logits).cumsum(0)
    return int((running > noise * running[-1]).int().argmax())


def peaked(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    """Logits as a language model's: a few high, a long tail."""
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(rows, vocab, generator=generator)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k beyond the candidates": {"top_k": 400, "temperature": 2.0},
    "top_k beyond the vocabulary": {"top_k": 5000},
    "top_p": {"top_p": 0.8},
    "top_p near 0": {"top_p": 1e-6},
    "top_p wider than the candidates": {"top_p": 0.99, "temperature": 4.0},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "min_p wider than the candidates": {"min_p": 1e-6, "temperature": 3.0},
    "all filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.7, "temperature": 0.0},
    "repetition below 1": {"repetition_penalty": 0.6, "temperature": 0.8, "top_p": 0.9},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    "negative penalties": {"presence_penalty": -2.0, "frequency_penalty": -2.0, "top_k": 3},
    "bias": {"logit_bias": {4: 30.0, 9: 29.0, 17: -100.0}, "temperature": 0.5},
    "everything": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {7: 4.0},
        "min_tokens": 90,
    },
}


@pytest.mark.parametrize("vocab", [VOCAB, 64 * 300, 77, 20_001])
@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_picks_the_reference_s_token(name: str, vocab: int) -> None:
    """32 rows with as many seeds, histories with repeats; float32 against float64, so a token may
    differ only if the noise falls within rounding of a border: none does here."""
    generator = np.random.default_rng(vocab)
    params = SamplingParams(**SETTINGS[name])
    if params.logit_bias and max(params.logit_bias) >= vocab:
        pytest.skip("the bias names ids beyond this vocabulary")
    rows = [
        Row(
            params,
            prompt=tuple(generator.integers(0, vocab, 20).tolist()),
            output=tuple(generator.integers(0, min(vocab, 9), 15).tolist()),
            seed=1000 + index,
            banned=(5, 6),
        )
        for index in range(32)
    ]
    logits = peaked(32, vocab, seed=len(name))
    found = sample(rows, logits)
    assert not found.failures
    wanted = [reference(row, line) for row, line in zip(rows, logits, strict=True)]
    assert found.token_ids.tolist() == wanted


def test_all_settings_in_one_batch_pick_what_they_pick_alone() -> None:
    rows = [
        Row(SamplingParams(**settings), output=(1, 5, 5), seed=index, banned=(8,))
        for index, settings in enumerate(SETTINGS.values())
    ]
    logits = peaked(len(rows), seed=3)
    together = sample(rows, logits).token_ids.tolist()
    alone = [
        int(sample([row], logits[index : index + 1]).token_ids[0]) for index, row in enumerate(rows)
    ]
    assert together == alone


@pytest.mark.parametrize("name", ["temperature", "top_p", "all filters", "hot", "min_p"])
def test_a_seeded_row_draws_the_same_in_any_company(name: str) -> None:
    """Alone, and in batches of 2 and 17 at every place."""
    row = Row(SamplingParams(**SETTINGS[name]), seed=2**63 + 11, sample_index=2)
    line = peaked(1, seed=9)
    alone = sample([row], line).token_ids[0]
    others = [
        Row(SamplingParams(**settings), seed=index)
        for index, settings in enumerate(SETTINGS.values())
    ]
    for size in (2, 17):
        for place in range(size):
            rows = others[: size - 1]
            rows.insert(place, row)
            logits = peaked(size, seed=size)
            logits[place] = line
            assert sample(rows, logits).token_ids[place] == alone


def test_drawn_frequencies_are_the_kept_distribution() -> None:
    """The n answers of one request: 4,000 draws of a row with a nucleus of a few tokens. Each
    frequency within 5 standard deviations of its probability."""
    params = SamplingParams(temperature=1.2, top_p=0.9)
    line = peaked(1, 200, seed=21)
    draws = 4000
    rows = [Row(params, seed=5, sample_index=index) for index in range(draws)]
    tokens = sample(rows, line.expand(draws, -1)).token_ids
    expected = kept_distribution(rows[0], line[0])
    counts = np.bincount(tokens, minlength=200)
    assert (expected > 0).sum() > 3
    for token, probability in enumerate(expected.tolist()):
        deviation = math.sqrt(draws * probability * (1 - probability))
        assert abs(counts[token] - draws * probability) <= 5 * deviation


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [999, 640, 64]] = 2.0
    logits[2, [130, 128]] = 1.0
    greedy = Row(SamplingParams(temperature=0.0))
    assert sample([greedy] * 3, logits).token_ids.tolist() == [0, 64, 128]


def test_ties_at_the_edge_of_top_k_are_all_kept() -> None:
    """More equal logits than candidates: the row falls back to the whole vocabulary."""
    logits = torch.zeros(1, VOCAB)
    rows = [Row(SamplingParams(top_k=2), seed=index) for index in range(200)]
    tokens = sample(rows, logits.expand(200, -1)).token_ids
    assert len(set(tokens.tolist())) > NUM_CANDIDATES
    assert tokens.tolist() == [reference(row, logits[0]) for row in rows]


def test_nothing_is_sorted_over_the_vocabulary_for_ordinary_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Filters that a model's distribution fits into are drawn from candidates alone."""

    def unexpected(*_: object) -> None:
        raise AssertionError("the whole vocabulary was looked at")

    monkeypatch.setattr(sampler_module, "_draw_from_all", unexpected)
    names = ("top_k", "top_p", "min_p", "all filters", "negative penalties")
    rows = [Row(SamplingParams(**SETTINGS[name]), output=(1, 2)) for name in names]
    logits = peaked(len(rows), 49_152, seed=4)
    logits[:, 100:140] += 12.0
    sample(rows, logits)


def test_min_tokens_forbids_the_end_until_then() -> None:
    """Ids 5 and 6 end the text; they are the best two until the third output token."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 7]] = torch.tensor([9.0, 8.0, 1.0])
    params = SamplingParams(temperature=0.0, min_tokens=3)
    for count, wanted in ((0, 7), (2, 7), (3, 5)):
        row = Row(params, output=(7,) * count, banned=(5, 6))
        assert sample([row], logits).token_ids[0] == wanted


def test_a_bitmask_allows_only_its_bits() -> None:
    logits = peaked(2)
    allowed = [3, 31, 32, 63, 64, 999]
    mask = torch.zeros(2, -(-VOCAB // 32), dtype=torch.int32)
    for token in allowed:
        bit = 1 << token % 32
        mask[0, token // 32] |= bit - (1 << 32) if bit == 1 << 31 else bit
    mask[1] = -1
    greedy = Row(SamplingParams(temperature=0.0))
    found = sample([greedy] * 2, logits, mask).token_ids
    assert found[0] == max(allowed, key=lambda token: float(logits[0, token]))
    assert found[1] == logits[1].argmax()
    drawn = {
        int(sample([Row(SamplingParams(temperature=9.0), seed=s)] * 2, logits, mask).token_ids[0])
        for s in range(60)
    }
    assert drawn <= set(allowed) and len(drawn) > 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_finite_logits_fails_alone(value: float) -> None:
    logits = peaked(4)
    logits[1, 500] = value
    rows = [Row(SamplingParams(**settings)) for settings in list(SETTINGS.values())[:4]]
    found = sample(rows, logits)
    assert list(found.failures) == [1]
    assert found.failures[1].code == "non_finite_logits"
    wanted = [reference(row, line) for row, line in zip(rows, peaked(4), strict=True)]
    assert [found.token_ids[index] for index in (0, 2, 3)] == [wanted[i] for i in (0, 2, 3)]


def test_a_row_that_allows_nothing_fails_alone() -> None:
    mask = torch.full((2, -(-VOCAB // 32)), -1, dtype=torch.int32)
    mask[0] = 0
    found = sample([Row(SamplingParams(temperature=0.0))] * 2, peaked(2), mask)
    assert {index: failure.code for index, failure in found.failures.items()} == {
        0: "no_token_allowed"
    }


def test_logprobs_are_the_model_s_own_before_bias_and_temperature() -> None:
    """Of the sampled token and the n best, natural logarithm; rows that did not ask get none."""
    logits = peaked(3, seed=8)
    rows = [
        Row(SamplingParams(temperature=0.0, logprobs=4)),
        Row(SamplingParams(temperature=0.0)),
        Row(SamplingParams(temperature=0.3, logprobs=0, logit_bias={17: 100.0})),
    ]
    found = sample(rows, logits)
    assert sorted(found.logprobs) == [0, 2]
    expected = logits.double().log_softmax(1)
    first, last = found.logprobs[0], found.logprobs[2]
    best = expected[0].topk(4)
    assert first.token_id == best.indices[0] and first.logprob == pytest.approx(
        best.values[0].item(), abs=1e-5
    )
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert last.token_id == 17 and last.top == ()
    assert last.logprob == pytest.approx(expected[2, 17].item(), abs=1e-5)


def test_penalties_leave_no_trace_in_the_work_array() -> None:
    """Two steps with different rows: counts of the first must not weigh in the second."""
    batch = InputBatch(4, 4096, 16, dummy_block=0)
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    added = [NewRow(index, [9, *([index] * 6)], 1, params, 0, 0, ()) for index in range(3)]
    batch.update(ScheduledBatch(0, added, (), ()))
    sampler = Sampler(batch)
    logits = torch.zeros(3, VOCAB)
    logits[:, :3] = 5.0
    slots = np.array([batch._slots[index] for index in range(3)])
    for order in ([0, 1, 2], [2, 0, 1], [1]):
        found = sampler.sample(logits[: len(order)].clone(), slots[order])
        assert found.token_ids.tolist() == [0 if index else 1 for index in order]
