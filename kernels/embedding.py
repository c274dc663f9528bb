"""Rows of the embedding table, with a padded vocabulary and a shard of it.

    y_t = scale * W[id_t - first]   when first <= id_t < first + size, else 0

Layouts
    ids     int64 or int32 [tokens]
    weight  [at least size, hidden]: rows from `size` on are padding and never read; contiguous
            rows. A shard of a tensor-parallel table holds the ids from `first` on, and the shards'
            results add up to the whole.
    y       [tokens, hidden], weight's dtype

`scale` is rounded to weight's dtype before it multiplies in float32 (Gemma's sqrt(hidden)). An id
outside the shard, padding (-1 or past the vocabulary) included, gives zeros and reads nothing.
"""

import torch
import triton
import triton.language as tl


def embedding_reference(
    ids: torch.Tensor, weight: torch.Tensor, *, size: int, first: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """float32 [tokens, hidden]."""
    local = ids.long() - first
    inside = (local >= 0) & (local < size)
    rows = weight[local.clamp(0, size - 1)].float()
    rounded = float(torch.tensor(scale, dtype=weight.dtype))
    return torch.where(inside[:, None], rows * rounded, 0.0)


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    size: int,
    first: int = 0,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `out` [tokens, hidden]. Raises ValueError on a layout the kernel does not read."""
    tokens, hidden = ids.numel(), weight.shape[1]
    if ids.shape != (tokens,) or not ids.is_contiguous():
        raise ValueError(f"ids must be contiguous with one dimension; got {tuple(ids.shape)}")
    if weight.stride(1) != 1 or not 1 <= size <= weight.shape[0]:
        raise ValueError(f"weight {tuple(weight.shape)} must have {size} rows, last contiguous")
    if out is None:
        out = torch.empty((tokens, hidden), dtype=weight.dtype, device=weight.device)
    elif out.shape != (tokens, hidden) or out.stride(1) != 1:
        raise ValueError(f"out must be [{tokens}, {hidden}]; got {tuple(out.shape)}")
    if tokens:
        if scale != 1.0:
            scale = float(torch.tensor(scale, dtype=weight.dtype))
        block = min(1024, triton.next_power_of_2(hidden))
        _embedding_kernel[(tokens, triton.cdiv(hidden, block))](
            ids, weight, out, weight.stride(0), out.stride(0), first, size,
            scale, HIDDEN=hidden, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first", "size"])
def _embedding_kernel(
    ids_ptr,
    weight_ptr,
    out_ptr,
    weight_stride,
    out_stride,
    first,
    size,
    scale,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < HIDDEN
    local = tl.load(ids_ptr + token).to(tl.int64) - first
    inside = (local >= 0) & (local < size)
    x = tl.load(weight_ptr + local * weight_stride + columns, mask=live & inside, other=0.0)
    y = x.to(tl.float32) * scale
    tl.store(out_ptr + token * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=live)
