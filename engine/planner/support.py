"""What Headrace runs today, so that a plan can mark what it does not run yet."""

from headrace.engine.planner.hardware import Card
from headrace.engine.planner.schemes import Scheme

TENSOR_PARALLEL = False
SCHEMES = frozenset({"fp32", "fp16", "bf16"})
"""Schemes the engine holds in memory as they are. TODO: one a file as engine/quant gains them."""


def not_runnable(card: Card, scheme: Scheme, tensor_parallel: int) -> str | None:
    """What of a candidate is planned for and not yet run, or None when it runs today."""
    if tensor_parallel > 1 and not TENSOR_PARALLEL:
        return "tensor parallelism is not yet runnable"
    if card.vendor not in ("nvidia", "cpu"):
        return f"{card.name} is not yet runnable"
    if scheme.name not in SCHEMES:
        return f"{scheme.name} weights are not yet runnable"
    return None
