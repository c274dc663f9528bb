"""Penalties and the counts they are taken from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, assert_close, normal, seeded

from headrace.kernels.penalties import (
    PROMPT,
    count_tokens,
    count_tokens_reference,
    penalize,
    penalize_reference,
)


@settings(max_examples=20, deadline=None)
@given(
    slots=st.integers(1, 4),
    vocab=st.integers(1, 2500),
    count=st.integers(0, 600),
    seed=st.integers(0, 2**31),
)
def test_penalties_follow_what_occurred(slots, vocab, count, seed):
    g = seeded(seed)
    counts = torch.zeros(slots, vocab, dtype=torch.int32, device=DEVICE)
    expected_counts = counts.clone()
    for prompt in (True, False):
        where = torch.randint(0, slots, (count,), generator=g).to(DEVICE)
        tokens = torch.randint(0, vocab, (count,), generator=g).to(DEVICE)
        expected_counts = count_tokens_reference(expected_counts, where, tokens, prompt=prompt)
        count_tokens(counts, where, tokens, prompt=prompt)
    assert torch.equal(counts, expected_counts)

    rows = torch.randperm(slots + 2, generator=g)[:slots].to(DEVICE)
    chosen = torch.randperm(slots, generator=g).to(DEVICE)
    repetition = torch.rand(slots, generator=g).to(DEVICE) + 0.5
    frequency, presence = (torch.randn(slots, generator=g).to(DEVICE) for _ in range(2))
    logits = normal(slots + 2, vocab + 3, dtype=torch.float32, generator=g, scale=4.0)
    expected = penalize_reference(logits, rows, counts, chosen, repetition, frequency, presence)
    penalize(logits, rows, counts, chosen, repetition, frequency, presence)
    assert_close(logits, expected, torch.float32)


def test_a_token_that_repeats_in_one_call_is_counted_each_time():
    counts = torch.zeros(1, 8, dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([3] * 300 + [5], device=DEVICE)
    count_tokens(counts, torch.zeros_like(tokens), tokens)
    count_tokens(counts, torch.zeros_like(tokens), tokens, prompt=True)
    assert counts[0].tolist() == [0, 0, 0, PROMPT + 300, 0, PROMPT + 1, 0, 0]


def test_wrong_layouts_are_refused():
    counts = torch.zeros(1, 8, dtype=torch.int32, device=DEVICE)
    ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="must match"):
        count_tokens(counts, ids[:1], ids)
    with pytest.raises(ValueError, match="float32"):
        half = torch.zeros(2, 8, dtype=torch.float16, device=DEVICE)
        penalize(half, ids, counts, ids, *[torch.ones(2, device=DEVICE)] * 3)
