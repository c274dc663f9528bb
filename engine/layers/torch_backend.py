"""The backend in plain torch operations: right on every device, fast on none.

KV layout [num_blocks, block_size, num_kv_heads, head_dim] for keys and for values. It serves where
a faster backend cannot (no numba, odd head sizes, 16-bit types), and as the reference in tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headrace.engine.layers.backend import AttentionMetadata, HeadNorms, LayerKV, lazy_zeros
from headrace.engine.layers.rope import rope_table
from headrace.engine.models.config import ModelConfig
from headrace.engine.quant.kv import dequantize_heads, is_quantized, quantize_heads

_GATHER_BYTES = 1 << 28  # most bytes of keys that one gather copies


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Rows with one query length, attended to together: `tokens` [rows, length] flat indices,
    `blocks` [rows, width], `first` the position of the first gathered key, `lens` [rows]."""

    tokens: Tensor
    blocks: Tensor
    first: Tensor
    lens: Tensor


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """`own` leaves out what `prefixes` (tokens of the group, their blocks) cover; `whole` does not:
    layers with a sliding window use it."""

    positions: Tensor
    slots: Tensor
    prefixes: Sequence[tuple[Tensor, Tensor]]
    own: Sequence[_Bucket]
    whole: Sequence[_Bucket]


