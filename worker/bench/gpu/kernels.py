"""Kernels beside torch's own on the same inputs: achieved bytes/s or FLOP/s over what the device
was seen to do. Bytes and operations are counted by hand, each input read once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from headrace.engine.layers.backend import LayerKV
from headrace.engine.layers.prompt_attention import PromptRow, attend_prompts
from headrace.kernels.batch_invariant_matmul import batch_invariant_matmul
from headrace.kernels.gated_activation import silu_and_mul
from headrace.kernels.paged_attention import paged_attention
from headrace.kernels.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.sampling import sample
from headrace.kernels.shared_prefix_attention import PrefixGroups, shared_prefix_attention
from headrace.worker.bench.gpu.device import Ceilings, Device, measured_ceilings
from headrace.worker.bench.gpu.record import Record

Call = Callable[[], object]
_BLOCK = 16


class Bench:
    """Times a kernel and its counterpart and writes a row."""

    def __init__(self, where: Device, record: Record) -> None:
        self.where = where
        self.ceilings: Ceilings = measured_ceilings(where)
        self._record = record
        record.note(
            copy_gb_per_s=self.ceilings.bytes_per_s / 1e9,
            matmul_tflops=self.ceilings.flops / 1e12,
        )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.where.dtype, device=self.where.device)

    def compare(
        self,
        what: str,
        ours: Call,
        theirs: Call | None,
        beside: str,
        *,
        moved: float = 0.0,
        operations: float = 0.0,
        at_least: float | None = None,
    ) -> None:
        """`moved` bytes and `operations`; the longer of the two times is the roofline. With
        `at_least` the row is how many times faster than `theirs` it is."""
        seconds = self.where.seconds(ours)
        floor = max(moved / self.ceilings.bytes_per_s, operations / self.ceilings.flops)
        figures: dict[str, Any] = {
            "microseconds": seconds * 1e6,
            "roofline_share": floor / seconds,
            "gb_per_s": moved / seconds / 1e9,
            "tflops": operations / seconds / 1e12,
            "beside": beside,
        }
        times = None
        if theirs is not None:
            figures["their_microseconds"] = self.where.seconds(theirs) * 1e6
            times = figures["their_microseconds"] / figures["microseconds"]
            figures["times_faster"] = times
        if at_least is not None and times is not None:
            self._record.add(what, times, f"times {beside}", at_least=at_least, **figures)
        else:
            self._record.add(what, seconds * 1e6, "us", **figures)


def run(where: Device, record: Record) -> None:
    bench = Bench(where, record)
    for item in (_norms, _gate, _decode, _prefill, _prompts, _shared_prefix, _matmul, _sampling):
        item(bench)
        where.released()


def _norms(bench: Bench) -> None:
    rows, hidden = (4, 64) if bench.where.tiny else (8192, 4096)
    x, residual, weight = (
        bench.normal(rows, hidden),
        bench.normal(rows, hidden),
        bench.normal(hidden),
    )
    size = x.numel() * x.element_size()
    bench.compare(
        f"rms_norm {rows}x{hidden}",
        lambda: rms_norm(x, weight, 1e-6),
        lambda: functional.rms_norm(x, (hidden,), weight, 1e-6),
        "torch rms_norm",
        moved=2 * size,
    )
    bench.compare(
        f"add_rms_norm {rows}x{hidden}",
        lambda: add_rms_norm(x, residual, weight, 1e-6),
        lambda: functional.rms_norm(residual.add_(x), (hidden,), weight, 1e-6),
        "torch add, rms_norm",
        moved=4 * size,
    )


def _gate(bench: Bench) -> None:
    rows, inner = (4, 64) if bench.where.tiny else (4096, 12288)
    x = bench.normal(rows, 2 * inner)
    bench.compare(
        f"silu_and_mul {rows}x{inner}",
        lambda: silu_and_mul(x),
        lambda: functional.silu(x[:, :inner]) * x[:, inner:],
        "torch silu, mul",
        moved=1.5 * x.numel() * x.element_size(),
    )


def _paged(
    bench: Bench, rows: int, keys: int, queries: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of paged attention over `rows` sequences of `keys` tokens whose blocks lie in a
    random order, and those of SDPA over as many contiguous keys. 32 query and 8 KV heads."""
    heads, kv_heads, dim = (4, 2, 16) if bench.where.tiny else (32, 8, 128)
    device, width = bench.where.device, -(-keys // _BLOCK)
    q = bench.normal(rows * queries, heads, dim)
    paged = {
        "q": q,
        "k_cache": bench.normal(rows * width, _BLOCK, kv_heads, dim),
        "v_cache": bench.normal(rows * width, _BLOCK, kv_heads, dim),
        "block_tables": torch.randperm(rows * width, device=device).view(rows, width).int(),
        "query_start_loc": torch.arange(
            0, rows * queries + 1, queries, device=device, dtype=torch.int32
        ),
        "seq_lens": torch.full((rows,), keys, device=device, dtype=torch.int32),
        "max_query_len": queries,
        "max_seq_len": keys,
        "scale": dim**-0.5,
    }
    dense = {
        "query": q.view(rows, queries, heads, dim).transpose(1, 2),
        "key": bench.normal(rows, kv_heads, keys, dim),
        "value": bench.normal(rows, kv_heads, keys, dim),
        "enable_gqa": True,
    }
    return paged, dense


def _decode(bench: Bench) -> None:
    for rows, keys in ((2, 40),) if bench.where.tiny else ((256, 1024), (8, 16384)):
        paged, dense = _paged(bench, rows, keys, 1)
        bench.compare(
            f"paged decode {rows} x {keys} keys",
            partial(paged_attention, **paged),
            partial(functional.scaled_dot_product_attention, **dense),
            "SDPA on contiguous keys",
            moved=2 * dense["key"].numel() * dense["key"].element_size(),
        )


def _prefill(bench: Bench) -> None:
    rows, keys = (1, 40) if bench.where.tiny else (4, 4096)
    paged, dense = _paged(bench, rows, keys, keys)
    _, heads, _, dim = dense["query"].shape
    bench.compare(
        f"paged prefill {rows} x {keys}",
        partial(paged_attention, **paged),
        partial(functional.scaled_dot_product_attention, **dense, is_causal=True),
        "SDPA, causal",
        operations=2.0 * rows * heads * keys * keys * dim,
    )


def _prompts(bench: Bench) -> None:
    """The two ways between which the engine chooses when it starts: a prompt, and a chunk of one
    with context in the cache before it; torch's with the copy of the blocks that it needs."""
    shapes = ((40, 40), (8, 40)) if bench.where.tiny else ((2048, 2048), (2048, 8192))
    for queries, keys in shapes:
        paged, _ = _paged(bench, 1, keys, queries)
        q: torch.Tensor = paged["q"]
        _, heads, dim = q.shape
        kv = LayerKV(paged["k_cache"], paged["v_cache"])
        rows = (PromptRow(row=0, start=0, end=queries, keys=keys),)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        bench.compare(
            f"prompt {queries} of {keys} keys",
            partial(paged_attention, **paged),
            partial(attend_prompts, q, kv, paged["block_tables"], rows, dim**-0.5, out),
            "blocks copied, SDPA",
            operations=4.0 * heads * dim * queries * (keys - queries / 2),
        )


def _shared_prefix(bench: Bench) -> None:
    rows, prefix, own = (3, 32, 20) if bench.where.tiny else (256, 2048, 64)
    paged, _ = _paged(bench, rows, prefix + own, 1)
    tables = paged["block_tables"]
    tables[:, : prefix // _BLOCK] = tables[:1, : prefix // _BLOCK].clone()
    device = bench.where.device
    groups = PrefixGroups(
        torch.tensor([0, rows], device=device, dtype=torch.int32),
        torch.arange(rows, device=device, dtype=torch.int32),
        torch.full((rows,), prefix, device=device, dtype=torch.int32),
        prefix,
    )
    cache = paged["k_cache"]
    token_bytes = cache[0, 0].numel() * cache.element_size()
    bench.compare(
        f"shared prefix {rows} x ({prefix} + {own})",
        partial(shared_prefix_attention, **paged, groups=groups),
        partial(paged_attention, **paged),
        "our paged attention",
        moved=2 * token_bytes * (prefix + rows * own),
    )


def _matmul(bench: Bench) -> None:
    shapes = ((4, 64, 64),) if bench.where.tiny else ((256, 4096, 4096), (256, 24576, 4096))
    for rows, n, k in shapes:
        x, w = bench.normal(rows, k), bench.normal(n, k)
        bench.compare(
            f"batch_invariant_matmul {rows}x{n}x{k}",
            partial(batch_invariant_matmul, x, w),
            partial(functional.linear, x, w),
            "torch linear",
            moved=w.numel() * w.element_size(),
            operations=2.0 * rows * n * k,
        )


def _sampling(bench: Bench) -> None:
    rows, vocab = (2, 500) if bench.where.tiny else (256, 151936)
    device = bench.where.device
    logits = bench.normal(rows, vocab) * 3

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    whole = column(0, torch.int64)
    for name, temperature, top_p in (("greedy", 0.0, 1.0), ("top-p 0.9", 1.0, 0.9)):
        settings = {
            "temperature": column(temperature, torch.float32),
            "top_k": whole,
            "top_p": column(top_p, torch.float32),
            "min_p": column(0.0, torch.float32),
            "seed": whole,
            "sample_index": whole,
            "position": whole,
        }
        greedy = temperature == 0.0

        def ours(settings: dict[str, torch.Tensor] = settings, greedy: bool = greedy) -> object:
            return sample(logits, vocab_size=vocab, filtered=not greedy, **settings)

        def theirs(greedy: bool = greedy) -> object:
            if greedy:
                return logits.argmax(1)
            ordered, order = logits.float().softmax(1).sort(dim=1, descending=True)
            kept = ordered.masked_fill(ordered.cumsum(1) - ordered > 0.9, 0.0)
            return order.gather(1, torch.multinomial(kept, 1))

        bench.compare(
            f"sample {name} {rows}x{vocab}",
            ours,
            theirs,
            "torch argmax" if greedy else "torch sort, multinomial",
            moved=logits.numel() * logits.element_size(),
        )
