"""The decoder core that all families share; what differs is in ModelConfig.

Pre-norm residual blocks: x += attention(norm(x)); x += mlp(norm(x)). Knows no scheduler and no
sampling: flat tokens in, hidden rows or logits out.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.engine.layers.backend import Backend, EmbedsTokens, HeadNorms, LayerKV
from headrace.engine.layers.huge_pages import HugePages
from headrace.engine.layers.linear import Linear
from headrace.engine.loading.checkpoint import Checkpoint, TensorSource, check_tensors
from headrace.engine.loading.heap import trim_heap
from headrace.engine.loading.timed import LoadSeconds, TimedSource
from headrace.engine.models.config import ModelConfig
from headrace.engine.quant.choose import choose_scheme
from headrace.engine.quant.fixed_rows import FixedRows, Sizes
from headrace.engine.quant.method import AnyMethod, LinearSpec, QuantMethod, weight_bytes
from headrace.engine.quant.scheme import Embedding, MethodFor, Scheme, Table, plain
from headrace.engine.quant.unquantized import Unquantized

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head"
_TRIMMED_LAYERS = 4
"""After so many, memory that loading them has left free goes back to the system."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes that the weights take where they run. `head`: 0 where it reads the embedding's own
    memory; on a CPU a tied head is a copy that its matmul packed. `other`: norms."""

    linear: int
    embedding: int
    head: int
    other: int

    @property
    def total(self) -> int:
        return self.linear + self.embedding + self.head + self.other


class Decoder:
    """A loaded model. `vocab_size` counts the logits: ids that the tokenizer does not know (padding
    rows of the embedding) have none."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        head: Linear,
        vocab_size: int,
        backend: Backend,
        quantization: str = "none",
        load_seconds: LoadSeconds | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.quantization = quantization
        self.load_seconds = load_seconds or LoadSeconds()
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._backend = backend

    def hidden(
        self, token_ids: Tensor, kv: Sequence[LayerKV], plan: Any, output_rows: Tensor | slice
    ) -> Tensor:
        """Normed last hidden states [len(output_rows), hidden] of the flat step `token_ids`.

        The last layer computes keys and values for all tokens, the rest only for `output_rows`.
        """
        backend, eps = self._backend, self.config.rms_norm_eps
        x = self._embedding(token_ids)
        normed = backend.rms_norm(x, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            query = backend.rope_and_store(layer.qkv(normed), kv[index], plan, layer.head_norms)
            mixed = backend.attention(query, kv[index], plan, layer.window)
            if index == last:
                x, mixed = x[output_rows], mixed[output_rows]
            normed = backend.add_rms_norm(x, layer.output(mixed), layer.post_norm, eps)
            delta = layer.down(backend.silu_mul(layer.gate_up(normed)))
            next_norm = self._final_norm if index == last else self._layers[index + 1].input_norm
            normed = backend.add_rms_norm(x, delta, next_norm, eps)
        return normed

    def weight_memory(self) -> WeightMemory:
        layers = self._layers
        linears = [(x.qkv, x.output, x.gate_up, x.down) for x in layers]
        norms = [(x.input_norm, x.post_norm, x.head_norms) for x in layers]
        embedding = weight_bytes(self._embedding)
        return WeightMemory(
            linear=sum(weight_bytes(linear.weights) for layer in linears for linear in layer),
            embedding=embedding,
            head=weight_bytes([self._embedding, self._head.weights]) - embedding,
            other=weight_bytes([norms, self._final_norm]),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab_size] of normed hidden states."""
        return self.raw_logits(hidden)[:, : self.vocab_size].float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Logits as the head computes them: its own dtype, [rows, at least vocab_size]."""
        return self._head(hidden)


def load_decoder(
    checkpoint: Checkpoint,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    weight_dtype: torch.dtype | None = None,
    plain_method: AnyMethod | None = None,
    fixed_rows: bool = False,
) -> Decoder:
    """Read all weights; CheckpointError names tensors that are missing, unexpected or misshapen.

    `quantization`: a scheme's name, None for the checkpoint's own. `weight_dtype`: of linear layers
    that are not quantized, None: `dtype`, which is that of everything between them. `plain_method`:
    multiplies those layers, None: `Unquantized`. `fixed_rows`: a row of a matmul has the same bits
    whatever else is in the batch (`quant.fixed_rows`).
    """
    began, timed = time.perf_counter(), TimedSource(checkpoint.tensors)
    checkpoint = replace(checkpoint, tensors=timed)
    config = checkpoint.config
    specs, stored_head = layer_specs(config), head_spec(config)
    scheme = choose_scheme(
        *(checkpoint, quantization, [spec for layer in specs for spec in layer]),
        *(stored_head, device),
    )
    source = scheme.source
    _check(config, scheme)

    def vector(name: str) -> Tensor:
        return source.load(name).to(device, dtype)

    def linear(spec: LinearSpec) -> Linear:
        return load_linear(scheme.method_for(spec), spec, source)

    def load_linear(method: QuantMethod[Any], spec: LinearSpec, source: TensorSource) -> Linear:
        chosen = dtype
        if isinstance(method, Unquantized):
            method, chosen = plain_method or method, weight_dtype or dtype
        if fixed_rows:
            method = FixedRows(method, tried)
        return Linear.load(method, spec, source, chosen, device, memory)

    tried: dict[Hashable, Sizes] = {}
    memory = HugePages()
    layers = []
    for index, (qkv, output, gate_up, down) in enumerate(specs):
        prefix = f"model.layers.{index}."
        norms = None
        if config.qk_norm:
            norms = HeadNorms(
                vector(prefix + "self_attn.q_norm.weight"),
                vector(prefix + "self_attn.k_norm.weight"),
            )
        layers.append(
            DecoderLayer(
                input_norm=vector(prefix + "input_layernorm.weight"),
                qkv=linear(qkv),
                head_norms=norms,
                output=linear(output),
                post_norm=vector(prefix + "post_attention_layernorm.weight"),
                gate_up=linear(gate_up),
                down=linear(down),
                window=config.sliding_windows[index],
            )
        )
        if index % _TRIMMED_LAYERS == 0:
            trim_heap()
    # The head's floats, its layout and its final place are in memory together.
    trim_heap()
    vocab_size = min(config.vocab_size, checkpoint.num_token_ids or config.vocab_size)
    table = scheme.embed(_EMBEDDING, dtype, device)
    embedding = table
    if isinstance(table, Table) and isinstance(backend, EmbedsTokens):
        embedding = backend.embed(table.weight)
    if scheme.stored_head:
        head = linear(stored_head)
    else:
        if config.tie_word_embeddings and isinstance(table, Table):
            weight = table.weight
        else:
            weight = source.load(f"{stored_head.parts[0]}.weight")
        head = load_linear(
            scheme.head,
            LinearSpec((_HEAD,), config.hidden_size, (vocab_size,)),
            _Given({f"{_HEAD}.weight": weight[:vocab_size]}),
        )
    final_norm = vector(_FINAL_NORM)
    trim_heap()
    seconds = LoadSeconds(timed.seconds, time.perf_counter() - began - timed.seconds)
    return Decoder(
        *(config, embedding, layers, final_norm, head, vocab_size, backend, scheme.name, seconds)
    )


@dataclass(frozen=True, slots=True)
class _Given:
    """Tensors that are at hand already."""

    tensors: dict[str, Tensor]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def load(self, name: str) -> Tensor:
        return self.tensors[name]


def layer_specs(config: ModelConfig) -> list[tuple[LinearSpec, ...]]:
    """The linear layers as they run: qkv, output, gate-up and down of each decoder layer."""
    return [_layer_specs(config, index) for index in range(config.num_layers)]


def head_spec(config: ModelConfig) -> LinearSpec:
    """The head as the checkpoint stores it: a tied one is the embedding."""
    part = _EMBEDDING.removesuffix(".weight") if config.tie_word_embeddings else _HEAD
    return LinearSpec((part,), config.hidden_size, (config.vocab_size,))


def _layer_specs(config: ModelConfig, index: int) -> tuple[LinearSpec, ...]:
    """qkv, output, gate-up and down of a layer."""
    attention = f"model.layers.{index}.self_attn."
    mlp = f"model.layers.{index}.mlp."
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return (
        LinearSpec(
            tuple(attention + name for name in ("q_proj", "k_proj", "v_proj")),
            hidden,
            (q_size, kv_size, kv_size),
            config.qkv_bias,
        ),
        LinearSpec((attention + "o_proj",), q_size, (hidden,), config.output_bias),
        LinearSpec((mlp + "gate_proj", mlp + "up_proj"), hidden, (inner, inner), config.mlp_bias),
        LinearSpec((mlp + "down_proj",), inner, (hidden,), config.mlp_bias),
    )


def tensor_shapes(config: ModelConfig, method_for: MethodFor = plain) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a checkpoint of `config` must hold, its linear layers
    stored as `method_for` reads them."""
    expected: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (config.vocab_size, config.hidden_size),
        _FINAL_NORM: (config.hidden_size,),
    }
    head = head_spec(config)
    expected.update(method_for(head).tensor_shapes(head))
    for index, layer in enumerate(layer_specs(config)):
        prefix = f"model.layers.{index}."
        expected[prefix + "input_layernorm.weight"] = (config.hidden_size,)
        expected[prefix + "post_attention_layernorm.weight"] = (config.hidden_size,)
        if config.qk_norm:
            expected[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            expected[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for spec in layer:
            expected.update(method_for(spec).tensor_shapes(spec))
    return expected


def _check(config: ModelConfig, scheme: Scheme) -> None:
    ignored = {f"{_HEAD}.weight"}  # a tied head may be stored once more
    for index in range(config.num_layers):  # written by old Transformers
        ignored.add(f"model.layers.{index}.self_attn.rotary_emb.inv_freq")
    expected = tensor_shapes(config, scheme.method_for)
    check_tensors(scheme.source.shapes(), expected, {*ignored, *scheme.ignored})
