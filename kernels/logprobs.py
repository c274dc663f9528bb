"""Log probabilities of the sampled token and of the most likely ones, for the rows that ask.

    lse = log sum_v e^x_v;   logprob(v) = x_v - lse
    the n most likely ids, by x downwards and then by id upwards

Layouts
    logits       [rows, vocab_size] or wider, any float dtype, last contiguous
    rows         int64 [n]: the rows of logits that ask
    tokens       int64 [n]: the sampled ids beside them
    sampled      float32 [n]
    top_ids      int64 [n, num_top]
    top_logprobs float32 [n, num_top]

One program reads one row: a pass for lse, and one for each of the num_top (at most 20, few rows).
"""

import torch
import triton
import triton.language as tl


def token_logprobs_reference(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, vocab_size: int, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sampled, top_ids, top_logprobs) in float32, ties by id."""
    logprobs = logits[rows, :vocab_size].float().log_softmax(dim=-1)
    order = logprobs.sort(dim=-1, descending=True, stable=True)
    sampled = logprobs.gather(1, tokens[:, None])[:, 0]
    return sampled, order.indices[:, :num_top], order.values[:, :num_top]


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, *, vocab_size: int, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (sampled, top_ids, top_logprobs).

    Raises ValueError when num_top is not within 0 to vocab_size, or on another layout.
    """
    n = rows.numel()
    if logits.dim() != 2 or logits.stride(1) != 1 or not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} must be [rows, at least {vocab_size}], last contiguous"
        )
    if not 0 <= num_top <= vocab_size:
        raise ValueError(f"num_top {num_top} is not within 0 to {vocab_size}")
    if rows.shape != (n,) or tokens.shape != (n,):
        raise ValueError(f"rows {tuple(rows.shape)} and tokens {tuple(tokens.shape)} must match")
    sampled = torch.empty((n,), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((n, num_top), dtype=torch.int64, device=logits.device)
    top_logprobs = torch.empty((n, num_top), dtype=torch.float32, device=logits.device)
    if n:
        _logprobs_kernel[(n,)](
            logits, rows, tokens, sampled, top_ids, top_logprobs, logits.stride(0), vocab_size,
            num_top, BLOCK=4096, num_warps=8,
        )  # fmt: skip
    return sampled, top_ids, top_logprobs


@triton.jit(do_not_specialize=["num_top"])
def _logprobs_kernel(
    logits_ptr,
    rows_ptr,
    tokens_ptr,
    sampled_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    logits_stride,
    vocab_size,
    num_top,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + tl.load(rows_ptr + i).to(tl.int64) * logits_stride
    # Each lane sums what it sees relative to its own maximum; the lanes are joined at the end.
    lane_max = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, x)
        safe = tl.where(new_max == float("-inf"), 0.0, new_max)
        lane_sum = lane_sum * tl.exp(lane_max - safe) + tl.exp(x - safe)
        lane_max = new_max
    best = tl.max(lane_max, axis=0)
    lse = best + tl.log(tl.sum(lane_sum * tl.exp(lane_max - best), axis=0))
    chosen = tl.load(row_ptr + tl.load(tokens_ptr + i)).to(tl.float32)
    tl.store(sampled_ptr + i, chosen - lse)

    previous = tl.full([], float("inf"), tl.float32)
    previous_id = tl.full([], -1, tl.int32)
    for rank in range(num_top):
        # The best of what comes after the previous one: less likely, or as likely with a higher id.
        lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
        lane_id = tl.full([BLOCK], 2147483647, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            live = ids < vocab_size
            x = tl.load(row_ptr + ids, mask=live, other=float("-inf")).to(tl.float32)
            after = live & ((x < previous) | ((x == previous) & (ids > previous_id)))
            better = after & ((x > lane_best) | (lane_id == 2147483647))
            lane_best = tl.where(better, x, lane_best)
            lane_id = tl.where(better, ids, lane_id)
        # A lane that found nothing has no id and must not win over a lane with -inf.
        found = lane_id != 2147483647
        previous = tl.max(tl.where(found, lane_best, float("-inf")), axis=0)
        previous_id = tl.min(tl.where(found & (lane_best == previous), lane_id, 2147483647), axis=0)
        tl.store(top_ids_ptr + i * num_top + rank, previous_id.to(tl.int64))
        tl.store(top_logprobs_ptr + i * num_top + rank, previous - lse)
