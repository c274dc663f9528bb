"""What a caller's own data must be to travel: JSON as every part of the way can read and write it.

Knows no request and no Redis.
"""

import math
from typing import Any

MAX_DEPTH = 100
"""orjson writes 254 levels and pydantic reads 200; results wrap the data in a few more."""


def check(value: Any) -> None:
    """ValueError for lists and objects nested deeper than MAX_DEPTH, and for numbers that JSON
    does not have. Other values that are no JSON are found where it is written."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.values()
            elif isinstance(item, (list, tuple)):
                deeper += item
            elif isinstance(item, float) and not math.isfinite(item):
                raise ValueError(f"{item} is no JSON number")
        if not deeper:
            return
        level = deeper
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
