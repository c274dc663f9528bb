"""Rotary embedding and KV store: every rope type of transformers, every layout, one pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, DTYPES, assert_close, case_id, combinations, normal, seeded

from headrace.kernels.rotary import (
    rotary_and_store,
    rotary_reference,
    rotary_table,
    store_kv_reference,
)


def inverse_frequencies(rotary_dim: int, theta: float = 10000.0) -> torch.Tensor:
    return theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def run_case(
    *,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    dtype: torch.dtype,
    interleaved: bool,
    norm: bool,
    seed: int = 0,
) -> None:
    g = seeded(seed)
    num_blocks = tokens // block_size + 3
    qkv = normal(tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype, generator=g)
    heads = qkv.view(tokens, q_heads + 2 * kv_heads, head_dim)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    positions = torch.randint(0, 300, (tokens,), generator=g).to(DEVICE)
    slots = torch.randperm(num_blocks * block_size, generator=g)[:tokens].to(DEVICE)
    table = rotary_table(inverse_frequencies(rotary_dim), 300).to(DEVICE)
    weights = {}
    if norm:
        weights = {
            name: normal(head_dim, dtype=dtype, generator=g) for name in ("q_weight", "k_weight")
        }
    caches = [
        normal(num_blocks, block_size, kv_heads, head_dim, dtype=dtype, generator=g)
        for _ in range(2)
    ]
    expected_q = rotary_reference(
        q, positions, table, interleaved=interleaved, weight=weights.get("q_weight")
    )
    expected_k = rotary_reference(
        k, positions, table, interleaved=interleaved, weight=weights.get("k_weight")
    )
    expected_caches = [cache.clone() for cache in caches]
    expected_v = v.clone()
    rotary_and_store(
        q, k, v, positions, table, caches[0], caches[1], slots, interleaved=interleaved, **weights
    )
    assert_close(q, expected_q, dtype)
    assert_close(k, expected_k, dtype)
    assert torch.equal(v, expected_v)
    # What is in the cache is exactly what k and v hold, and no other slot has changed.
    store_kv_reference(k, expected_caches[0], slots)
    store_kv_reference(v, expected_caches[1], slots)
    assert torch.equal(caches[0], expected_caches[0])
    assert torch.equal(caches[1], expected_caches[1])


CASES = combinations(
    in_full={"tokens": (1, 5), "heads": ((1, 1), (4, 2), (9, 3), (16, 1), (7, 1))},
    tokens=(1, 2, 19),
    heads=((1, 1), (4, 2), (9, 3), (32, 2), (7, 1)),
    dims=((64, 64), (80, 32), (80, 80), (96, 96), (128, 128), (128, 64), (256, 256)),
    block_size=(16, 32),
    dtype=DTYPES,
    interleaved=(False, True),
    norm=(False, True),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_heads_are_rotated_and_stored(case):
    case = dict(case)
    q_heads, kv_heads = case.pop("heads")
    head_dim, rotary_dim = case.pop("dims")
    run_case(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary_dim, **case)


ROPE_TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 128},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.0 + 0.2 * i for i in range(32)],
        "factor": 8.0,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_a_table_holds_every_rope_type(rope_type):
    """transformers' own LlamaRotaryEmbedding and apply_rotary_pos_emb are the oracle."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    tokens, q_heads, kv_heads, head_dim = 48, 4, 2, 64
    config = LlamaConfig(
        hidden_size=q_heads * head_dim,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10000.0, **ROPE_TYPES[rope_type]},
    )
    oracle = LlamaRotaryEmbedding(config)
    g = seeded()
    q = torch.randn(tokens, q_heads, head_dim, generator=g)
    k = torch.randn(tokens, kv_heads, head_dim, generator=g)
    # The last positions lie past the original context, where dynamic and longrope switch.
    positions = torch.arange(976, 976 + tokens)
    cos, sin = oracle(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    table = rotary_table(oracle.inv_freq, 1024, float(oracle.attention_scaling)).to(DEVICE)
    cache = torch.zeros(4, 16, kv_heads, head_dim, device=DEVICE)
    q, k = q.to(DEVICE), k.to(DEVICE)
    rotary_and_store(
        q, k, k.clone(), positions.to(DEVICE), table, cache, cache.clone(),
        torch.arange(tokens, device=DEVICE),
    )  # fmt: skip
    # transformers takes the angle in float32: at position 1000 that is off by up to 6e-5.
    torch.testing.assert_close(q.cpu(), expected_q[0].transpose(0, 1), rtol=0, atol=1e-3)
    torch.testing.assert_close(k.cpu(), expected_k[0].transpose(0, 1), rtol=0, atol=1e-3)


def test_padding_rows_touch_only_the_dummy_block():
    tokens, dummy = 5, 2
    g = seeded()
    q = normal(tokens, 2, 64, dtype=torch.float32, generator=g)
    k = normal(tokens, 1, 64, dtype=torch.float32, generator=g)
    cache = torch.zeros(3, 16, 1, 64, device=DEVICE)
    slots = torch.tensor([0, 17] + [dummy * 16] * 3, device=DEVICE)
    table = rotary_table(inverse_frequencies(64), 8).to(DEVICE)
    rotary_and_store(
        q, k, k.clone(), torch.arange(tokens, device=DEVICE), table, cache, cache.clone(), slots
    )
    written = cache.abs().sum(dim=(2, 3)).nonzero().tolist()
    assert written == [[0, 0], [1, 1], [dummy, 0]]


def test_a_wrong_layout_is_refused():
    q = normal(2, 4, 64, dtype=torch.float32, generator=seeded())
    k = q[:, :2].clone()
    cache = torch.zeros(2, 16, 2, 64, device=DEVICE)
    table = rotary_table(inverse_frequencies(64), 8).to(DEVICE)
    positions = torch.arange(2, device=DEVICE)
    with pytest.raises(ValueError, match="int64"):
        rotary_and_store(q, k, k, positions, table, cache, cache, positions.int())
    with pytest.raises(ValueError, match="caches"):
        rotary_and_store(q, k, k, positions, table, cache[..., :32], cache, positions)
    with pytest.raises(ValueError, match="both"):
        rotary_and_store(
            q, k, k, positions, table, cache, cache.clone(), positions, q_weight=q[0, 0]
        )


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 8),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 4),
    half=st.integers(1, 48),
    rest=st.integers(0, 30),
    interleaved=st.booleans(),
    norm=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_rotated(tokens, group, kv_heads, half, rest, interleaved, norm, seed):
    run_case(
        tokens=tokens,
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=2 * half + rest,
        rotary_dim=2 * half,
        block_size=16,
        dtype=torch.float32,
        interleaved=interleaved,
        norm=norm,
        seed=seed,
    )
