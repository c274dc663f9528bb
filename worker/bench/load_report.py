"""Figures of a load test: percentiles, throughput, goodput, the verdict, and two runs compared.

A percentile is the nearest rank: a value that some request really had. A request without an answer
has an infinite total, so that a service which drops the slow ones does not look faster for it.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.worker.bench.load import LoadRun, Sample
from headrace.worker.bench.report import figure, markdown

MEASURES = ("queue_wait", "time_to_first_token", "inter_token", "total")
_TITLES = {
    "queue_wait": "queue wait",
    "time_to_first_token": "time to first token",
    "inter_token": "inter-token (mean of each answer)",
    "total": "total",
}
RANKS = (50, 95, 99)
_RESAMPLES = 500


def percentile(values: Sequence[float], rank: float) -> float:
    """The smallest value that at least `rank` percent of the values do not exceed."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(rank / 100 * len(ordered)) - 1)]


def values_of(samples: Sequence[Sample], measure: str) -> list[float]:
    """Seconds of every request that has the measure; `total` of those without an answer too."""
    if measure == "total":
        return [sample.total for sample in samples]
    found = [getattr(s, measure) for s in samples if not s.failure and s.ended is not None]
    return [value for value in found if value is not None]


def summarize(
    run: LoadRun, *, p99: float | None = None, limit: float | None = None
) -> dict[str, Any]:
    """What goes into the JSON file. `p99`: the limit that the P99 of the total is judged against;
    `limit`: seconds within which an answer counts as good, default `p99`."""
    samples, plan = run.samples, run.plan
    answered = [s for s in samples if not s.failure and s.ended is not None]
    tokens = sum(s.output_tokens for s in answered)
    latency = {}
    for measure in MEASURES:
        values = values_of(samples, measure)
        finite = [value for value in values if math.isfinite(value)]
        latency[measure] = {
            "n": len(values),
            "mean": sum(finite) / len(finite) if finite else None,
            **{f"p{rank}": _finite(percentile(values, rank)) for rank in RANKS},
            "max": _finite(max(values, default=math.nan)),
        }
    limit = p99 if limit is None else limit
    good = [s for s in answered if limit is not None and s.total <= limit]
    seconds = run.seconds or math.inf
    return {
        "load": {
            "kind": "closed loop" if plan.rate is None else "poisson",
            "rate": plan.rate,
            "concurrency": plan.concurrency if plan.rate is None else None,
            "requests": len(samples),
            "seed": plan.seed,
        },
        "seconds": run.seconds,
        "offered_per_s": len(samples) / run.arriving if run.arriving > 0 else None,
        "backlog_after_arrivals": run.backlog,
        "answered": len(answered),
        "failures": dict(Counter(s.failure for s in samples if s.failure)),
        "requests_per_s": len(answered) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "prompt_tokens_per_s": sum(s.prompt_tokens for s in answered) / seconds,
        "latency": latency,
        "goodput": None
        if limit is None
        else {
            "limit_s": limit,
            "requests_per_s": len(good) / seconds,
            "share": len(good) / len(samples) if samples else 0.0,
        },
        "p99_limit_s": p99,
        "passed": None if p99 is None else verdict(samples, p99),
        "samples": [
            {
                "due": s.due,
                "ended": s.ended,
                "output_tokens": s.output_tokens,
                "failure": s.failure or None,
                **{measure: _measured(s, measure) for measure in MEASURES},
            }
            for s in samples
        ],
    }


def verdict(samples: Sequence[Sample], p99: float) -> bool:
    """Whether the P99 of the total is within the limit; nothing measured has not passed."""
    return bool(samples) and percentile(values_of(samples, "total"), 99) <= p99


def table(summary: Mapping[str, Any]) -> str:
    """Markdown: the percentiles, then one line of rates and one of the verdict."""
    rows = []
    for measure in MEASURES:
        found = summary["latency"][measure]
        cells = [_seconds(found[name]) for name in ("p50", "p95", "p99", "max")]
        rows.append([_TITLES[measure], *cells, found["n"]])
    lines = [markdown(["seconds", "P50", "P95", "P99", "max", "n"], rows), ""]
    lines.append(
        f"{summary['answered']} of {summary['load']['requests']} answered in "
        f"{summary['seconds']:.2f} s: {figure(summary['requests_per_s'])} requests/s, "
        f"{figure(summary['output_tokens_per_s'])} output tokens/s; "
        f"{summary['backlog_after_arrivals']} were under way when the last had arrived."
    )
    if summary["failures"]:
        parts = (f"{count} {code}" for code, count in summary["failures"].items())
        lines.append(f"Without an answer: {', '.join(parts)}.")
    good = summary["goodput"]
    if good is not None:
        lines.append(
            f"Goodput within {good['limit_s']:g} s: {figure(good['requests_per_s'])} requests/s, "
            f"{good['share']:.1%} of all."
        )
    if summary["load"]["requests"] < 100:
        lines.append("Fewer than 100 requests: the P99 is the slowest one.")
    if summary["passed"] is not None:
        word = "PASS" if summary["passed"] else "FAIL"
        shown = _seconds(summary["latency"]["total"]["p99"])
        lines.append(f"{word}: P99 of the total {shown} s, limit {summary['p99_limit_s']:g} s.")
    return "\n".join(lines)


