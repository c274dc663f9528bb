"""Repetition, frequency and presence penalties, from counts that are kept on the device.

For an id that occurs in the prompt or the output:   x <- x / r if x > 0 else x * r
For an id that occurs n > 0 times in the output:     x <- x - f * n - p

Layouts
    counts  int32 [num_slots, vocab_size]: occurrences in the output, plus PROMPT (bit 30) when the
            id occurs in the prompt; zeroed for a new sequence
    logits  float32 [rows, vocab_size] or wider, last contiguous, changed in place
    rows    int64 [n]: which rows of logits, each once
    slots   int64 [n]: the rows of counts beside them

Only rows that have a penalty need a slot. A step adds the tokens it sampled with `count_tokens`, so
no history is read again.
"""

import torch
import triton
import triton.language as tl

PROMPT = 1 << 30


def count_tokens_reference(
    counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, *, prompt: bool = False
) -> torch.Tensor:
    """The new counts; see `count_tokens`."""
    counts = counts.clone()
    for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
        if prompt:
            counts[slot, token] |= PROMPT
        else:
            counts[slot, token] += 1
    return counts


def penalize_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """The changed logits, float32."""
    logits = logits.float().clone()
    vocab_size = counts.shape[1]
    seen = counts[slots]
    outputs = (seen & (PROMPT - 1)).float()
    x = logits[rows, :vocab_size]
    r = repetition[:, None]
    x = torch.where(seen != 0, torch.where(x > 0, x / r, x * r), x)
    x = x - frequency[:, None] * outputs - presence[:, None] * (outputs > 0)
    logits[rows, :vocab_size] = x
    return logits


def count_tokens(
    counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, *, prompt: bool = False
) -> None:
    """Add `tokens` int64 [n] to `counts` in place, token i at slots[i] (int64 [n]).

    With `prompt` they are marked as occurring in the prompt, else counted. A pair may repeat.
    """
    if counts.dtype != torch.int32 or counts.stride(1) != 1:
        raise ValueError("counts must be int32 [num_slots, vocab_size], last contiguous")
    n = tokens.numel()
    if slots.shape != (n,) or tokens.shape != (n,):
        raise ValueError(f"slots {tuple(slots.shape)} and tokens {tuple(tokens.shape)} must match")
    if n:
        _count_kernel[(triton.cdiv(n, 256),)](
            counts, slots, tokens, counts.stride(0), n, PROMPT_BIT=PROMPT, IN_PROMPT=prompt,
            BLOCK=256, num_warps=4,
        )  # fmt: skip


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Change `logits` at `rows` in place; the three penalties are float32 [n] beside `rows`."""
    vocab_size = counts.shape[1]
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.shape[1] < vocab_size:
        raise ValueError(f"logits must be float32 [rows, at least {vocab_size}], last contiguous")
    if counts.dtype != torch.int32 or counts.stride(1) != 1:
        raise ValueError("counts must be int32 [num_slots, vocab_size], last contiguous")
    n = rows.numel()
    for name, tensor in (
        ("slots", slots), ("repetition", repetition), ("frequency", frequency),
        ("presence", presence),
    ):  # fmt: skip
        if tensor.shape != (n,) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{n}]; got {tuple(tensor.shape)}")
    if n:
        _penalize_kernel[(triton.cdiv(vocab_size, 1024), n)](
            logits, rows, counts, slots, repetition, frequency, presence,
            logits.stride(0), counts.stride(0), vocab_size, PROMPT_BIT=PROMPT, BLOCK=1024,
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _count_kernel(
    counts_ptr,
    slots_ptr,
    tokens_ptr,
    counts_stride,
    n,
    PROMPT_BIT: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    slot = tl.load(slots_ptr + i, mask=live, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + i, mask=live, other=0)
    cells = counts_ptr + slot * counts_stride + token
    if IN_PROMPT:
        tl.atomic_or(cells, tl.full([BLOCK], PROMPT_BIT, tl.int32), mask=live)
    else:
        tl.atomic_add(cells, tl.full([BLOCK], 1, tl.int32), mask=live)


@triton.jit
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    counts_ptr,
    slots_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    logits_stride,
    counts_stride,
    vocab_size,
    PROMPT_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(1)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = ids < vocab_size
    row = tl.load(rows_ptr + i).to(tl.int64)
    slot = tl.load(slots_ptr + i).to(tl.int64)
    seen = tl.load(counts_ptr + slot * counts_stride + ids, mask=live, other=0)
    outputs = (seen & (PROMPT_BIT - 1)).to(tl.float32)
    repetition = tl.load(repetition_ptr + i)
    at = logits_ptr + row * logits_stride + ids
    x = tl.load(at, mask=live, other=0.0)
    x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
    x -= tl.load(frequency_ptr + i) * outputs
    x -= tl.where(outputs > 0, tl.load(presence_ptr + i), 0.0)
    tl.store(at, x, mask=live)
