"""`replicas_required`: the fewest workers that finish the queued work by its deadlines.

The work due by a horizon t must fit into what the workers there are can do by then: a ready worker
rate x t, a loading one rate x (t - when it will be ready), one started now rate x (t - cold start).
Where more workers are needed this is

    ready + loading + ceil(max over t of (W(t) - capacity(t)) / (rate x (t - cold start)))

and where fewer are, the same inequality solved for fewer, so that the number also comes down.
Loading workers are in it, hence no 2 -> 4 -> 8 while the first ones still load. Work that not even
`max_replicas` workers started now can reach counts as missed, not towards infinity.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Below this, a shortfall is rounding and not work.
_EPSILON_S = 1e-6


@dataclass(frozen=True, slots=True)
class Due:
    """Work with one deadline: `in_s` seconds from now (negative: past), `work` in units of rate."""

    in_s: float
    work: float
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Capacity:
    """The workers there are, and what a new one needs. `rate` is work per second and worker."""

    ready: int
    loading_s: tuple[float, ...] = ()
    cold_start_s: float = 0.0
    rate: float = 1.0

    def by(self, horizon_s: float, workers: int) -> float:
        """Work that the first `workers` do by the horizon: ready ones first, new ones last."""
        if horizon_s <= 0.0:
            return 0.0
        total = min(workers, self.ready) * horizon_s
        more = workers - self.ready
        if more > 0:
            for ready_in in self.loading_s[:more]:
                total += max(0.0, horizon_s - max(0.0, ready_in))
            new = more - len(self.loading_s)
            if new > 0:
                total += new * max(0.0, horizon_s - self.cold_start_s)
        return total * self.rate

    def needed(self, horizon_s: float, work: float) -> int | None:
        """The fewest workers that do `work` by the horizon; None when no number does."""
        work -= _EPSILON_S * self.rate
        if work <= 0.0:
            return 0
        if horizon_s <= 0.0:
            return None
        if work <= self.by(horizon_s, self.ready):
            return math.ceil(work / (self.rate * horizon_s))
        existing = self.ready + len(self.loading_s)
        for workers in range(self.ready + 1, existing + 1):
            if work <= self.by(horizon_s, workers):
                return workers
        each = self.rate * (horizon_s - self.cold_start_s)
        if each <= 0.0:
            return None
        return existing + math.ceil((work - self.by(horizon_s, existing)) / each)


@dataclass(frozen=True, slots=True)
class Required:
    """`replicas` includes ready and loading ones that are still needed. `horizon_s` decided it."""

    replicas: int
    missed_jobs: int = 0
    missed_work: float = 0.0
    horizon_s: float | None = None


def replicas_required(
    due: Sequence[Due],
    capacity: Capacity,
    *,
    max_replicas: int,
    catch_up_s: float,
    margin_s: float = 0.0,
) -> Required:
    """The fewest workers for the work in `due`, earliest deadline first.

    margin_s is taken off every horizon: what passes between the reading and the new worker's start
    being ordered, and the length of a job. Missed work is not dropped: it is asked for again within
    `catch_up_s`, as far as `max_replicas` can.
    """
    if max_replicas < 0 or margin_s < 0.0 or catch_up_s <= 0.0:
        raise ValueError(
            f"max_replicas {max_replicas} and margin_s {margin_s} must not be negative, and "
            f"catch_up_s {catch_up_s} must be above 0"
        )
    capacity = Capacity(
        capacity.ready, tuple(sorted(capacity.loading_s)), capacity.cold_start_s, capacity.rate
    )
    most = max(max_replicas, capacity.ready + len(capacity.loading_s))
    accepted = caught_up = missed = 0.0
    missed_jobs = replicas = 0
    horizon: float | None = None
    for entry in sorted(due, key=lambda d: d.in_s):
        if entry.work <= 0.0:
            continue
        at = entry.in_s - margin_s
        room = max(0.0, capacity.by(at, most) - accepted)
        take = min(entry.work, room)
        if entry.work - take > _EPSILON_S * capacity.rate:
            missed += entry.work - take
            missed_jobs += math.ceil(entry.jobs * (1.0 - take / entry.work) - 1e-9)
        accepted += take
        if at <= catch_up_s:
            caught_up = accepted
        needed = capacity.needed(at, accepted) if take > 0.0 else 0
        if needed is not None and needed > replicas:
            replicas, horizon = needed, at
    if missed > 0.0:
        wanted = capacity.needed(catch_up_s, caught_up + missed)
        late = most if wanted is None else wanted
        if late > replicas:
            replicas, horizon = late, catch_up_s
    return Required(min(replicas, max_replicas), missed_jobs, missed, horizon)
