"""The kernels' own float32 references in the place of the kernels: what runs around them can then
be tested over many steps, which Triton's interpreter is too slow for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delayed_device import as_kernel
from torch import Tensor

from headrace.engine import device_sampler
from headrace.engine.layers import triton_backend
from headrace.kernels import (
    embedding,
    gated_activation,
    logprobs,
    paged_attention,
    penalties,
    rms_norm,
    rotary,
    sampling,
    shared_prefix_attention,
)


def use_references(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(module: Any, name: str, function: Callable[..., Any]) -> None:
        monkeypatch.setattr(module, name, as_kernel(function))

    replace(triton_backend, "embedding", _embedding)
    replace(triton_backend, "rms_norm", rms_norm.rms_norm_reference)
    replace(triton_backend, "add_rms_norm", _add_rms_norm)
    replace(triton_backend, "rotary_and_store", _rotary_and_store)
    replace(triton_backend, "paged_attention", _paged_attention)
    replace(triton_backend, "shared_prefix_attention", _shared_prefix_attention)
    replace(triton_backend, "silu_and_mul", gated_activation.silu_and_mul_reference)
    replace(device_sampler, "sample", _sample)
    replace(device_sampler, "penalize", _penalize)
    replace(device_sampler, "count_tokens", _count_tokens)
    replace(device_sampler, "token_logprobs", _token_logprobs)


def _embedding(ids: Tensor, weight: Tensor, *, size: int) -> Tensor:
    return embedding.embedding_reference(ids, weight, size=size)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    y, h = rms_norm.add_rms_norm_reference(x, residual, weight, eps)
    residual.copy_(h)
    return y


def _rotary_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    q.copy_(rotary.rotary_reference(q, positions, table, weight=q_weight, eps=eps))
    k.copy_(rotary.rotary_reference(k, positions, table, weight=k_weight, eps=eps))
    rotary.store_kv_reference(k, k_cache, slots)
    rotary.store_kv_reference(v, v_cache, slots)


def _paged_attention(*args: Any, scale: float, window: int | None, **bounds: Any) -> Tensor:
    return paged_attention.paged_attention_reference(*args, scale=scale, window=window)


def _shared_prefix_attention(*args: Any, scale: float, **bounds: Any) -> Tensor:
    return shared_prefix_attention.shared_prefix_attention_reference(*args, scale=scale)


def _sample(
    logits: Tensor, *, vocab_size: int, bitmask: Tensor | None, filtered: bool, **settings: Tensor
) -> tuple[Tensor, Tensor]:
    logits = logits[:, :vocab_size].float()
    bad = (logits.isnan() | (logits == torch.inf)).any(1)
    status = torch.where(bad, sampling.NON_FINITE, sampling.OK).to(torch.int32)
    safe = torch.where(bad[:, None], 0.0, logits)
    return torch.where(bad, 0, sampling.sample_reference(safe, **settings)), status


def _penalize(logits: Tensor, *rest: Tensor) -> None:
    logits.copy_(penalties.penalize_reference(logits, *rest))


def _count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor, *, prompt: bool = False) -> None:
    counts.copy_(penalties.count_tokens_reference(counts, slots, tokens, prompt=prompt))


def _token_logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, *, vocab_size: int, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    return logprobs.token_logprobs_reference(logits, rows, tokens, vocab_size, num_top)
