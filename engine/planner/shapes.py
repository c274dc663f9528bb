"""The shape of a decoder: its dimensions, its matrices and its parameter count.

Knows architecture, not bytes: `weights` prices what is listed here, `kv` the cache. A shape never
holds a weight, so a 72B model's is as cheap as a 135M model's.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["q", "k", "v", "o", "gate", "up", "down", "router", "embed", "head"]
Split = Literal["rows", "columns", "kv_rows", "none"]
"""How tensor parallelism divides a matrix [rows, columns] = [out, in].

`kv_rows`: by key-value head, so at most `num_kv_heads` ways; beyond that heads are replicated.
"""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` equal matrices [rows, columns] (out, in) in one layer, or in the model."""

    role: Role
    rows: int
    columns: int
    split: Split
    count: int = 1
    expert: bool = False

    @property
    def num_params(self) -> int:
        return self.rows * self.columns * self.count


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model as its config.json describes it.

    `windows`: the attention window of each layer in tokens, None where a layer sees everything;
    empty when all do. `norms_per_layer` counts norms over the hidden size. `num_experts` 0: dense;
    otherwise the layers of `moe_layers` have a router and experts of `expert_size`.
    """

    name: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    gated_mlp: bool = True
    norms_per_layer: int = 2
    windows: tuple[int | None, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    moe_layers: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_groups(self) -> int:
        """Queries that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def overflows_fp16(self) -> bool:
        """Activations of these families leave float16's range (65,504) in some layers."""
        return self.model_type.startswith(("qwen2", "gemma"))

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def attention(self) -> tuple[Matrix, ...]:
        """The projections of one layer's attention, unfused as checkpoints store them."""
        h, q, kv = self.hidden_size, self.q_size, self.kv_size
        return (
            Matrix("q", q, h, "rows"),
            Matrix("k", kv, h, "kv_rows"),
            Matrix("v", kv, h, "kv_rows"),
            Matrix("o", h, q, "columns"),
        )

    def mlp(self, layer: int) -> tuple[Matrix, ...]:
        """The feed-forward matrices of one layer, and its router if it has experts."""
        h = self.hidden_size
        if layer not in self.moe_layers:
            size = self.intermediate_size
            gate = (Matrix("gate", size, h, "rows"),) if self.gated_mlp else ()
            return (*gate, Matrix("up", size, h, "rows"), Matrix("down", h, size, "columns"))
        size, n = self.expert_size, self.num_experts
        return (
            Matrix("gate", size, h, "rows", n, True),
            Matrix("up", size, h, "rows", n, True),
            Matrix("down", h, size, "columns", n, True),
            Matrix("router", n, h, "none"),
        )

    def layer(self, index: int) -> tuple[Matrix, ...]:
        return (*self.attention(), *self.mlp(index))

    def embedding(self) -> Matrix:
        return Matrix("embed", self.vocab_size, self.hidden_size, "rows")

    def head(self) -> Matrix | None:
        """None when the head is the embedding (tied): stored once, still read at every step."""
        if self.tied:
            return None
        return Matrix("head", self.vocab_size, self.hidden_size, "rows")

    @property
    def num_vector_params(self) -> int:
        """Norms and biases: everything that is no matrix and stays unquantized."""
        norm = self.hidden_size * (2 if self.norm_bias else 1)
        per_layer = self.norms_per_layer * norm
        per_layer += 2 * self.head_dim if self.qk_norm else 0
        per_layer += self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        per_layer += self.hidden_size if self.o_bias else 0
        total = self.num_layers * per_layer + norm
        if self.mlp_bias:
            inner = self.intermediate_size * (2 if self.gated_mlp else 1)
            total += (self.num_layers - len(self.moe_layers)) * (inner + self.hidden_size)
        return total + (self.vocab_size if self.head_bias else 0)

    @property
    def num_linear_params(self) -> int:
        """Parameters of the layers' matrices: what a weight scheme quantizes."""
        return sum(m.num_params for i in range(self.num_layers) for m in self.layer(i))

    @property
    def num_active_linear_params(self) -> int:
        """Of those, what one token multiplies with: all, or its experts only."""
        total = 0
        for i in range(self.num_layers):
            for m in self.layer(i):
                share = self.experts_per_token if m.expert else m.count
                total += m.rows * m.columns * share
        return total

    @property
    def num_params(self) -> int:
        """All parameters, a tied head counted once: the published figure."""
        head = self.head()
        matrices = self.num_linear_params + self.embedding().num_params
        return matrices + (head.num_params if head else 0) + self.num_vector_params

    def describe(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"
        tied = ", tied head" if self.tied else ""
        experts = f", {self.num_experts} experts" if self.num_experts else ""
        return (
            f"{self.num_params / 1e9:.3f} B parameters, {self.num_layers} layers, "
            f"heads {heads}{tied}{experts}"
        )
