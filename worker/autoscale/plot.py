"""A comparison as a picture: queue, replicas and waits over time, one colour a policy.

matplotlib is imported when a plot is asked for, not before.
"""

import io
from pathlib import Path
from typing import Any

from headrace.worker.autoscale.compare import Comparison, Result
from headrace.worker.autoscale.outcome import percentile

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_BINS = 96


class PlotUnavailable(Exception):
    """matplotlib is not installed."""


def plot(comparison: Comparison, path: Path) -> None:
    """Write the picture as PNG. Raises PlotUnavailable, OSError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as error:
        raise PlotUnavailable(
            "a plot needs matplotlib: install the extra with pip install 'headrace[plot]'"
        ) from error
    figure = Figure(figsize=(9.0, 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    queue, replicas, waits = figure.subplots(3, 1, sharex=True)
    for index, result in enumerate(comparison.results):
        _draw(result, _COLOURS[index % len(_COLOURS)], comparison, queue, replicas, waits)
    queue.set_ylabel("jobs outstanding\n(dashed: pending)")
    replicas.set_ylabel("replicas\n(filled: ready)")
    waits.set_ylabel("p95 wait of arrivals, s")
    waits.axhline(comparison.goals.p95_wait_s, color="#888888", linewidth=0.8, linestyle=":")
    waits.set_xlabel("hours")
    for axes in (queue, replicas, waits):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    queue.legend(fontsize="small", loc="upper right")
    figure.suptitle(comparison.scenario.trace.name)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    # A palette takes a third of the bytes.
    Image.open(drawn).convert("RGB").quantize(256).save(path, format="png", optimize=True)


def _draw(
    result: Result, colour: str, comparison: Comparison, queue: Any, replicas: Any, waits: Any
) -> None:
    samples = result.outcome.samples
    hours = [s.at / 3600.0 for s in samples]
    outstanding = [s.pending + s.running for s in samples]
    queue.plot(hours, outstanding, color=colour, linewidth=1.1, label=result.label)
    queue.plot(hours, [s.pending for s in samples], color=colour, linewidth=0.8, linestyle="--")
    there = [s.replicas for s in samples]
    replicas.step(hours, there, where="post", color=colour, linewidth=1.1)
    ready = [s.ready for s in samples]
    replicas.fill_between(hours, ready, step="post", color=colour, alpha=0.12, linewidth=0)
    waits.plot(*_waits(result, comparison), color=colour, linewidth=1.1, marker=".", markersize=3)


def _waits(result: Result, comparison: Comparison) -> tuple[list[float], list[float]]:
    """p95 wait by the time of arrival, in bins."""
    trace, out = comparison.scenario.trace, result.outcome
    width = max(trace.end_s / _BINS, 1.0)
    bins: dict[int, list[int]] = {}
    for job, arrival in enumerate(trace.arrival):
        bins.setdefault(int(arrival / width), []).append(job)
    at = [(index + 0.5) * width / 3600.0 for index in bins]
    waits = out.waits
    return at, [percentile(sorted(waits[j] for j in jobs), 95.0) for jobs in bins.values()]
