"""Embedding rows, whole and sharded, with ids that are not in the table."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, assert_close, case_id, combinations, normal, seeded

from headrace.kernels.embedding import embedding, embedding_reference

CASES = combinations(
    tokens=(1, 7, 40), hidden=(1, 64, 576, 1500), dtype=DTYPES, scale=(1.0, 45.254834)
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_rows_are_gathered_and_padding_is_zero(case):
    """The padding rows of the table hold NaN; ids below, above and in the padding give zeros."""
    g = seeded()
    size, padded = 100, 128
    weight = normal(padded, case["hidden"], dtype=case["dtype"], generator=g)
    weight[size:] = float("nan")
    ids = torch.randint(0, size, (case["tokens"],), generator=g)
    ids[::3] = torch.tensor([-1, 100, 127, 128, 10**12])[torch.arange(len(ids[::3])) % 5]
    ids = ids.to(DEVICE)
    out = embedding(ids, weight, size=size, scale=case["scale"])
    expected = embedding_reference(ids, weight, size=size, scale=case["scale"])
    assert out.dtype == case["dtype"]
    assert_close(out, expected, case["dtype"])
    assert not out[::3].any()


@settings(max_examples=15, deadline=None)
@given(
    vocab=st.integers(1, 60),
    shards=st.integers(1, 4),
    hidden=st.integers(1, 70),
    tokens=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
def test_the_shards_add_up_to_the_whole(vocab, shards, hidden, tokens, seed):
    g = seeded(seed)
    weight = normal(vocab, hidden, dtype=torch.float32, generator=g)
    ids = torch.randint(0, vocab, (tokens,), generator=g).to(torch.int32).to(DEVICE)
    each = -(-vocab // shards)
    total = torch.zeros(tokens, hidden, device=DEVICE)
    for first in range(0, vocab, each):
        size = min(each, vocab - first)
        total += embedding(ids, weight[first : first + size], size=size, first=first)
    assert torch.equal(total, embedding_reference(ids, weight, size=vocab))


def test_a_table_that_is_too_short_is_refused():
    weight = torch.zeros(4, 8, device=DEVICE)
    with pytest.raises(ValueError, match="5 rows"):
        embedding(torch.zeros(1, dtype=torch.int64, device=DEVICE), weight, size=5)
