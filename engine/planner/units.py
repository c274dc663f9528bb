"""Durations, sizes and money as people write them."""

import re

from headrace.engine.planner.errors import PlanError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d|)", re.IGNORECASE)
_LONGEST = 100_000 * 86400.0
_MOST_BYTES = 2.0**60
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `15m`, `2h`, `1d` or a sum such as `1h30m`. Raises PlanError."""
    compact = text.strip().lower().replace(" ", "")
    parts = _DURATION.findall(compact)
    if not compact or "".join(n + unit for n, unit in parts) != compact:
        raise PlanError(f"{text!r} is no duration; write it as 90s, 15m, 2h or 1h30m")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds > _LONGEST:
        raise PlanError(f"{text[:40]!r} is longer than any job: at most 100000d")
    return seconds


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"


def dollars(amount: float | None) -> str:
    if amount is None:
        return "-"
    return f"${amount:,.2f}" if amount < 1000 else f"${amount:,.0f}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes of `1073741824`, `1GiB`, `1G` (both 1024-based) or `1GB` (1000-based)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"{text!r} is no size; write it as 8GiB, 512M or a number of bytes")
    decimal = match[2] and not match[3] and text.strip().lower().endswith("b")
    size = float(match[1]) * (1000 if decimal else 1024) ** _POWERS[match[2].lower()]
    if not 1 <= size <= _MOST_BYTES:
        raise PlanError(f"{text[:40]!r} is no size that memory can have")
    return int(size)
