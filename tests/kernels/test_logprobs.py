"""Log probabilities against torch's log_softmax and a stable sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, assert_close, case_id, combinations, normal, seeded

from headrace.kernels.logprobs import token_logprobs, token_logprobs_reference

CASES = combinations(vocab=(20, 300, 4097, 9000), num_top=(0, 1, 5, 20), n=(1, 3), dtype=DTYPES)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_most_likely_are_found_in_order(case):
    vocab, n = case["vocab"], case["n"]
    g = seeded()
    logits = normal(5, vocab + 8, dtype=case["dtype"], generator=g, scale=4.0)
    logits[:, vocab:] = float("nan")
    rows = torch.randperm(5, generator=g)[:n].to(DEVICE)
    tokens = torch.randint(0, vocab, (n,), generator=g).to(DEVICE)
    expected = token_logprobs_reference(logits, rows, tokens, vocab, case["num_top"])
    found = token_logprobs(logits, rows, tokens, vocab_size=vocab, num_top=case["num_top"])
    assert_close(found[0], expected[0], torch.float32)
    assert torch.equal(found[1], expected[1])
    assert_close(found[2], expected[2], torch.float32)


def test_ties_come_by_id_and_forbidden_tokens_last():
    logits = torch.full((1, 9000), 1.0, device=DEVICE)
    logits[0, [7000, 10]] = 2.0
    logits[0, 20:] = torch.where(logits[0, 20:] == 2.0, 2.0, -torch.inf)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    _, ids, values = token_logprobs(logits, zero, zero, vocab_size=9000, num_top=20)
    expected = [10, 7000, *[i for i in range(20) if i != 10][:18]]
    assert ids[0].tolist() == expected
    assert torch.isfinite(values).all()
    _, ids, values = token_logprobs(logits[:, 18:25].clone(), zero, zero, vocab_size=7, num_top=7)
    assert ids[0].tolist() == list(range(7))
    assert values[0, 2:].tolist() == [-torch.inf] * 5


def test_no_rows_and_too_many_are_handled():
    logits = torch.zeros(2, 10, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert token_logprobs(logits, none, none, vocab_size=10, num_top=3)[1].shape == (0, 3)
    with pytest.raises(ValueError, match="num_top"):
        token_logprobs(logits, none, none, vocab_size=10, num_top=11)


@settings(max_examples=15, deadline=None)
@given(vocab=st.integers(1, 5000), num_top=st.integers(0, 20), seed=st.integers(0, 2**31))
def test_any_vocabulary(vocab, num_top, seed):
    g = seeded(seed)
    num_top = min(num_top, vocab)
    # Whole numbers: many ties.
    logits = normal(2, vocab, dtype=torch.float32, generator=g, scale=2.0).round()
    rows = torch.tensor([1, 0], device=DEVICE)
    tokens = torch.randint(0, vocab, (2,), generator=g).to(DEVICE)
    expected = token_logprobs_reference(logits, rows, tokens, vocab, num_top)
    found = token_logprobs(logits, rows, tokens, vocab_size=vocab, num_top=num_top)
    assert_close(found[0], expected[0], torch.float32)
    assert torch.equal(found[1], expected[1])
    assert_close(found[2], expected[2], torch.float32)
