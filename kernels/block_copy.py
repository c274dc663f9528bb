"""Copy and clear whole blocks of the paged KV cache, keys and values in one launch.

    copy:   cache[target_i] <- cache[source_i]        clear:   cache[block_i] <- 0

Layouts
    k_cache, v_cache  [num_blocks, ...], contiguous within a block, of one shape and dtype
    pairs             int64 [n, 2]: (source, target). No block is a target twice, nor a target of
                      one pair and a source of another: the pairs are copied in any order.
    blocks            int64 [n]
"""

import torch
import triton
import triton.language as tl


def copy_blocks_reference(cache: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The changed cache (a new tensor)."""
    cache = cache.clone()
    cache[pairs[:, 1]] = cache[pairs[:, 0]]
    return cache


def clear_blocks_reference(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The changed cache (a new tensor)."""
    return cache.index_fill(0, blocks, 0)


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy in place. Raises ValueError on a layout the kernel does not read."""
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs must be int64 [n, 2]; got {pairs.dtype} {tuple(pairs.shape)}")
    _launch(k_cache, v_cache, pairs.contiguous(), pairs.shape[0], clear=False)


def clear_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """Zero in place. Raises ValueError on a layout the kernel does not read."""
    if blocks.dtype != torch.int64 or blocks.dim() != 1:
        raise ValueError(f"blocks must be int64 [n]; got {blocks.dtype} {tuple(blocks.shape)}")
    _launch(k_cache, v_cache, blocks.contiguous(), blocks.shape[0], clear=True)


def _launch(
    k_cache: torch.Tensor, v_cache: torch.Tensor, ids: torch.Tensor, n: int, clear: bool
) -> None:
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError("k_cache and v_cache must have one shape and dtype")
    if not (k_cache[:1].is_contiguous() and v_cache[:1].is_contiguous()):
        raise ValueError("the caches must be contiguous within a block")
    numel = k_cache[:1].numel()
    if n:
        _block_kernel[(triton.cdiv(numel, 2048), n)](
            k_cache, v_cache, ids, k_cache.stride(0), v_cache.stride(0), numel, CLEAR=clear,
            BLOCK=2048, num_warps=4,
        )  # fmt: skip


@triton.jit
def _block_kernel(
    k_ptr, v_ptr, ids_ptr, k_stride, v_stride, numel, CLEAR: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < numel
    if CLEAR:
        target = tl.load(ids_ptr + i)
        zeros = tl.zeros([BLOCK], k_ptr.dtype.element_ty)
        tl.store(k_ptr + target * k_stride + at, zeros, mask=live)
        tl.store(v_ptr + target * v_stride + at, zeros, mask=live)
    else:
        source = tl.load(ids_ptr + 2 * i)
        target = tl.load(ids_ptr + 2 * i + 1)
        k = tl.load(k_ptr + source * k_stride + at, mask=live)
        v = tl.load(v_ptr + source * v_stride + at, mask=live)
        tl.store(k_ptr + target * k_stride + at, k, mask=live)
        tl.store(v_ptr + target * v_stride + at, v, mask=live)
