"""What a card's memory goes to: weights, context, activations, graphs, and what is left for KV."""

from dataclasses import dataclass

from headrace.engine.planner.hardware import Card
from headrace.engine.planner.kv import KVType, kv_sequence_bytes
from headrace.engine.planner.schemes import Scheme
from headrace.engine.planner.shapes import ModelShape

_MIB = 2**20
_CPU_KV_LIMIT = 4 << 30
_CPU_KEPT = 3
"""A CPU's allocator keeps about this much of what a step allocates (measured, SmolLM2-135M)."""
_GRAPH_SIZES = 35
_GRAPH_LAYER = _MIB // 5
"""A captured step takes about 0.2 MiB a layer; 35 batch sizes are captured."""
WEIGHTS_SHARE = 0.7
"""The rule of thumb that is reported as a check: 70 % for weights, 30 % for the run."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's settings that memory and speed depend on; defaults are the engine's."""

    kv_type: KVType = "16-bit"
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    memory_utilization: float = 0.9
    graphs: bool = True
    kv_cache_memory: int | None = None
    """Bytes for the KV cache; None: what is left, on a CPU at most 4 GiB."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one card. `kv` is what is left for the cache, negative when the rest is too much.

    `tables`: rotary tables, and on a CPU the copy of a tied head that its matmul packs.
    """

    usable: int
    weights: int
    context: int
    activations: int
    graphs: int
    tables: int
    kv_limit: int | None = None

    @property
    def run_time(self) -> int:
        return self.context + self.activations + self.graphs + self.tables

    @property
    def kv(self) -> int:
        left = self.usable - self.weights - self.run_time
        return left if self.kv_limit is None else min(left, self.kv_limit)

    @property
    def process(self) -> int:
        """All that the process takes once its cache is allocated."""
        return self.weights + self.run_time + max(self.kv, 0)


def plan_memory(
    shape: ModelShape, scheme: Scheme, weights: int, card: Card, settings: Settings, tp: int = 1
) -> MemoryPlan:
    """`weights`: bytes on this card, one of `tp`."""
    graphs = 0
    if settings.graphs and not card.is_cpu:
        graphs = _GRAPH_SIZES * _GRAPH_LAYER * shape.num_layers
    tables = 2 * shape.max_position_embeddings * shape.head_dim * card.dtype_bytes
    if card.is_cpu and shape.tied and scheme.kind != "gguf":
        tables += shape.embedding().num_params * card.dtype_bytes
    limit = settings.kv_cache_memory
    if limit is None and card.is_cpu:
        limit = _CPU_KV_LIMIT
    activations = activation_bytes(shape, scheme, card.dtype_bytes, settings, tp)
    return MemoryPlan(
        usable=int(card.memory * settings.memory_utilization),
        weights=weights,
        context=card.context,
        activations=activations * (_CPU_KEPT if card.is_cpu else 1),
        graphs=graphs,
        tables=tables,
        kv_limit=limit,
    )


def activation_bytes(
    shape: ModelShape, scheme: Scheme, dtype_bytes: int, settings: Settings, tp: int = 1
) -> int:
    """The largest set of tensors alive at once in a step of `max_num_batched_tokens`.

    Either inside a layer (hidden, residual and normed input beside the widest pair of inputs and
    outputs) or at the head (logits of `max_num_seqs` rows, in float32 for sampling).
    """
    tokens = settings.max_num_batched_tokens
    inner = shape.intermediate_size if len(shape.moe_layers) < shape.num_layers else 0
    inner = max(inner, shape.experts_per_token * shape.expert_size)
    mlp = 3 * inner // tp
    attention = (2 * shape.q_size + 2 * shape.kv_size) // tp
    widest = max(mlp, attention)
    layer = tokens * (3 * shape.hidden_size + widest) * dtype_bytes
    if scheme.compute == "int8":
        # The input as bytes. Sums of products never lie in memory: the kernels scale them at once.
        layer += tokens * max(shape.hidden_size, inner // tp)
    rows = min(settings.max_num_seqs, tokens)
    head = rows * (shape.hidden_size * dtype_bytes + shape.vocab_size * (dtype_bytes + 8))
    return max(layer, head)


def max_sequences(
    shape: ModelShape,
    kv_bytes: int,
    length: int,
    settings: Settings,
    kv_type: KVType,
    tp: int = 1,
    shared_prefix: int = 0,
) -> int:
    """Sequences of `length` tokens that `kv_bytes` hold; 0 when not even one fits.

    Whole blocks of a prefix that all have in common are held once.
    """
    whole = kv_sequence_bytes(shape, length, kv_type, tp, settings.block_size)
    shared_tokens = shared_prefix // settings.block_size * settings.block_size
    shared = kv_sequence_bytes(shape, shared_tokens, kv_type, tp, settings.block_size)
    own = whole - shared
    if kv_bytes < whole:
        return 0
    return (kv_bytes - shared) // max(own, 1)
