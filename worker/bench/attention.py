"""The CPU's attention kernel alone: what a step of all layers costs, and a pair of query and key.

Shapes are SmolLM2-135M's; no weights are needed. Every layer's keys and values lie in memory of
their own and in shuffled blocks, as the engine's do, so that what is read comes from where it comes
from there. One layer's result is compared with plain torch on the same numbers: a fast answer that
is wrong shows. Run as `python -m headrace.worker.bench.attention`; figures go to
build/bench/attention.json.
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.layers.backend import AttentionMetadata, Backend, LayerKV, SharedPrefix
from headrace.engine.layers.cpu_backend import CpuBackend
from headrace.engine.layers.torch_backend import TorchBackend
from headrace.engine.models.config import ModelConfig, RopeConfig
from headrace.worker.bench.machine import describe_cpu
from headrace.worker.bench.report import OUT, figure, markdown, write

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig("default", theta=100000.0),
    tie_word_embeddings=True,
    sliding_windows=(None,) * 30,
)
"""SmolLM2-135M-Instruct's config.json."""

KV_TYPES = {"float32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows: each has `past` tokens behind it, the first `shared` of them common to all
    rows and in the same blocks (whole ones), and computes `queries` more."""

    name: str
    rows: int
    past: int
    queries: int = 1
    shared: int = 0

    @property
    def length(self) -> int:
        """Tokens of a row when the step is done."""
        return self.past + self.queries

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, itself included, for one head of one layer."""
        return self.rows * (self.queries * self.past + self.queries * (self.queries + 1) // 2)


BATCHES = (
    Batch("a prompt of 512", rows=1, past=0, queries=512),
    Batch("a chunk of 512 after 1,536", rows=1, past=1536, queries=512),
    Batch("64 decodes, 250 keys each", rows=64, past=249),
    Batch("64 decodes, 512 shared keys and 80 of their own", rows=64, past=591, shared=512),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One step's attention over all layers. Seconds are medians, CPU seconds those of all threads;
    `largest_difference`: from plain torch, where values are near 1."""

    batch: str
    kv: str
    cpu_s: float
    lowest_cpu_s: float
    wall_s: float
    ns_per_pair: float
    gflops: float
    largest_difference: float


@torch.inference_mode()
def measure(
    batch: Batch, kv: str, config: ModelConfig = MODEL, threads: int = 1, repeats: int = 15
) -> Measured:
    """`ns_per_pair` and `gflops` are of a CPU second: of a query head and a key, 4 * head_dim
    operations (the softmax is not counted)."""
    torch.set_num_threads(threads)
    tables = block_tables(batch)
    backend = CpuBackend(config, batch.length)
    layers = backend.allocate_kv(config, int(tables.max()) + 1, BLOCK, KV_TYPES[kv])
    query, step = _fill(backend, batch, tables, config, layers[0])
    for layer in layers[1:]:
        _copy(layers[0], layer)
    plan = backend.prepare(step)
    out = backend.attention(query, layers[0], plan, None)
    expected = _expected(batch, tables, config, KV_TYPES[kv])
    difference = float((out - expected).abs().max())

    cpu, wall = [], []
    for repeat in range(repeats + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        for layer in layers:
            backend.attention(query, layer, plan, None)
        if repeat > 0:  # the first one warms up
            cpu.append(time.process_time() - cpu_started)
            wall.append(time.perf_counter() - started)
    pairs = batch.pairs * config.num_heads * config.num_layers
    seconds = statistics.median(cpu)
    return Measured(
        batch=batch.name,
        kv=kv,
        cpu_s=seconds,
        lowest_cpu_s=min(cpu),
        wall_s=statistics.median(wall),
        ns_per_pair=1e9 * seconds / pairs,
        gflops=4 * config.head_dim * pairs / seconds / 1e9,
        largest_difference=difference,
    )


def block_tables(batch: Batch) -> NDArray[np.int32]:
    """Each row's blocks, int32 [rows, width], in an order that memory does not have."""
    common, width = batch.shared // BLOCK, -(-batch.length // BLOCK)
    own = width - common
    blocks = np.random.default_rng(0).permutation(common + batch.rows * own).astype(np.int32)
    tables = np.empty((batch.rows, width), dtype=np.int32)
    tables[:, :common] = blocks[:common]
    tables[:, common:] = blocks[common:].reshape(batch.rows, own)
    return tables


def metadata(
    batch: Batch, tables: NDArray[np.int32], first: Sequence[int], last: int
) -> AttentionMetadata:
    """A step in which each row computes its tokens from `first` (of that row) to `last`."""
    positions = [np.arange(start, last, dtype=np.int64) for start in first]
    slots = [
        table[position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK
        for table, position in zip(tables, positions, strict=True)
    ]
    prefix = SharedPrefix(np.arange(batch.rows), batch.shared // BLOCK)
    return AttentionMetadata(
        block_size=BLOCK,
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        query_starts=np.cumsum([0, *(len(p) for p in positions)]).astype(np.int32),
        context_lens=np.full(batch.rows, last, dtype=np.int32),
        block_tables=tables,
        prefixes=[prefix] if prefix.num_blocks else [],
    )


def _fill(
    backend: Backend,
    batch: Batch,
    tables: NDArray[np.int32],
    config: ModelConfig,
    layer: LayerKV,
) -> tuple[Tensor, AttentionMetadata]:
    """Random keys and values for all tokens, stored as the engine stores them; returns the step's
    queries and the step. The numbers are the same for every backend."""
    source = torch.Generator().manual_seed(0)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    if batch.past:
        # The first row computes what all share.
        past = metadata(
            replace(batch, shared=0),
            tables,
            [0, *[batch.shared] * (batch.rows - 1)],
            batch.past,
        )
        qkv = torch.randn(len(past.slots), width, generator=source)
        backend.rope_and_store(qkv, layer, backend.prepare(past), None)
    step = metadata(batch, tables, [batch.past] * batch.rows, batch.length)
    qkv = torch.randn(len(step.slots), width, generator=source)
    return backend.rope_and_store(qkv, layer, backend.prepare(step), None), step


def _copy(source: LayerKV, target: LayerKV) -> None:
    target.key.copy_(source.key)
    target.value.copy_(source.value)
    for own, other in (
        (target.key_scale, source.key_scale),
        (target.value_scale, source.value_scale),
    ):
        if own is not None and other is not None:
            own.copy_(other)


def _expected(
    batch: Batch, tables: NDArray[np.int32], config: ModelConfig, dtype: torch.dtype
) -> Tensor:
    """One layer's result in plain torch."""
    config = replace(config, num_layers=1, sliding_windows=(None,))
    backend = TorchBackend(config, batch.length, torch.float32, torch.device("cpu"))
    (layer,) = backend.allocate_kv(config, int(tables.max()) + 1, BLOCK, dtype)
    query, step = _fill(backend, batch, tables, config, layer)
    return backend.attention(query, layer, backend.prepare(step), None)


def table(rows: Iterable[Measured]) -> str:
    """Markdown, one line a batch and type."""
    head = ["step", "keys and values", "CPU ms", "lowest", "ms", "ns a pair", "GFLOP/s", "off by"]
    return markdown(
        head,
        [
            (
                *(row.batch, row.kv, figure(1e3 * row.cpu_s), figure(1e3 * row.lowest_cpu_s)),
                *(figure(1e3 * row.wall_s), figure(row.ns_per_pair), figure(row.gflops)),
                f"{row.largest_difference:.1e}",
            )
            for row in rows
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="headrace.worker.bench.attention", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=MODEL.num_layers)
    parser.add_argument("--kv", nargs="+", choices=KV_TYPES, default=["float32", "int8"])
    parser.add_argument("--out", type=Path, default=OUT / "attention.json")
    options = parser.parse_args(arguments)
    config = replace(MODEL, num_layers=options.layers, sliding_windows=(None,) * options.layers)
    rows = [
        measure(batch, kv, config, options.threads, options.repeats)
        for batch in BATCHES
        for kv in options.kv
    ]
    settings = {name: getattr(options, name) for name in ("threads", "repeats", "layers")}
    write(options.out, {**settings, "rows": [asdict(row) for row in rows]})
    print(
        f"{describe_cpu()}\nAttention of {options.layers} layers ({config.num_heads} heads of"
        f" {config.head_dim} over {config.num_kv_heads}), threads: {options.threads}, medians of"
        f" {options.repeats}:\n\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
