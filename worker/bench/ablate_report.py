"""The ablations' table and picture, from the JSON form."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.worker.bench.attention_scaling import Measured
from headrace.worker.bench.report import figure, markdown


def table(result: Mapping[str, Any]) -> str:
    """Markdown: the techniques, then attention over the length."""
    rows = [
        [
            *(row["technique"], row["measure"], figure(row["on"]), figure(row["off"])),
            *(figure(row["gain"]), f"{row['equal']}/{row['requests']}", row["note"]),
        ]
        for row in result["rows"]
    ]
    head = ["technique", "measure", "on", "off", "gain", "equal outputs", ""]
    lines = [markdown(head, rows)]
    if result["attention"]:
        scaling = [Measured(**found) for found in result["attention"]]
        lines += ["", "One layer's attention over a prompt of that length:", ""]
        head = ["tokens", "tiled ms", "full scores ms", "gain", "tiled MiB", "full scores MiB"]
        lines.append(
            markdown(
                head,
                (
                    [
                        *(found.length, figure(1e3 * found.tiled_s), _times(found.full_s, 1e3)),
                        _times(found.full_s, 1 / found.tiled_s),
                        *(_times(found.tiled_bytes, 2**-20), _times(found.full_bytes, 2**-20)),
                    ]
                    for found in scaling
                ),
            )
        )
    return "\n".join(lines)


def _times(value: float | None, factor: float) -> str:
    return "not run" if value is None else figure(value * factor)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """PNG: the gains, and attention's time and memory over the length."""
    from headrace.worker.bench.plots import save_figure, subplots

    rows = [row for row in result["rows"] if row["gain"]]
    wide = [bool(rows), *[bool(result["attention"])] * 2]
    picture, axes = subplots(1, 3, (15, 4.5))
    for axis, shown in zip(axes, wide, strict=True):
        axis.set_visible(shown)
    gains, times, memory = axes
    labels = [f"{row['technique']}: {row['measure']}" for row in rows]
    gains.barh(labels, [row["gain"] for row in rows])
    gains.axvline(1.0, color="black", linewidth=0.8)
    gains.set(xscale="log", xlabel="gain (times better than without)")
    gains.tick_params(axis="y", labelsize=7)
    top = max((row["gain"] for row in rows), default=1.0)
    low = min((row["gain"] for row in rows), default=1.0)
    ticks = [2.0**power for power in range(-4, 12) if low / 2 <= 2.0**power <= 2 * top]
    gains.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    gains.minorticks_off()
    gains.invert_yaxis()
    lengths = [found["length"] for found in result["attention"]]
    for axis, unit, factor, name in ((times, "ms", 1e3, "s"), (memory, "MiB", 2**-20, "bytes")):
        for kind, label in (("tiled", "tiled"), ("full", "full score matrix")):
            points = [
                (length, found[f"{kind}_{name}"] * factor)
                for length, found in zip(lengths, result["attention"], strict=True)
                if found[f"{kind}_{name}"]
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(xscale="log", yscale="log", xlabel="tokens of prompt", ylabel=unit)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        if lengths:
            axis.legend()
    times.set_title("attention of one layer: time")
    memory.set_title("memory beyond its inputs")
    save_figure(picture, path)
