"""What Headrace runs today, so that a plan can mark what it does not run yet.

Kept by hand beside the engine: what is listed here is loaded and run by `engine/`.
"""

from headrace.engine.planner.hardware import Card
from headrace.engine.planner.schemes import Scheme
from headrace.engine.planner.shapes import ModelShape

TENSOR_PARALLEL = False
VENDORS = frozenset({"cpu", "nvidia"})
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_GROUPS = (0, 32, 64, 128)
FLOATS_UP_TO = 1 << 30
"""Bytes of float32 weights up to which a GGUF file is run as floats unless `gguf` is asked for
(`engine.quant.choose.PACKED_ABOVE`, which needs torch)."""
FREES_OUTSIDE_WINDOWS = False
"""Whether KV that a sliding window has passed is given back."""


def runs_scheme(scheme: Scheme) -> bool:
    """Whether `engine/quant` holds weights so: made at load (float, channel, group, bnb4) or read
    from a checkpoint (all of them)."""
    if scheme.kind == "group":
        return scheme.bits in (3, 4) and scheme.group in _GROUPS
    if scheme.kind in ("gptq", "awq"):
        return scheme.group % 32 == 0
    return True


def not_runnable(
    shape: ModelShape, card: Card, scheme: Scheme, tensor_parallel: int, length: int
) -> tuple[str, ...]:
    """What of a candidate is planned for and not run yet; empty when it runs today."""
    missing = []
    if tensor_parallel > 1 and not TENSOR_PARALLEL:
        missing.append("tensor parallelism is not yet runnable")
    if not runs_scheme(scheme):
        missing.append(f"{scheme.name} weights are not yet runnable")
    elif scheme.kind == "gguf" and scheme.bits < 16 and not card.is_cpu:
        missing.append(f"GGUF blocks are not yet multiplied on {card.name} (int8, int4-g32 are)")
    if shape.model_type not in MODEL_TYPES:
        missing.append(f"{shape.model_type} models are not yet runnable")
    short = min((w for w in shape.windows if w is not None), default=length)
    if short < length and not FREES_OUTSIDE_WINDOWS:
        missing.append("KV outside of sliding windows is not yet freed")
    if card.vendor not in VENDORS:
        missing.append(f"{card.vendor.upper()} cards are not yet runnable")
    return tuple(missing)
