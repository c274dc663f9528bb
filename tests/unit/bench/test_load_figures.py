"""Percentiles, verdict and comparison, on samples whose answers are known."""

import json
import math
from typing import Any

import orjson
import pytest

from headrace.worker.bench import load_report
from headrace.worker.bench.load import LoadPlan, LoadRun, Sample


def answered(total: float, *, due: float = 0.0) -> Sample:
    """Half the time in the queue, a tenth to the first token, then 8 gaps to the ninth."""
    return Sample(
        due=due,
        sent=due,
        ended=due + total,
        queued=total / 2,
        first_token=total / 10,
        worked=total / 2,
        prompt_tokens=5,
        output_tokens=9,
    )


def run_of(samples: list[Sample], **plan: Any) -> LoadRun:
    ends = [s.ended for s in samples if s.ended is not None]
    plan.setdefault("requests", len(samples))
    return LoadRun(LoadPlan(**plan), samples, max(ends, default=1.0), 1.0, 0)


def test_a_percentile_is_a_value_that_a_request_had() -> None:
    """Nearest rank: of 1..100 the P99 is 99; of four values the P50 is the second."""
    values = [float(v) for v in range(100, 0, -1)]
    assert [load_report.percentile(values, rank) for rank in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert load_report.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert load_report.percentile([7.0], 1) == 7.0
    assert math.isnan(load_report.percentile([], 50))


def test_the_parts_of_a_request_add_up() -> None:
    sample = answered(10.0, due=3.0)
    sample.sent += 1.0
    assert sample.queue_wait == pytest.approx(6.0), "late sending counts as waiting"
    assert sample.time_to_first_token == pytest.approx(7.0)
    assert sample.inter_token == pytest.approx((5.0 - 1.0) / 8)
    assert sample.total == pytest.approx(10.0)


def test_dropping_the_slow_ones_does_not_pass() -> None:
    """98 fast answers and 2 that never came: the P99 of the total is infinite, not fast."""
    fast = [answered(1.0) for _ in range(98)]
    lost = [Sample(due=0.0, failure="unfinished") for _ in range(2)]
    assert load_report.verdict(fast, 2.0)
    assert not load_report.verdict(fast + lost, 2.0)
    assert load_report.verdict(fast + lost[:1] + [answered(1.0)], 2.0), "one of 100 is within P99"
    assert not load_report.verdict([], 2.0)


def test_goodput_counts_what_came_in_time() -> None:
    """Totals 1, 2, 3, 4 over 4 seconds, limit 2: two good ones, half a request a second."""
    summary = load_report.summarize(
        run_of([answered(float(t)) for t in range(1, 5)]), p99=9.0, limit=2.0
    )
    assert summary["goodput"] == {"limit_s": 2.0, "requests_per_s": 0.5, "share": 0.5}
    assert summary["output_tokens_per_s"] == 9.0
    assert summary["passed"] is True
    assert summary["latency"]["total"]["p50"] == 2.0


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    """20,000 gaps at 50/s: mean 20 ms within 3 %, and standard deviation equal to the mean."""
    times = list(LoadPlan(rate=50.0, requests=20_000, seed=1).arrivals())
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert mean == pytest.approx(0.02, rel=0.03)
    assert spread == pytest.approx(mean, rel=0.03)
    assert times == list(LoadPlan(rate=50.0, requests=20_000, seed=1).arrivals())
    short = list(LoadPlan(rate=50.0, duration=2.0).arrivals())
    assert short
    assert max(short) <= 2.0


def test_a_load_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="number of requests or a duration"):
        LoadPlan(rate=1.0)
    with pytest.raises(ValueError, match="above 0"):
        LoadPlan(rate=0.0, requests=1)


def test_two_runs_are_compared_with_an_interval() -> None:
    """The second run is twice as slow throughout: every ratio is 2, and the interval says that it
    is no accident. A run against itself has an interval around 1."""
    slow = [answered(2.0 + i / 50) for i in range(100)]
    fast = [answered(1.0 + i / 100) for i in range(100)]
    reports = [
        json.loads(orjson.dumps(load_report.summarize(run_of(samples)))) for samples in (fast, slow)
    ]
    (line,) = [
        line
        for line in load_report.compare(*reports).splitlines()
        if line.startswith("| total P50")
    ]
    ratio, interval = line.split("|")[4:6]
    assert float(ratio) == pytest.approx(2.0)
    low, high = map(float, interval.split(" to "))
    assert 1.5 < low <= 2.0 <= high < 2.6
    same = load_report.compare(reports[0], reports[0])
    (line,) = [line for line in same.splitlines() if line.startswith("| total P50")]
    low, high = map(float, line.split("|")[5].split(" to "))
    assert low <= 1.0 <= high


def test_loads_that_differ_are_named() -> None:
    samples = [answered(1.0) for _ in range(4)]
    closed = load_report.summarize(run_of(samples, concurrency=4))
    poisson = load_report.summarize(run_of(samples, rate=3.0))
    text = load_report.compare(closed, poisson)
    assert "rate None -> 3.0" in text
    assert "differ" not in load_report.compare(closed, closed)
