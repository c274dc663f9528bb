"""A plan as a table for people and as rows for programs."""

from collections.abc import Sequence
from typing import Any

from headrace.engine.planner.candidates import Candidate
from headrace.engine.planner.recommend import Recommendation
from headrace.engine.planner.units import dollars, duration

_HEADER = (
    "gpu",
    "n",
    "tp",
    "scheme",
    "weights",
    "KV/token",
    "seqs",
    "decode t/s",
    "time",
    "cost",
    "spot",
    "",
)


def row_json(row: Candidate, recommended: bool, basis: str) -> dict[str, Any]:
    """One candidate. Bytes are those on each card; seconds and costs those of the whole job."""
    memory, time = row.memory, row.time
    return {
        "model": row.model,
        "gpu": row.gpu,
        "count": row.count,
        "tensor_parallel": row.tensor_parallel,
        "scheme": row.scheme,
        "weights_bytes": row.weights_bytes,
        "kv_bytes_per_token": row.kv_bytes_per_token,
        "kv_type": row.kv_type,
        "max_sequences": row.max_sequences,
        "fits": row.fits,
        "runnable": row.runnable,
        "seconds": _rounded(row.seconds),
        "cost": _rounded(row.cost, 4),
        "spot_seconds": _rounded(row.spot_seconds),
        "spot_cost": _rounded(row.spot_cost, 4),
        "meets_deadline": row.meets_deadline,
        "usable_bytes": memory.usable if memory else None,
        "context_bytes": memory.context if memory else None,
        "table_bytes": memory.tables if memory else None,
        "activation_bytes": memory.activations if memory else None,
        "graph_bytes": memory.graphs if memory else None,
        "kv_cache_bytes": max(memory.kv, 0) if memory else None,
        "weights_share": round(row.weights_share, 4),
        "rule_70_30": row.follows_70_30,
        "batch": time.batch if time else None,
        "prefill_tokens_per_second": _rounded(time.prefill_tokens_per_second) if time else None,
        "decode_tokens_per_second": _rounded(time.decode_tokens_per_second) if time else None,
        "basis": basis,
        "recommended": recommended,
        "reason": row.reason,
    }


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def short_list(rows: Sequence[Candidate], chosen: Sequence[Recommendation]) -> list[Candidate]:
    """One count for each model, card and scheme: the cheapest in time, else the best that fits."""
    picks = {r.choice.key for r in chosen if r.choice}
    best: dict[tuple[str, str, str], Candidate] = {}

    def order(row: Candidate) -> tuple[bool, bool, bool, float, int]:
        cost = row.cost if row.cost is not None else (row.seconds or 0) * row.count
        return (row.key not in picks, not row.fits, not row.meets_deadline, cost, -row.count)

    for row in rows:
        key = (row.model, row.gpu, row.scheme)
        if key not in best or order(row) < order(best[key]):
            best[key] = row
    return list(best.values())


def table(rows: Sequence[Candidate], chosen: Sequence[Recommendation]) -> str:
    """The rows that fit, cheapest first, then a line for each that does not."""
    picks = {r.choice.key for r in chosen if r.choice}
    several = len({r.model for r in rows}) > 1
    fitting = [r for r in rows if r.fits]
    fitting.sort(key=lambda r: (r.model, r.cost is None, r.cost or 0.0, r.seconds or 0.0))
    lines: list[tuple[str, ...]] = [("model", *_HEADER) if several else _HEADER]
    for row in fitting:
        cells = _cells(row, row.key in picks)
        lines.append((row.model, *cells) if several else cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {0, 1, 4, len(widths) - 1} if several else {0, 3, len(widths) - 1}
    text = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    refused = [r for r in rows if not r.fits]
    if refused:
        text += ["", "Does not fit:"] if fitting else ["Does not fit:"]
        for row in refused:
            name = f"{row.model} on " if several else ""
            text.append(f"  {name}{row.count} x {row.gpu} {row.scheme}: {row.reason}")
    return "\n".join(text if fitting else text[1:])


def _cells(row: Candidate, picked: bool) -> tuple[str, ...]:
    marks = ["<- recommended"] if picked else []
    if row.tensor_parallel > 1 and not row.runnable:
        marks.append("split: not yet runnable")
    if not row.meets_deadline:
        marks.append("misses the deadline")
    return (
        row.gpu,
        str(row.count),
        str(row.tensor_parallel),
        row.scheme,
        f"{row.weights_bytes / 1e9:.2f} GB",
        f"{row.kv_bytes_per_token / 1024:g} KiB",
        f"{row.max_sequences:,}",
        f"{row.time.decode_tokens_per_second:,.0f}" if row.time else "-",
        duration(row.seconds),
        dollars(row.cost),
        dollars(row.spot_cost),
        ", ".join(marks),
    )
