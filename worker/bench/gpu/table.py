"""The results as Markdown, headed by the card's name."""

from typing import Any

from headrace.worker.bench.gpu.items import ITEMS

_TITLES = {item.name: item.title for item in ITEMS}


def markdown_report(document: dict[str, Any]) -> str:
    lines = [
        f"{document['device']}, Python {document['python']}, torch {document['torch']},"
        f" Triton {document['triton']}, {document['at']}"
    ]
    if document["rehearsal"]:
        lines += ["", "A rehearsal with tiny shapes on a CPU: that it runs, not how fast."]
    for result in document["items"]:
        lines += ["", f"### {_TITLES[result['item']]}", ""]
        if result["status"] != "done":
            lines += [f"{result['status']}: {str(result.get('reason', '')).strip()}", ""]
        rows = result.get("rows", [])
        if not rows:
            continue
        if any("microseconds" in row for row in rows):
            lines += _kernel_rows(rows)
        else:
            lines += _rows(rows)
    return "\n".join(lines) + "\n"


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| | value | | target | met |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['what']} | {_figure(row['value'])} | {row['unit']} | {row.get('target', '')}"
            f" | {_met(row)} |"
        )
    return lines


def _kernel_rows(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| | us | of the roofline | GB/s | TFLOP/s | beside | us | times | target | met |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['what']} | {_figure(row['microseconds'])} | {row['roofline_share']:.0%}"
            f" | {_figure(row['gb_per_s'])} | {_figure(row['tflops'])} | {row['beside']}"
            f" | {_figure(row.get('their_microseconds'))} | {_figure(row.get('times_faster'))}"
            f" | {row.get('target', '')} | {_met(row)} |"
        )
    return lines


def _met(row: dict[str, Any]) -> str:
    return "" if "met" not in row else "yes" if row["met"] else "no"


def _figure(value: float | None) -> str:
    if value is None or value == 0:
        return "" if value is None else "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
