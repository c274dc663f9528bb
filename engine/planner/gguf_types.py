"""GGUF: bytes of each tensor type, and which type llama-quantize gives each tensor of a mixture.

Block sizes are those of ggml. The mixture rules (Q4_K_M and its kin keep some tensors at more
bits) are those of llama.cpp's `llama_tensor_get_type`, without an importance matrix; the fallback
for rows that are no multiple of 256 is its `tensor_type_fallback`.
"""

from headrace.engine.planner.shapes import ModelShape, Role

BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F64": (1, 8),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 36),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_XS": (256, 136),
    "IQ4_NL": (32, 18),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
}
"""Type -> (values in a block, bytes of a block)."""

TYPE_IDS: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

MIXTURES: dict[str, str] = {
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "Q5_0": "Q5_0",
    "Q5_1": "Q5_1",
    "Q8_0": "Q8_0",
    "Q2_K": "Q2_K",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
}
"""File type -> the type most of its tensors have."""

_FALLBACK = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def tensor_bytes(type_name: str, rows: int, columns: int) -> int:
    """Bytes of a [rows, columns] tensor; a block never spans two rows."""
    values, size = BLOCKS[type_name]
    return rows * -(-columns // values) * size


def mixture_type(mixture: str, shape: ModelShape, role: Role, columns: int, layer: int) -> str:
    """The type of one tensor in a file of type `mixture`; `layer` counts from 0."""
    if role == "router":
        return "F32"
    chosen = _before_fallback(mixture, shape, role, layer)
    if columns % BLOCKS[chosen][0] == 0:
        return chosen
    fallback = _FALLBACK.get(chosen, "F16")
    return fallback if columns % BLOCKS[fallback][0] == 0 else "F16"


def _more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth and every third layer between: where llama.cpp spends bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _before_fallback(mixture: str, shape: ModelShape, role: Role, layer: int) -> str:
    base = MIXTURES[mixture]
    layers = shape.num_layers
    eight_experts = shape.num_experts == 8
    if role == "head" or (role == "embed" and shape.tied):
        return "Q8_0" if base == "Q8_0" else "Q6_K"
    if role == "v":
        chosen = _value_type(mixture, base, shape, layer)
        if shape.num_layers == 80 and shape.num_groups == 8 and chosen in ("Q3_K", "Q4_K"):
            chosen = "Q5_K"
        return "Q8_0" if eight_experts else chosen
    if role == "k" and eight_experts:
        return "Q8_0"
    if role == "down":
        return _down_type(mixture, base, layer, layers)
    if role == "o":
        if eight_experts:
            return "Q5_K" if base in ("Q2_K", "Q3_K", "Q4_K") else base
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mixture, base)
    return base


def _value_type(mixture: str, base: str, shape: ModelShape, layer: int) -> str:
    if mixture == "Q2_K":
        return "Q4_K" if shape.num_groups >= 4 else "Q3_K"
    if mixture == "Q3_K_M":
        return "Q5_K" if layer < 2 else "Q4_K"
    if mixture == "Q3_K_L":
        return "Q5_K"
    if mixture in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, shape.num_layers):
        return "Q6_K"
    if mixture == "Q4_K_S" and layer < 4:
        return "Q5_K"
    return base


def _down_type(mixture: str, base: str, layer: int, layers: int) -> str:
    if mixture == "Q2_K":
        return "Q3_K"
    if mixture == "Q3_K_M":
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    if mixture == "Q3_K_L":
        return "Q5_K"
    if mixture in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, layers):
        return "Q6_K"
    if mixture == "Q4_K_S" and layer < layers // 8:
        return "Q5_K"
    return base
