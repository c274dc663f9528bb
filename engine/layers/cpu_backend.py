"""The CPU backend: compiled kernels on torch's own threads, float32.

Layouts: keys [num_blocks, kv_heads, head_dim, block_size], so that a vector register holds one
dimension of 16 keys and scores need no horizontal sums; values [num_blocks, kv_heads, block_size,
head_dim].
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.layers import cpu_tokenwise
from headrace.engine.layers.backend import (
    AttentionMetadata,
    HeadNorms,
    LayerKV,
    SharedPrefix,
    lazy_zeros,
)
from headrace.engine.layers.cpu_attention_tiles import STATE_FLOATS
from headrace.engine.layers.cpu_paged_attention import (
    CHUNK,
    RESUME,
    SAVE,
    START,
    TILE_FIELDS,
    paged_attention,
    scratch_floats,
)
from headrace.engine.layers.cpu_simd import LANES
from headrace.engine.layers.openmp import launcher
from headrace.engine.layers.rope import rope_table
from headrace.engine.models.config import ModelConfig
from headrace.engine.quant.kv import is_quantized, kernel_kind

_TILE_ROWS = 48
"""Query rows (tokens times heads of a group) that share one pass over the keys."""
_MANY_TILES = 32
"""From so many tiles on a thread claims one with all its heads: the blocks of a token's heads lie
side by side, and each head's first keys are asked for during the one before."""
_DIRECT_ROWS = 8
"""Query rows up to which int8 keys and values are widened in registers."""

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Tiles:
    """One launch of the attention kernel: `fields` int64 [tiles, TILE_FIELDS], `tokens` int64."""

    fields: NDArray[np.int64]
    tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """`passes`: the launches of layers with full attention, shared prefixes first; `whole`: the
    launch of layers with a window. Arrays are held here because kernels see only addresses."""

    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    block_tables: NDArray[np.int64]
    passes: Sequence[_Tiles]
    whole: _Tiles
    state: Tensor