class TorchBackend:
    name = "torch"

    def __init__(
        self, config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self._config = config
        self._device = device
        self._scale = config.head_dim**-0.5
        cos, sin = rope_table(config.rope, config.head_dim, max_model_len)
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin = torch.cat((sin, sin), dim=-1).to(device, dtype)

    def allocate_kv(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> list[LayerKV]:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)

        def pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            if self._device.type == "cpu":
                return lazy_zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=self._device)

        def layer() -> LayerKV:
            if not is_quantized(dtype):
                return LayerKV(pool(shape, dtype), pool(shape, dtype))
            scales = [pool(shape[:-1], torch.float32) for _ in range(2)]
            return LayerKV(pool(shape, dtype), pool(shape, dtype), *scales)

        return [layer() for _ in range(config.num_layers)]

    def prepare(self, metadata: AttentionMetadata) -> TorchPlan:
        num_rows = len(metadata.context_lens)
        shared = np.zeros(num_rows, dtype=np.int64)
        prefixes = []
        for prefix in metadata.prefixes:
            shared[prefix.rows] = prefix.num_blocks
            tokens = np.concatenate(
                [np.arange(*metadata.query_starts[row : row + 2]) for row in prefix.rows]
            )
            blocks = metadata.block_tables[prefix.rows[0], : prefix.num_blocks]
            prefixes.append((self._tensor(tokens), self._tensor(blocks)))
        whole = self._buckets(metadata, np.zeros(num_rows, dtype=np.int64))
        own = self._buckets(metadata, shared) if prefixes else whole
        return TorchPlan(
            positions=self._tensor(metadata.positions),
            slots=self._tensor(metadata.slots),
            prefixes=prefixes,
            own=own,
            whole=whole,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normed.to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(x.add_(delta), weight, eps)

    def rope_and_store(
        self, qkv: Tensor, kv: LayerKV, plan: TorchPlan, norms: HeadNorms | None
    ) -> Tensor:
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        query, rest = heads[:, : config.num_heads], heads[:, config.num_heads :]
        key, value = rest.chunk(2, dim=1)
        if norms is not None:
            query = self.rms_norm(query, norms.query, config.rms_norm_eps)
            key = self.rms_norm(key, norms.key, config.rms_norm_eps)
        cos = self._cos[plan.positions].unsqueeze(1)
        sin = self._sin[plan.positions].unsqueeze(1)
        _store(kv.key, kv.key_scale, plan.slots, _rotated(key, cos, sin))
        _store(kv.value, kv.value_scale, plan.slots, value.contiguous())
        return _rotated(query, cos, sin)

    def attention(self, query: Tensor, kv: LayerKV, plan: TorchPlan, window: int | None) -> Tensor:
        out = torch.zeros_like(query)
        use_prefixes = window is None and bool(plan.prefixes)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        if use_prefixes:
            for tokens, blocks in plan.prefixes:
                keys = _gathered(kv.key, kv.key_scale, blocks).flatten(0, 1).unsqueeze(0)
                values = _gathered(kv.value, kv.value_scale, blocks).flatten(0, 1).unsqueeze(0)
                part, part_lse = self._attend(query[tokens].unsqueeze(0), keys, values, None)
                out[tokens], lse[tokens] = part[0].to(out.dtype), part_lse[0]
        for bucket in plan.own if use_prefixes else plan.whole:
            keys = _gathered(kv.key, kv.key_scale, bucket.blocks).flatten(1, 2)
            values = _gathered(kv.value, kv.value_scale, bucket.blocks).flatten(1, 2)
            mask = self._visible(bucket, plan.positions, keys.shape[1], window)
            stale = self._stale(bucket, keys.shape[1])  # may hold anything, NaN included
            values = values.masked_fill(stale[:, :, None, None], 0)
            part, part_lse = self._attend(query[bucket.tokens], keys, values, mask)
            out[bucket.tokens], lse[bucket.tokens] = merge_attention(
                out[bucket.tokens].float(), lse[bucket.tokens], part, part_lse, out.dtype
            )
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """query [rows, n, heads, d], keys and values [rows, length, kv_heads, d], mask
        [rows, n, length]; returns float32 outputs like query and lse [rows, n, heads]."""
        rows, n, heads, head_dim = query.shape
        kv_heads = keys.shape[2]
        grouped = query.float().view(rows, n, kv_heads, heads // kv_heads, head_dim)
        scores = torch.einsum("rngqd,rlgd->rgqnl", grouped, keys.float()) * self._scale
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = (scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp()
        out = torch.einsum("rgqnl,rlgd->rngqd", weights, values.float())
        return out.reshape(rows, n, heads, head_dim), lse.permute(0, 3, 1, 2).flatten(2)

    def _visible(
        self, bucket: _Bucket, positions: Tensor, length: int, window: int | None
    ) -> Tensor:
        """Which gathered keys each query sees: bool [rows, n, length]."""
        keys = bucket.first[:, None] + torch.arange(length, device=self._device)
        queries = positions[bucket.tokens]
        mask = keys[:, None, :] <= queries[:, :, None]
        if window is not None:
            mask &= keys[:, None, :] > queries[:, :, None] - window
        return mask

    def _stale(self, bucket: _Bucket, length: int) -> Tensor:
        """Which gathered slots lie beyond their row's context: bool [rows, length]."""
        keys = bucket.first[:, None] + torch.arange(length, device=self._device)
        return keys >= bucket.lens[:, None]

    def _buckets(self, metadata: AttentionMetadata, shared: NDArray[np.int64]) -> Sequence[_Bucket]:
        """Rows with the same number of queries together, cut so that a gather stays small."""
        lengths = np.diff(metadata.query_starts)
        widths = -(-metadata.context_lens // metadata.block_size) - shared
        config = self._config
        block_bytes = 4 * metadata.block_size * config.num_kv_heads * config.head_dim
        buckets = []
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            width = int(widths[rows].max())
            step = max(1, _GATHER_BYTES // max(width * block_bytes, 1))
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                columns = np.minimum(
                    shared[part, None] + np.arange(width), metadata.block_tables.shape[1] - 1
                )
                tokens = metadata.query_starts[part, None] + np.arange(length)
                buckets.append(
                    _Bucket(
                        tokens=self._tensor(tokens),
                        blocks=self._tensor(metadata.block_tables[part[:, None], columns]),
                        first=self._tensor(shared[part] * metadata.block_size),
                        lens=self._tensor(metadata.context_lens[part]),
                    )
                )
        return buckets

    def _tensor(self, values: NDArray[np.signedinteger]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device)


def _store(pool: Tensor, scales: Tensor | None, slots: Tensor, heads: Tensor) -> None:
    """Heads [tokens, kv_heads, head_dim] to their slots of a pool, in 8 bits if it has scales."""
    if scales is None:
        pool.flatten(0, 1).index_copy_(0, slots, heads)
        return
    values, found = quantize_heads(heads, pool.dtype)
    # As bytes, because torch indexes no float8.
    pool.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, values.view(torch.uint8))
    scales.flatten(0, 1).index_copy_(0, slots, found)


def _gathered(pool: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    if scales is None:
        return pool[blocks]
    values = pool.view(torch.uint8)[blocks].view(pool.dtype)
    return dequantize_heads(values, scales[blocks])


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each: outputs [..., d] and
    natural log-sum-exps [...], float32. Exact and associative; one side may be empty (lse -inf)."""
    peak = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = (lse_a - peak).exp(), (lse_b - peak).exp()
    total = weight_a + weight_b
    merged = (weight_a[..., None] * out_a + weight_b[..., None] * out_b) / total[..., None]
    return merged.to(dtype), peak + total.log()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves as pairs: (x1 cos - x2 sin, x2 cos + x1 sin)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
