"""The configurations that `headrace.kernels.aot` compiles. Shapes only: no tensor has memory.

A case is a call of a launcher, so that what is compiled is what the launcher would run: its tile,
its specialisations on strides and alignments, its number of warps and stages.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from headrace.kernels.batch_invariant_matmul import batch_invariant_matmul
from headrace.kernels.block_copy import clear_blocks, copy_blocks
from headrace.kernels.dequantizing_matmul import dequantizing_matmul
from headrace.kernels.embedding import embedding
from headrace.kernels.gated_activation import gelu_tanh_and_mul, silu_and_mul
from headrace.kernels.int8_dynamic_matmul import int8_dynamic_matmul
from headrace.kernels.logprobs import token_logprobs
from headrace.kernels.packed_weights import (
    BITS,
    TILE_COLUMNS,
    TILE_WORDS,
    NestedScales,
    PackedWeights,
)
from headrace.kernels.paged_attention import paged_attention
from headrace.kernels.penalties import count_tokens, penalize
from headrace.kernels.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.rotary import rotary_and_store
from headrace.kernels.sampling import sample
from headrace.kernels.shared_prefix_attention import PrefixGroups, shared_prefix_attention

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32)
HIDDEN = (576, 1024, 4096)


class Case(NamedTuple):
    """A configuration's name, as it stands in the table, and the call that launches it."""

    name: str
    launch: Callable[[], object]


