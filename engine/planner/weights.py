"""Exact weight bytes of a shape under a scheme, whole or one card's share.

Everything is counted: packed weights, scales, zero points, index vectors, and what stays
unquantized (embeddings, head, norms, biases). A rule such as half a byte a parameter is not used.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from headrace.engine.planner import gguf_types
from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.schemes import Scheme
from headrace.engine.planner.shapes import Matrix, ModelShape


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes by part. `experts` is the part of the layers' matrices that belongs to experts."""

    linear: int
    experts: int
    embedding: int
    head: int
    other: int

    @property
    def total(self) -> int:
        return self.linear + self.experts + self.embedding + self.head + self.other

    def read_per_step(self, experts_touched: float = 1.0) -> float:
        """Bytes that one forward pass reads.

        A tied head is the embedding, read whole; an untied embedding gives only the batch's rows,
        which is nothing beside the rest. `experts_touched`: share of the experts that the step's
        tokens reach, 0 to 1.
        """
        head = self.head or self.embedding
        return self.linear + self.experts * experts_touched + head + self.other


@lru_cache(maxsize=4096)
def weight_bytes(
    shape: ModelShape, scheme: Scheme, dtype_bytes: int = 2, tensor_parallel: int = 1
) -> WeightBytes:
    """Bytes on one card of a group of `tensor_parallel`.

    `dtype_bytes`: of what stays unquantized. Norms and biases are counted whole on every card; the
    embedding and the head are divided by vocabulary rows; k and v by key-value heads, which are
    copied when there are more cards than heads.
    """
    if tensor_parallel < 1:
        raise PlanError(f"tensor parallel size must be at least 1, not {tensor_parallel}")
    if scheme.kind == "float":
        dtype_bytes = scheme.bits // 8
    linear = experts = 0
    for layer in range(shape.num_layers):
        for matrix in shape.layer(layer):
            size = _matrix_bytes(shape, scheme, matrix, dtype_bytes, tensor_parallel, layer)
            if matrix.expert:
                experts += size
            else:
                linear += size
    embed = shape.embedding()
    head = shape.head()
    vector_bytes = 4 if scheme.kind == "gguf" else dtype_bytes
    return WeightBytes(
        linear=linear,
        experts=experts,
        embedding=_vocabulary_bytes(shape, scheme, embed, dtype_bytes, tensor_parallel),
        head=_vocabulary_bytes(shape, scheme, head, dtype_bytes, tensor_parallel) if head else 0,
        other=shape.num_vector_params * vector_bytes,
    )


def share(whole: WeightBytes, tensor_parallel: int) -> WeightBytes:
    """One card's part of weights known only as a sum (a checkpoint's files), divided evenly."""
    if tensor_parallel == 1:
        return whole
    return replace(
        whole,
        linear=-(-whole.linear // tensor_parallel),
        experts=-(-whole.experts // tensor_parallel),
        embedding=-(-whole.embedding // tensor_parallel),
        head=-(-whole.head // tensor_parallel),
    )


def split_problem(shape: ModelShape, scheme: Scheme, tensor_parallel: int) -> str | None:
    """Why the model can't be divided over that many cards, or None.

    Heads and feed-forward columns must divide evenly, and a group of a grouped scheme must not be
    cut by the division along the input.
    """
    tp = tensor_parallel
    if tp == 1:
        return None
    if shape.num_heads % tp:
        return f"{shape.num_heads} attention heads do not divide over {tp} cards"
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        return f"{shape.num_kv_heads} key-value heads neither divide over nor repeat on {tp} cards"
    dense = len(shape.moe_layers) < shape.num_layers
    inner = [shape.intermediate_size] if dense else []
    inner += [shape.expert_size] if shape.moe_layers else []
    for size in inner:
        if size % tp:
            return f"the feed-forward size {size} does not divide over {tp} cards"
        step = scheme.group if scheme.kind in ("group", "gptq", "awq", "fp8") else 0
        if step and (size // tp) % step:
            return (
                f"a split of {size} feed-forward columns over {tp} cards cuts a group of {step} "
                f"({size // tp} a card)"
            )
    return None


def _share_rows(matrix: Matrix, shape: ModelShape, tp: int) -> tuple[int, int]:
    if matrix.split == "rows":
        return -(-matrix.rows // tp), matrix.columns
    if matrix.split == "kv_rows":
        return -(-matrix.rows // min(tp, shape.num_kv_heads)), matrix.columns
    if matrix.split == "columns":
        return matrix.rows, -(-matrix.columns // tp)
    return matrix.rows, matrix.columns


def _matrix_bytes(
    shape: ModelShape, scheme: Scheme, matrix: Matrix, dtype_bytes: int, tp: int, layer: int
) -> int:
    rows, columns = _share_rows(matrix, shape, tp)
    if scheme.kind == "gguf":
        kind = gguf_types.mixture_type(scheme.mixture, shape, matrix.role, matrix.columns, layer)
        return matrix.count * gguf_types.tensor_bytes(kind, rows, columns)
    if matrix.role == "router":
        return matrix.count * rows * columns * dtype_bytes
    return matrix.count * scheme.matrix_bytes(rows, columns, dtype_bytes)


def _vocabulary_bytes(
    shape: ModelShape, scheme: Scheme, matrix: Matrix, dtype_bytes: int, tp: int
) -> int:
    rows, columns = _share_rows(matrix, shape, tp)
    if scheme.kind == "gguf":
        kind = gguf_types.mixture_type(scheme.mixture, shape, matrix.role, columns, 0)
        return gguf_types.tensor_bytes(kind, rows, columns)
    return rows * columns * dtype_bytes