class CpuBackend:
    name = "cpu"
    dtype = torch.float32

    def __init__(
        self, config: ModelConfig, max_model_len: int, deterministic: bool = False
    ) -> None:
        """`deterministic`: a query's result has the same bits whatever else is in the batch."""
        cos, sin = rope_table(config.rope, config.head_dim, max_model_len)
        self._cos, self._sin = cos.contiguous(), sin.contiguous()
        self._config = config
        self._deterministic = deterministic
        self._launch = launcher()
        self._tile_tokens = max(1, _TILE_ROWS // config.group_size)
        rows = self._tile_tokens * config.group_size
        self._scratch_stride = scratch_floats(rows, config.head_dim)
        self._scratch = torch.empty(torch.get_num_threads() * self._scratch_stride)
        self._query_scale = _bits(config.head_dim**-0.5 * _LOG2_E)
        self._eps = _bits(config.rms_norm_eps)
        self._counters = np.zeros(2, dtype=np.int64)
        self._counter = self._counters.ctypes.data

    @staticmethod
    def serves(config: ModelConfig, block_size: int) -> bool:
        """Whether the kernels take these shapes: heads and blocks of whole vectors."""
        return config.head_dim % LANES == 0 and block_size % LANES == 0

    def allocate_kv(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> list[LayerKV]:
        heads, head_dim = config.num_kv_heads, config.head_dim

        def pool(*shape: int) -> Tensor:
            return lazy_zeros((num_blocks, heads, *shape), dtype)

        def scales() -> Tensor | None:
            shape = (num_blocks, heads, block_size)
            return lazy_zeros(shape, torch.float32) if is_quantized(dtype) else None

        return [
            LayerKV(pool(head_dim, block_size), pool(block_size, head_dim), scales(), scales())
            for _ in range(config.num_layers)
        ]

    def prepare(self, metadata: AttentionMetadata) -> CpuPlan:
        if self._deterministic:
            metadata = replace(metadata, prefixes=_whole_chunks(metadata))
        num_tokens = len(metadata.positions)
        flat = np.arange(num_tokens, dtype=np.int64)
        whole = _Tiles(self._own_tiles(metadata, None), flat)
        passes = [whole]
        if metadata.prefixes:
            shared = np.zeros(len(metadata.context_lens), dtype=np.int64)
            for prefix in metadata.prefixes:
                shared[prefix.rows] = prefix.num_blocks
            own = _Tiles(self._own_tiles(metadata, shared), flat)
            passes = [self._prefix_tiles(metadata), own]
        return CpuPlan(
            positions=metadata.positions,
            slots=metadata.slots,
            block_tables=np.ascontiguousarray(metadata.block_tables, dtype=np.int64),
            passes=passes,
            whole=whole,
            state=torch.empty(num_tokens * self._config.num_heads * STATE_FLOATS),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, 0, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, delta.data_ptr(), weight, eps)

    def rope_and_store(
        self, qkv: Tensor, kv: LayerKV, plan: CpuPlan, norms: HeadNorms | None
    ) -> Tensor:
        config = self._config
        tokens = len(qkv)
        self._run(
            cpu_tokenwise.rope_and_store,
            self._counter,
            qkv.data_ptr(),
            tokens,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            plan.positions.ctypes.data,
            plan.slots.ctypes.data,
            kv.key.data_ptr(),
            kv.value.data_ptr(),
            kv.key.shape[3],
            self._query_scale,
            0 if norms is None else norms.query.data_ptr(),
            0 if norms is None else norms.key.data_ptr(),
            self._eps,
            _grain(tokens),
            *_quantization(kv),
        )
        return qkv

    def attention(self, query: Tensor, kv: LayerKV, plan: CpuPlan, window: int | None) -> Tensor:
        config = self._config
        out = torch.empty(len(query), config.num_heads * config.head_dim)
        for tiles in plan.passes if window is None else (plan.whole,):
            self._counters[1] = 0
            self._run(
                paged_attention,
                self._counter,
                self._counter + 8,
                query.data_ptr(),
                query.shape[1],
                out.data_ptr(),
                plan.state.data_ptr(),
                tiles.fields.ctypes.data,
                len(tiles.fields),
                tiles.tokens.ctypes.data,
                plan.positions.ctypes.data,
                plan.block_tables.ctypes.data,
                plan.block_tables.shape[1],
                kv.key.data_ptr(),
                kv.value.data_ptr(),
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                kv.key.shape[3],
                window or 0,
                self._scratch.data_ptr(),
                self._scratch_stride,
                *_quantization(kv),
                config.num_kv_heads if len(tiles.fields) >= _MANY_TILES else 1,
                0 if self._deterministic else _DIRECT_ROWS,
            )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2)
        self._run(
            cpu_tokenwise.silu_mul,
            self._counter,
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            width // 2,
            _grain(rows),
        )
        return out

    def _norm(self, x: Tensor, delta: int, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._run(
            cpu_tokenwise.add_rms_norm,
            self._counter,
            x.data_ptr(),
            delta,
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            _bits(eps),
            _grain(len(x)),
        )
        return out

    def _run(self, kernel: Any, *args: int) -> None:
        self._counters[0] = 0
        packed = np.array(args, dtype=np.int64)
        self._launch(kernel.address, packed.ctypes.data)

    def _own_tiles(
        self, metadata: AttentionMetadata, shared: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Tiles of consecutive tokens of a row, over its keys from the shared blocks on; the
        longest first, so that the threads finish together."""
        starts = metadata.query_starts.astype(np.int64)
        lengths = np.diff(starts)
        per_row = -(-lengths // self._tile_tokens)
        row = np.repeat(np.arange(len(lengths)), per_row)
        index = np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
        offset = index * self._tile_tokens
        fields = np.zeros((len(row), TILE_FIELDS), dtype=np.int64)
        fields[:, 0] = starts[row] + offset
        fields[:, 1] = np.minimum(lengths[row] - offset, self._tile_tokens)
        fields[:, 2] = row
        fields[:, 4] = metadata.positions[fields[:, 0] + fields[:, 1] - 1] + 1
        if shared is not None:
            fields[:, 3] = shared[row] * metadata.block_size
            fields[:, 5] = np.where(shared[row] > 0, RESUME, START)
        return fields[np.argsort((fields[:, 3] - fields[:, 4]) * fields[:, 1], kind="stable")]

    def _prefix_tiles(self, metadata: AttentionMetadata) -> _Tiles:
        """Tiles of any tokens of a group, over the shared blocks alone."""
        tokens, tiles, first = [], [], 0
        for prefix in metadata.prefixes:
            begin = metadata.query_starts[prefix.rows].astype(np.int64)
            lengths = metadata.query_starts[prefix.rows + 1] - begin
            total = int(lengths.sum())
            offsets = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            tokens.append(np.repeat(begin, lengths) + offsets)
            count = -(-total // self._tile_tokens)
            fields = np.zeros((count, TILE_FIELDS), dtype=np.int64)
            fields[:, 0] = first + np.arange(count) * self._tile_tokens
            fields[:, 1] = np.minimum(first + total - fields[:, 0], self._tile_tokens)
            fields[:, 2] = prefix.rows[0]
            fields[:, 4] = prefix.num_blocks * metadata.block_size
            fields[:, 5] = SAVE
            tiles.append(fields)
            first += total
        return _Tiles(np.concatenate(tiles), np.concatenate(tokens))


def _whole_chunks(metadata: AttentionMetadata) -> list[SharedPrefix]:
    """The shared prefixes, cut where a query by itself would also end a chunk of keys.

    The rest of the kernel needs no care: each score and each weighted sum adds in the order of its
    dimensions and keys, keys that a query does not see change nothing, and a state that is saved
    and resumed is the same float32 numbers.
    """
    step = CHUNK // math.gcd(CHUNK, metadata.block_size)
    return [
        replace(found, num_blocks=found.num_blocks // step * step)
        for found in metadata.prefixes
        if found.num_blocks >= step
    ]


def _quantization(kv: LayerKV) -> tuple[int, int, int]:
    """Kind of the keys and values, and where their scales lie."""
    if kv.key_scale is None or kv.value_scale is None:
        return 0, 0, 0
    return kernel_kind(kv.key.dtype), kv.key_scale.data_ptr(), kv.value_scale.data_ptr()


def _grain(rows: int) -> int:
    """Rows that a thread claims at once."""
    return 1 if rows < 64 else 16


def _bits(value: float) -> int:
    """The bits of a float64 as an int64, as kernels take their scalars."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