def cases(capability: tuple[int, int]) -> list[Case]:
    """All cases for a device of `capability`; bfloat16 from 8.0 on."""
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        if dtype == torch.bfloat16 and capability < (8, 0):
            continue
        short = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        for family in FAMILIES:
            for name, launch in family(dtype):
                found.append(Case(f"{name} {short}", launch))
    names = [case.name for case in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases have one name: {sorted(names)}")
    return found


def _tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    for hidden in HIDDEN:
        x, w = _tensor(8, hidden, dtype=dtype), _tensor(hidden, dtype=dtype)
        yield Case(f"rms_norm {hidden}", partial(rms_norm, x, w, 1e-6))
        yield Case(f"add_rms_norm {hidden}", partial(add_rms_norm, x, x, w, 1e-6))


def _gated_activation(dtype: torch.dtype) -> Iterator[Case]:
    x = _tensor(8, 2 * 12288, dtype=dtype)
    yield Case("silu_and_mul", lambda: silu_and_mul(x))
    yield Case("gelu_tanh_and_mul", lambda: gelu_tanh_and_mul(x))


def _rotary(dtype: torch.dtype) -> Iterator[Case]:
    def case(
        head_dim: int, rotary_dim: int, block_size: int, interleaved: bool, norm: bool
    ) -> Case:
        q_heads, kv_heads, tokens = 32, 8, 4
        qkv = _tensor(tokens, q_heads + 2 * kv_heads, head_dim, dtype=dtype)
        q, k, v = qkv.split([q_heads, kv_heads, kv_heads], dim=1)
        cache = _tensor(64, block_size, kv_heads, head_dim, dtype=dtype)
        at = _tensor(tokens, dtype=torch.int64)
        table = _tensor(4096, rotary_dim, dtype=torch.float32)
        weight = _tensor(head_dim, dtype=dtype) if norm else None
        name = f"rotary {head_dim}/{rotary_dim} block{block_size}"
        name += " interleaved" * interleaved + " norm" * norm
        return Case(
            name,
            lambda: rotary_and_store(
                q, k, v, at, table, cache, cache, at,
                interleaved=interleaved, q_weight=weight, k_weight=weight,
            ),
        )  # fmt: skip

    for head_dim in HEAD_DIMS:
        for block_size in BLOCK_SIZES:
            yield case(head_dim, head_dim, block_size, False, False)
        yield case(head_dim, head_dim, 16, False, True)
        yield case(head_dim, head_dim, 16, True, False)
    yield case(80, 32, 16, False, False)
    yield case(128, 64, 16, False, False)


def _attention(
    dtype: torch.dtype,
    head_dim: int,
    mode: str,
    *,
    shared: bool = False,
    group: int = 4,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    speculated: int = 1,
) -> Case:
    num_seqs = 256 if mode == "decode" else 2
    decodes = mode in ("decode", "split")
    tokens = num_seqs * speculated if decodes else 512
    q = _tensor(tokens, 8 * group, head_dim, dtype=dtype)
    cache = _tensor(4096, block_size, 8, head_dim, dtype=dtype)
    lens = _tensor(num_seqs, dtype=torch.int32)
    starts = _tensor(num_seqs + 1, dtype=torch.int32)
    tables = _tensor(num_seqs, 256, dtype=torch.int32)
    launch: Callable[..., object] = paged_attention
    arguments: tuple[object, ...] = (q, cache, cache, tables, starts, lens)
    if shared:
        launch = shared_prefix_attention
        arguments += (PrefixGroups(starts, lens, lens, max_prefix_len=2048),)
    name = f"{'shared' if shared else 'paged'} {mode} {head_dim} group{group} block{block_size}"
    name += f" window{window}" * (window is not None) + " softcap" * (softcap is not None)
    name += f" speculated{speculated}" * (speculated > 1)
    call = partial(
        launch,
        *arguments,
        max_query_len=speculated if decodes else 512,
        max_seq_len=4096,
        scale=head_dim**-0.5,
        window=window,
        softcap=softcap,
        deterministic=mode == "deterministic",
        max_split_query_len=speculated,
    )
    return Case(name, call)


def _paged_attention(dtype: torch.dtype) -> Iterator[Case]:
    modes = ("decode", "split", "mixed", "deterministic")
    for head_dim in HEAD_DIMS:
        for mode in modes:
            yield _attention(dtype, head_dim, mode)
    if dtype == torch.float32:
        return
    for mode in modes:
        for group in (1, 7, 16):
            yield _attention(dtype, 128, mode, group=group)
        yield _attention(dtype, 128, mode, block_size=32)
        yield _attention(dtype, 256, mode, block_size=32, window=1024, softcap=50.0)
        yield _attention(dtype, 64, mode, window=128)
        yield _attention(dtype, 64, mode, speculated=5)


def _shared_prefix(dtype: torch.dtype) -> Iterator[Case]:
    for head_dim in HEAD_DIMS:
        for mode in ("decode", "deterministic"):
            yield _attention(dtype, head_dim, mode, shared=True)
    if dtype == torch.float32:
        return
    for mode in ("decode", "mixed"):
        for group in (1, 7, 16):
            yield _attention(dtype, 128, mode, shared=True, group=group)
        yield _attention(dtype, 256, mode, shared=True, block_size=32, window=1024, softcap=50.0)
        yield _attention(dtype, 64, mode, shared=True, speculated=5)


def _sampling(dtype: torch.dtype) -> Iterator[Case]:
    rows, vocab_size = 64, 151936
    logits = _tensor(rows, vocab_size, dtype=dtype)
    words = _tensor(rows, vocab_size // 32, dtype=torch.int32)
    number = _tensor(rows, dtype=torch.float32)
    whole = _tensor(rows, dtype=torch.int64)
    for filtered in (True, False):
        for bitmask in (None, words):
            name = "sample" + " filtered" * filtered + " bitmask" * (bitmask is not None)
            call = partial(
                sample, logits, vocab_size=vocab_size, temperature=number, top_k=whole,
                top_p=number, min_p=number, seed=whole, sample_index=whole, position=whole,
                bitmask=bitmask, filtered=filtered,
            )  # fmt: skip
            yield Case(name, call)
    yield Case(
        "token_logprobs",
        partial(token_logprobs, logits, whole, whole, vocab_size=vocab_size, num_top=20),
    )
    if dtype == torch.float32:
        counts = _tensor(rows, vocab_size, dtype=torch.int32)
        yield Case("count_tokens output", partial(count_tokens, counts, whole, whole))
        yield Case("count_tokens prompt", partial(count_tokens, counts, whole, whole, prompt=True))
        penalties = (number, number, number)
        yield Case("penalize", partial(penalize, logits, whole, counts, whole, *penalties))


def _embedding(dtype: torch.dtype) -> Iterator[Case]:
    for hidden in HIDDEN:
        weight, ids = _tensor(1024, hidden, dtype=dtype), _tensor(8, dtype=torch.int64)
        yield Case(f"embedding {hidden}", partial(embedding, ids, weight, size=1000))


def _block_copy(dtype: torch.dtype) -> Iterator[Case]:
    for block_size in BLOCK_SIZES:
        cache = _tensor(64, block_size, 8, 128, dtype=dtype)
        pairs, blocks = _tensor(4, 2, dtype=torch.int64), _tensor(4, dtype=torch.int64)
        yield Case(f"copy_blocks block{block_size}", partial(copy_blocks, cache, cache, pairs))
        yield Case(f"clear_blocks block{block_size}", partial(clear_blocks, cache, cache, blocks))


def _matmul(dtype: torch.dtype) -> Iterator[Case]:
    for n, k in ((4096, 4096), (24576, 4096), (4096, 12288), (151936, 1024), (1152, 576)):
        x, w = _tensor(64, k, dtype=dtype), _tensor(n, k, dtype=dtype)
        yield Case(f"batch_invariant_matmul {n}x{k}", partial(batch_invariant_matmul, x, w))
        if (n, k) == (4096, 4096):
            call = partial(batch_invariant_matmul, x, w, _tensor(n, dtype=dtype))
            yield Case(f"batch_invariant_matmul {n}x{k} bias", call)


def _dequantizing(dtype: torch.dtype) -> Iterator[Case]:
    """Batch sizes: without tensor cores, few rows with splits, a prefill chunk."""

    def weights(kind: str, n: int, k: int, group: int, zeros: bool, parts: int) -> PackedWeights:
        bits, group = BITS[kind], min(group, k)
        tiles = (-(-k // TILE_COLUMNS[bits]), n, TILE_WORDS[bits])
        groups = (-(-k // group), n)
        number, whole = torch.float32, torch.int64
        nested = NestedScales(
            _tensor(parts, 2, dtype=whole),
            _tensor(64, dtype=number),
            _tensor(parts, 257, dtype=number),
        )
        return PackedWeights(
            _tensor(*tiles, dtype=torch.int32),
            _tensor(*groups, dtype=torch.uint8 if parts else torch.float16),
            _tensor(*groups, dtype=torch.uint8) if zeros else None,
            kind,
            group,
            k,
            2 ** (bits - 1) if kind.startswith("int") else 0,
            _tensor(16, dtype=number) if kind == "code4" else None,
            nested if parts else None,
        )

    settings = [
        *(("int4", 128, True, 0), ("int3", 64, True, 0), ("int2", 64, True, 0)),
        *(("int8", 1 << 20, False, 0), ("fp8", 128, False, 0), ("code4", 64, False, 3)),
    ]
    if dtype != torch.float16:
        settings = settings[:1]
    for kind, group, zeros, parts in settings:
        # 576 columns end in the middle of a step and, at 3 bits, of a tile.
        for n, k in ((4096, 4096), (1152, 576)):
            for rows in (1, 16, 256):
                if (n, k) == (1152, 576) and (kind != "int3" or rows == 256):
                    continue
                if dtype == torch.float32 and rows > 1:
                    continue
                packed = weights(kind, n, k, group, zeros, parts)
                x, bias = _tensor(rows, k, dtype=dtype), _tensor(n, dtype=torch.float32)
                name = f"dequantizing_matmul {kind} {n}x{k} rows{rows}"
                name += f" group{group}" * (group < k) + " zeros" * zeros
                name += f" nested{parts}" * (parts > 0)
                yield Case(name, partial(dequantizing_matmul, x, packed, bias))


def _int8_dynamic(dtype: torch.dtype) -> Iterator[Case]:
    n, k = 4096, 4096
    w, scale = _tensor(n, k, dtype=torch.int8), _tensor(n, dtype=torch.float32)
    for rows in (16, 256):
        x = _tensor(rows, k, dtype=dtype)
        call = partial(int8_dynamic_matmul, x, w, scale, scale)
        yield Case(f"int8_dynamic_matmul {n}x{k} rows{rows}", call)


FAMILIES = (
    _rms_norm,
    _gated_activation,
    _rotary,
    _paged_attention,
    _shared_prefix,
    _sampling,
    _embedding,
    _block_copy,
    _matmul,
    _dequantizing,
    _int8_dynamic,
)
