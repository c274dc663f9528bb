"""Bytes of the key-value cache: per token, per sequence, per card.

2 (keys and values) x layers x key-value heads x head_dim x bytes of the type. Parameters do not
enter: SmolLM2-1.7B needs more a token than Llama-3-8B.
"""

from typing import Literal

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.shapes import ModelShape

KVType = Literal["fp32", "16-bit", "int8", "fp8"]
KV_TYPES: dict[str, KVType] = {
    "16-bit": "16-bit",
    "auto": "16-bit",
    "bf16": "16-bit",
    "fp16": "16-bit",
    "fp32": "fp32",
    "int8": "int8",
    "fp8": "fp8",
}
_BYTES = {"fp32": 4, "16-bit": 2, "int8": 1, "fp8": 1}
SCALE_BYTES = 4
"""A float32 scale for each token and head, for keys and for values, in the 8-bit types."""


def parse_kv_type(text: str) -> KVType:
    try:
        return KV_TYPES[text.strip().lower()]
    except KeyError:
        raise PlanError(f"unknown KV type {text!r}; known: {', '.join(KV_TYPES)}") from None


def kv_heads_per_card(shape: ModelShape, tensor_parallel: int = 1) -> int:
    """Key-value heads are divided over cards, and copied once there are more cards than heads."""
    return -(-shape.num_kv_heads // min(tensor_parallel, shape.num_kv_heads))


def kv_layer_bytes(
    shape: ModelShape, kv_type: KVType, tensor_parallel: int = 1, scales: bool = True
) -> int:
    """Bytes of one token in one layer on one card."""
    head = shape.head_dim * _BYTES[kv_type]
    if scales and kv_type in ("int8", "fp8"):
        head += SCALE_BYTES
    return 2 * kv_heads_per_card(shape, tensor_parallel) * head


def kv_bytes_per_token(
    shape: ModelShape, kv_type: KVType = "16-bit", tensor_parallel: int = 1, scales: bool = True
) -> int:
    """Bytes that one more token takes on one card while no window is full.

    `scales` False leaves out the scales of the 8-bit types: the figure that is usually quoted,
    half of the 16-bit one.
    """
    return shape.num_layers * kv_layer_bytes(shape, kv_type, tensor_parallel, scales)


def kv_sequence_bytes(
    shape: ModelShape,
    length: int,
    kv_type: KVType = "16-bit",
    tensor_parallel: int = 1,
    block_size: int = 1,
    windows: bool = True,
) -> int:
    """Bytes of a sequence of `length` tokens on one card, in whole blocks of `block_size` tokens.

    `windows`: layers with a sliding window keep its tokens only, and one block more since the
    window moves inside a block.
    """
    per_layer = kv_layer_bytes(shape, kv_type, tensor_parallel)
    whole = -(-length // block_size) * block_size
    if not (windows and shape.windows):
        return shape.num_layers * per_layer * whole
    total = 0
    for window in shape.windows:
        if window is None:
            total += whole
        else:
            edge = block_size if block_size > 1 else 0
            total += min(whole, -(-window // block_size) * block_size + edge)
    return total * per_layer
