"""Rotary position embedding: one table of cosines and sines by position, whatever the scaling.

Every scaling is a function of the position alone, so cached keys stay valid under chunking, prefix
sharing and recompute. Formulas as in Transformers' modeling_rope_utils; float32 throughout.
"""

import math

import torch
from torch import Tensor

from headrace.engine.models.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [length, head_dim / 2], times the attention factor of yarn.

    Pairs are (i, i + head_dim / 2). "dynamic": a token at position p beyond the original length is
    rotated with the base for p + 1 tokens, as when it is decoded one by one.
    """
    positions = torch.arange(length, dtype=torch.float32)
    if rope.rope_type == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(rope, head_dim, length)
        return angles.cos(), angles.sin()
    frequencies, attention_factor = inverse_frequencies(rope, head_dim)
    angles = positions[:, None] * frequencies[None, :]
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, float32 [head_dim / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.rope_type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, frequencies)
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between."""
    assert rope.low_freq_factor is not None and rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    original = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / rope.factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def _yarn(rope: RopeConfig, head_dim: int, frequencies: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): pairs that turn often are kept, those that turn rarely are
    interpolated, a ramp between; cos and sin carry the attention factor."""
    assert rope.original_max_position_embeddings is not None
    original = rope.original_max_position_embeddings

    def pair_that_turns(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    kept_share = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    interpolated = 1.0 / (rope.factor * (1.0 / frequencies))
    mixed = interpolated * (1 - kept_share) + frequencies * kept_share
    return mixed, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _dynamic_frequencies(rope: RopeConfig, head_dim: int, length: int) -> Tensor:
    """NTK-aware scaling whose base grows with the length: float32 [length, head_dim / 2]."""
    assert rope.original_max_position_embeddings is not None
    original = rope.original_max_position_embeddings
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    lengths = torch.arange(1, length + 1, dtype=torch.float64).clamp(min=original)
    growth = rope.factor * lengths / original - (rope.factor - 1)
    bases = (rope.theta * growth ** (head_dim / (head_dim - 2))).float()
    return 1.0 / (bases[:, None] ** exponents[None, :])
