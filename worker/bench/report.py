"""Where a measurement is written, and how: JSON with the machine's name, and Markdown tables."""

import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from headrace.worker.bench.machine import describe_cpu

OUT = Path("build/bench")


def write(path: Path, content: dict[str, Any]) -> None:
    """`content` beside what it was measured on, to a temporary name first."""
    document = {
        "cpu": describe_cpu(),
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    temporary.replace(path)


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell."""
    lines = [_line(head), "|" + "---|" * len(head)]
    lines += [_line(["" if cell is None else cell for cell in row]) for row in rows]
    return "\n".join(lines)


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def figure(value: float | None, digits: int = 3) -> str:
    """A number as a table shows it: three significant digits, whole numbers whole."""
    if value is None:
        return ""
    if value and abs(value) < 10 ** (digits - 1):
        text = f"{value:.{digits}g}"
        return f"{value:.6f}".rstrip("0") if "e" in text else text
    return f"{value:,.0f}"
