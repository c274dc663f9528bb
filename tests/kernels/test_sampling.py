"""The sampling kernel against a reference that sorts in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, case_id, combinations, seeded

from headrace.kernels.sampling import (
    NON_FINITE,
    NOTHING_ALLOWED,
    OK,
    kept_weights_reference,
    sample,
    sample_reference,
    uniform_reference,
)


def make_settings(rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """Each setting a number, or one number a row."""
    g = seeded(seed)

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous().to(DEVICE)

    return {
        "temperature": column(temperature, torch.float32),
        "top_k": column(top_k, torch.int64),
        "top_p": column(top_p, torch.float32),
        "min_p": column(min_p, torch.float32),
        "seed": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g).to(DEVICE),
        "sample_index": torch.randint(0, 4, (rows,), generator=g).to(DEVICE),
        "position": torch.randint(0, 10**6, (rows,), generator=g).to(DEVICE),
    }


def make_logits(rows: int, vocab: int, dtype=torch.float32, seed=0, scale=3.0):
    return (torch.randn(rows, vocab, generator=seeded(seed)) * scale).to(dtype).to(DEVICE)


def assert_drawn_as_expected(logits, tokens, chosen):
    """Equal, or the uniform fell within float32's rounding of the border between two tokens."""
    expected = sample_reference(logits, **chosen)
    for row in (tokens != expected).nonzero()[:, 0].tolist():
        one = {name: value[row : row + 1] for name, value in chosen.items()}
        filters = {k: v for k, v in one.items() if k not in ("seed", "sample_index", "position")}
        weights = kept_weights_reference(logits[row : row + 1], **filters)[0]
        running = weights.cumsum(0) / weights.sum()
        place = {k: one[k] for k in ("seed", "sample_index", "position")}
        u = float(uniform_reference(**place))
        token = int(tokens[row])
        assert weights[token] > 0, f"row {row}: token {token} is not among the kept"
        low, high = float(running[token] - weights[token] / weights.sum()), float(running[token])
        assert low - 1e-5 <= u < high + 1e-5, f"row {row}: token {token}, u {u}"


