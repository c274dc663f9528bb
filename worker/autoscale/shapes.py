"""Arrival patterns by name: steady, daily, burst, bulk. The same seed gives the same jobs."""

import math
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from headrace.worker.autoscale.trace import Trace


@dataclass(frozen=True, slots=True)
class Load:
    """`jobs` over `duration_s`, with log-normal lengths of the given means.

    `spread` is the standard deviation of a length over its mean; 0 makes all jobs equal.
    """

    jobs: int
    duration_s: float
    prompt_tokens: float
    output_tokens: float
    spread: float = 1.0
    deadline_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.jobs < 1 or self.duration_s <= 0 or self.spread < 0:
            raise ValueError(
                f"jobs {self.jobs}, duration_s {self.duration_s}, spread {self.spread}: "
                "need at least 1 job, a duration above 0 and no negative spread"
            )


def steady(load: Load, rng: random.Random) -> list[float]:
    """Poisson arrivals at one rate (given their number: uniform over the time)."""
    return sorted(rng.random() * load.duration_s for _ in range(load.jobs))


def daily(load: Load, rng: random.Random) -> list[float]:
    """A day's wave: quietest at the start of each 24 hours (a tenth of the mean), busiest at
    their middle (1.9 times the mean). Shorter durations hold one whole wave."""
    steps = 1440
    period = min(86400.0, load.duration_s)
    step = load.duration_s / steps
    weights = [
        1.0 - 0.9 * math.cos(2 * math.pi * ((i + 0.5) * step % period) / period)
        for i in range(steps)
    ]
    chosen = rng.choices(range(steps), cum_weights=list(accumulate(weights)), k=load.jobs)
    return sorted((i + rng.random()) * step for i in chosen)


def burst(load: Load, rng: random.Random) -> list[float]:
    """A tenth of the jobs spread over the whole time, the rest in three bursts of a hundredth of
    it, at 10, 40 and 70 % of the time."""
    times = [rng.random() * load.duration_s for _ in range(load.jobs // 10)]
    for index in range(load.jobs - len(times)):
        start = (0.1, 0.4, 0.7)[index % 3]
        times.append((start + 0.01 * rng.random()) * load.duration_s)
    return sorted(times)


def bulk(load: Load, rng: random.Random) -> list[float]:
    """One file, submitted at once."""
    return [0.0] * load.jobs


SHAPES: dict[str, Callable[[Load, random.Random], list[float]]] = {
    "steady": steady,
    "daily": daily,
    "burst": burst,
    "bulk": bulk,
}


def make(shape: str, load: Load) -> Trace:
    """The named shape as a Trace. Raises KeyError for an unknown name."""
    rng = random.Random(f"{load.seed}:{shape}")
    arrival = array("d", SHAPES[shape](load, rng))
    patience = math.inf if load.deadline_s is None else load.deadline_s
    return Trace(
        f"{shape}, {load.jobs} jobs",
        arrival,
        _lengths(load.prompt_tokens, load, rng),
        _lengths(load.output_tokens, load, rng),
        array("d", (at + patience for at in arrival)),
    )


def _lengths(mean: float, load: Load, rng: random.Random) -> "array[int]":
    if load.spread == 0:
        return array("q", [max(1, round(mean))] * load.jobs)
    variance = math.log(1.0 + load.spread**2)
    mu, sigma = math.log(mean) - variance / 2.0, math.sqrt(variance)
    draw = rng.lognormvariate
    return array("q", (max(1, round(draw(mu, sigma))) for _ in range(load.jobs)))