def compare(before: Mapping[str, Any], after: Mapping[str, Any], seed: int = 0) -> str:
    """Markdown: every percentile of two runs, the ratio, and its 95 % bootstrap interval.

    An interval around 1 means that the runs do not tell a difference.
    """
    draw = random.Random(seed)
    rows: list[list[object]] = []
    for measure in MEASURES:
        ours, theirs = _samples(after, measure), _samples(before, measure)
        for rank in RANKS:
            old, new = percentile(theirs, rank), percentile(ours, rank)
            low, high = _interval(draw, theirs, ours, rank)
            ratio = _ratio(new, old)
            rows.append(
                [
                    *(f"{_TITLES[measure]} P{rank} s", _seconds(_finite(old))),
                    *(_seconds(_finite(new)), figure(ratio), _range(low, high)),
                ]
            )
    for name in ("requests_per_s", "output_tokens_per_s"):
        old, new = before[name], after[name]
        ratio = _ratio(new, old)
        rows.append([name.replace("_per_s", "/s").replace("_", " "), figure(old), figure(new)])
        rows[-1] += [figure(ratio), ""]
    lines = [markdown(["", "before", "after", "ratio", "95 % interval"], rows)]
    changed = [
        f"{name} {before['load'].get(name)} -> {after['load'].get(name)}"
        for name in after["load"]
        if before["load"].get(name) != after["load"].get(name)
    ]
    if changed:
        lines.append(f"\nThe two loads differ, so the ratios mix causes: {', '.join(changed)}.")
    return "\n".join(lines)


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """PNG: how the latencies are distributed, and requests under way over time."""
    from headrace.worker.bench.plots import save_figure, subplots

    figure_, (left, right) = subplots(1, 2, (11, 4))
    for measure in MEASURES:
        values = sorted(v for v in _samples(summary, measure) if math.isfinite(v))
        if not values:
            continue
        total = len(_samples(summary, measure))
        shares = [100 * (index + 1) / total for index in range(len(values))]
        left.step([max(v, 1e-4) for v in values], shares, where="post", label=_TITLES[measure])
    left.set(xscale="log", xlabel="seconds", ylabel="% of requests within", ylim=(0, 100))
    if summary["p99_limit_s"] is not None:
        left.axvline(summary["p99_limit_s"], color="black", linestyle=":", label="P99 limit")
    left.legend(fontsize=8)
    events = [(s["due"], 1) for s in summary["samples"]]
    events += [(s["ended"], -1) for s in summary["samples"] if s["ended"] is not None]
    under_way, times, counts = 0, [0.0], [0]
    for at, change in sorted(events):
        under_way += change
        times.append(at)
        counts.append(under_way)
    right.step(times, counts, where="post")
    right.set(xlabel="seconds", ylabel="requests under way", ylim=(0, None))
    save_figure(figure_, path)


def _samples(summary: Mapping[str, Any], measure: str) -> list[float]:
    """A measure's values from the JSON form, where infinity is null."""
    found = []
    for sample in summary["samples"]:
        value = sample[measure]
        if value is not None:
            found.append(float(value))
        elif measure == "total":
            found.append(math.inf)
    return found


def _measured(sample: Sample, measure: str) -> float | None:
    if sample.failure or sample.ended is None:
        return None
    value: float | None = getattr(sample, measure)
    return value


def _interval(
    draw: random.Random, before: Sequence[float], after: Sequence[float], rank: float
) -> tuple[float, float]:
    if not before or not after:
        return math.nan, math.nan
    ratios = []
    for _ in range(_RESAMPLES):
        old = percentile(draw.choices(before, k=len(before)), rank)
        new = percentile(draw.choices(after, k=len(after)), rank)
        ratio = _ratio(new, old)
        if ratio is not None:
            ratios.append(ratio)
    return percentile(ratios, 2.5), percentile(ratios, 97.5)


def _ratio(new: float, old: float) -> float | None:
    if not (math.isfinite(new) and math.isfinite(old)) or old <= 0:
        return None
    return new / old


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def _range(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"{low:.2f} to {high:.2f}"