CASES = combinations(
    in_full={"vocab": (5, 4097), "temperature": (0.0, 0.3, 2.0)},
    vocab=(1, 5, 1000, 4097, 9000),
    dtype=DTYPES,
    temperature=(0.0, 0.3, 1.0, 2.0),
    top_k=(0, 1, 7, 50, 10000),
    top_p=(1.0, 0.9, 0.3, 1e-6),
    min_p=(0.0, 0.05, 1.0),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_token_is_the_one_that_sorting_would_draw(case):
    logits = make_logits(4, case["vocab"], case["dtype"])
    chosen = make_settings(
        4, **{name: case[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    )
    tokens, status = sample(logits, vocab_size=case["vocab"], **chosen)
    assert status.tolist() == [OK] * 4
    assert_drawn_as_expected(logits, tokens, chosen)


def test_every_row_has_its_own_settings():
    logits = make_logits(6, 3000, seed=1)
    chosen = make_settings(
        6,
        temperature=[0.0, 1.0, 0.7, 1.5, 1.0, 0.0],
        top_k=[5, 0, 40, 0, 3, 0],
        top_p=[0.5, 1.0, 0.8, 0.95, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.1, 0.0, 0.5],
    )
    tokens, _ = sample(logits, vocab_size=3000, **chosen)
    assert_drawn_as_expected(logits, tokens, chosen)
    for row in range(6):
        alone = {name: value[row : row + 1].clone() for name, value in chosen.items()}
        one, _ = sample(logits[row : row + 1], vocab_size=3000, **alone)
        assert one.item() == tokens[row].item()


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [4100, 17, 8000]] = 5.0
    logits[1, [8999, 4096]] = 5.0
    tokens, _ = sample(logits, vocab_size=9000, **make_settings(2, temperature=0.0))
    assert tokens.tolist() == [17, 4096]


def test_ties_at_a_threshold_are_all_kept():
    """Five logits tie for places 3 to 7: top_k 4 keeps all seven, and every one is drawn."""
    logits = torch.full((1, 40), -3.0, device=DEVICE)
    logits[0, [2, 30]] = 3.0
    logits[0, [5, 11, 17, 23, 39]] = 2.5
    rows = 60
    chosen = make_settings(rows, top_k=4)
    tokens, _ = sample(logits.expand(rows, -1), vocab_size=40, **chosen)
    assert set(tokens.tolist()) == {2, 30, 5, 11, 17, 23, 39}


def test_draws_follow_the_distribution():
    """400 draws over six tokens; chi-square with 5 degrees of freedom is below 20.5 in 99.9 %."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 1.5]], device=DEVICE)
    rows = 400
    chosen = make_settings(rows, seed=5)
    chosen["position"] = torch.arange(rows, device=DEVICE)
    chosen["seed"] = torch.full_like(chosen["seed"], 1234)
    tokens, _ = sample(logits.expand(rows, -1), vocab_size=6, filtered=False, **chosen)
    expected = logits[0].softmax(0).cpu() * rows
    seen = torch.bincount(tokens.cpu(), minlength=6)
    assert float(((seen - expected) ** 2 / expected).sum()) < 20.5


def test_the_noise_is_the_cpu_samplers():
    from headrace.engine.random_bits import uniforms

    seeds = np.array([0, 1, 2**63 + 17, 2**64 - 1], dtype=np.uint64)
    samples = np.array([0, 3, 2**40, 1], dtype=np.uint64)
    positions = np.array([0, 99, 2**33 + 5, 7], dtype=np.uint64)
    expected = uniforms(seeds, samples, positions)
    as_signed = [torch.from_numpy(x.view(np.int64).copy()) for x in (seeds, samples, positions)]
    assert np.array_equal(uniform_reference(*as_signed).numpy(), expected)
    # Through the kernel: over 4,096 equal logits the token is the uniform's first 12 bits.
    chosen = make_settings(4)
    chosen |= dict(
        zip(("seed", "sample_index", "position"), (x.to(DEVICE) for x in as_signed), strict=True)
    )
    tokens, _ = sample(torch.zeros(4, 4096, device=DEVICE), vocab_size=4096, **chosen)
    assert tokens.tolist() == (expected * 4096).astype(int).tolist()


def test_the_bitmask_forbids_and_padding_is_not_looked_at():
    vocab, padded = 5000, 5056
    logits = make_logits(3, padded)
    logits[:, vocab:] = float("nan")
    allowed = torch.rand(3, padded, generator=seeded(2)) < 0.01
    allowed[:, 4999] = True
    allowed = allowed.to(DEVICE)
    weights = 2 ** torch.arange(32, device=DEVICE)
    words = (allowed.view(3, -1, 32) * weights).sum(-1)
    bitmask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    masked = logits[:, :vocab].masked_fill(~allowed[:, :vocab], -torch.inf)
    for options in ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}):
        chosen = make_settings(3, **options)
        tokens, status = sample(logits, vocab_size=vocab, bitmask=bitmask, **chosen)
        assert status.tolist() == [OK] * 3
        assert_drawn_as_expected(masked, tokens, chosen)


def test_a_sequence_with_broken_logits_is_named_and_the_others_go_on():
    logits = make_logits(5, 5000)
    logits[1, 4321] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    chosen = make_settings(5, top_k=10)
    tokens, status = sample(logits, vocab_size=5000, **chosen)
    assert status.tolist() == [OK, NON_FINITE, NON_FINITE, NOTHING_ALLOWED, OK]
    assert tokens[1:4].tolist() == [0, 0, 0]
    good = [0, 4]
    assert_drawn_as_expected(
        logits[good], tokens[good], {name: value[good] for name, value in chosen.items()}
    )


def test_a_wrong_layout_is_refused():
    logits = make_logits(2, 50)
    chosen = make_settings(2)
    with pytest.raises(ValueError, match="at least"):
        sample(logits, vocab_size=51, **chosen)
    with pytest.raises(ValueError, match="seed"):
        sample(logits, vocab_size=50, **{**chosen, "seed": chosen["seed"].int()})
    assert sample(logits[:0], vocab_size=50, **make_settings(0))[0].shape == (0,)


@settings(max_examples=20, deadline=None)
@given(
    vocab=st.integers(1, 3000),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 3100),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    scale=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_any_settings(vocab, temperature, top_k, top_p, min_p, scale, seed):
    # Half precision makes ties; a multiple of 1/8 makes many.
    logits = make_logits(2, vocab, torch.bfloat16, seed, scale)
    chosen = make_settings(
        2, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    tokens, status = sample(logits, vocab_size=vocab, **chosen)
    assert status.tolist() == [OK, OK]
    assert_drawn_as_expected_or_at_threshold(logits, tokens, chosen)


def assert_drawn_as_expected_or_at_threshold(logits, tokens, chosen):
    """As above; when rounding moves the nucleus's border by a token, both borders are right."""
    try:
        assert_drawn_as_expected(logits, tokens, chosen)
    except AssertionError:
        for factor in (1 - 1e-5, 1 + 1e-5):
            moved = {**chosen, "top_p": (chosen["top_p"] * factor).clamp(max=1.0)}
            moved["min_p"] = (chosen["min_p"] * factor).clamp(max=1.0)
            if torch.equal(tokens, sample_reference(logits, **moved)):
                return
        raise
