"""One decoder layer at a time, on float weights, over whole texts: the stages between its linear
layers, on the same backend that serves.

Knows no quantization: whoever calls decides which weights a stage uses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.config import EngineConfig
from headrace.engine.errors import CheckpointError
from headrace.engine.layers.backend import AttentionMetadata, Backend, HeadNorms, LayerKV
from headrace.engine.layers.choose import choose_backend
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.decoder import layer_specs
from headrace.engine.quant.method import LinearSpec

BATCH_TOKENS = 4096
"""Tokens of one pass; what lies between two stages of a layer is held for so many."""

_BLOCK_SIZE = 16


@dataclass(slots=True)
class LayerFloats:
    """One decoder layer's tensors in float32, to be replaced as they are quantized. `weights` and
    `biases` by the part's prefix; fused layers are stacked when they multiply."""

    index: int
    specs: tuple[LinearSpec, ...]
    input_norm: Tensor
    post_norm: Tensor
    head_norms: HeadNorms | None
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]

    @property
    def qkv(self) -> LinearSpec:
        return self.specs[0]

    @property
    def output(self) -> LinearSpec:
        return self.specs[1]

    @property
    def gate_up(self) -> LinearSpec:
        return self.specs[2]

    @property
    def down(self) -> LinearSpec:
        return self.specs[3]

    def multiply(self, spec: LinearSpec, x: Tensor) -> Tensor:
        weight = torch.cat([self.weights[part] for part in spec.parts])
        bias = torch.cat([self.biases[part] for part in spec.parts]) if spec.bias else None
        return functional.linear(x, weight, bias)


def norm_names(config: ModelConfig, index: int) -> list[str]:
    """The layer's tensors that are no linear layer's."""
    prefix = f"model.layers.{index}."
    names = [f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"]
    if config.qk_norm:
        names += [f"{prefix}self_attn.q_norm.weight", f"{prefix}self_attn.k_norm.weight"]
    return names


def load_layer(config: ModelConfig, source: TensorSource, index: int) -> LayerFloats:
    """Read one layer. `source` gives every weight as floats."""
    specs = layer_specs(config)[index]

    def load(name: str) -> Tensor:
        tensor = source.load(name).float()
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{name} holds values that are not finite; the file is damaged")
        return tensor

    norms = [load(name) for name in norm_names(config, index)]
    return LayerFloats(
        index,
        specs,
        *(norms[0], norms[1]),
        HeadNorms(norms[2], norms[3]) if config.qk_norm else None,
        {part: load(f"{part}.weight") for spec in specs for part in spec.parts},
        {part: load(f"{part}.bias") for spec in specs if spec.bias for part in spec.parts},
    )


class Texts:
    """Token sequences as they stand before some layer: `states` float32 [tokens, hidden], one
    sequence behind the other."""

    def __init__(self, config: ModelConfig, sequences: Sequence[Sequence[int]]) -> None:
        self.token_ids = torch.tensor([token for tokens in sequences for token in tokens])
        self.lengths = [len(tokens) for tokens in sequences]
        self._one_layer = replace(config, num_layers=1)
        self._batches = list(_batches(self.lengths))
        self.states = torch.empty(0)
        longest = max(self.lengths)
        self.backend = _backend(config, longest)
        blocks = max(metadata.block_tables.size for metadata, _ in self._metadata())
        self._kv: LayerKV = self.backend.allocate_kv(
            self._one_layer, blocks, _BLOCK_SIZE, torch.float32
        )[0]
        self._plans = [self.backend.prepare(metadata) for metadata, _ in self._metadata()]

    def __len__(self) -> int:
        return len(self.token_ids)

    def embed(self, table: Tensor) -> None:
        """Begin before the first layer."""
        self.states = table[self.token_ids].float()

    def spans(self) -> Iterator[tuple[slice, Any]]:
        """Each batch's tokens and its plan."""
        for (_, span), plan in zip(self._metadata(), self._plans, strict=True):
            yield span, plan

    def mixed(self, layer: LayerFloats, normed: Tensor, plan: Any, window: int | None) -> Tensor:
        """Attention's output before its projection, for one batch."""
        qkv = layer.multiply(layer.qkv, normed)
        query = self.backend.rope_and_store(qkv, self._kv, plan, layer.head_norms)
        return self.backend.attention(query, self._kv, plan, window)

    def advance(self, layer: LayerFloats, config: ModelConfig) -> None:
        """Run the whole layer on the states, in place."""
        eps, window = config.rms_norm_eps, config.sliding_windows[layer.index]
        for span, plan in self.spans():
            x = self.states[span]
            normed = self.backend.rms_norm(x, layer.input_norm, eps)
            x.add_(layer.multiply(layer.output, self.mixed(layer, normed, plan, window)))
            normed = self.backend.rms_norm(x, layer.post_norm, eps)
            gated = self.backend.silu_mul(layer.multiply(layer.gate_up, normed))
            x.add_(layer.multiply(layer.down, gated))

    def _metadata(self) -> Iterator[tuple[AttentionMetadata, slice]]:
        start = 0
        for lengths in self._batches:
            count = sum(lengths)
            yield _metadata(lengths), slice(start, start + count)
            start += count


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    for length in lengths:
        if batch and sum(batch) + length > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(length)
    if batch:
        yield batch


def _metadata(lengths: Sequence[int]) -> AttentionMetadata:
    """Whole sequences, each in blocks of its own: `block_tables.size` blocks hold them all."""
    width = -(-max(lengths) // _BLOCK_SIZE)
    tables = np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
    positions = [np.arange(length, dtype=np.int64) for length in lengths]
    slots = [row * width * _BLOCK_SIZE + position for row, position in enumerate(positions)]
    return AttentionMetadata(
        _BLOCK_SIZE,
        np.concatenate(positions),
        np.concatenate(slots),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        np.array(lengths, dtype=np.int32),
        tables,
    )


def _backend(config: ModelConfig, longest: int) -> Backend:
    settings = EngineConfig("", block_size=_BLOCK_SIZE)
    return choose_backend(settings, config, longest, torch.float32, torch.device("cpu"))
