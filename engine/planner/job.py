"""How long a whole job takes on a number of equal workers, and what it costs.

Requests have equal lengths here: waves of as many sequences as memory and the engine's limit
allow, each prefilled once and decoded together. A common prefix is computed once a worker.
"""

import math
from dataclasses import dataclass

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.memory import Settings
from headrace.engine.planner.roofline import Efficiency, Roofline

_MOST = 10**12
_LOAD_BYTES_PER_SECOND = 1e9
_PROCESS_START = 20.0
_SPOT_REPLACEMENT = 180.0
"""Seconds until a worker that lost its machine has a new one."""
INTERRUPTIONS_PER_HOUR = 0.05
"""Of one machine. Providers publish 5 to 20 % a month for most types, far more for scarce ones."""


@dataclass(frozen=True, slots=True)
class Job:
    """`prompt` and `output` are tokens of one request, `shared_prefix` those all prompts share.

    `concurrency`: how many requests should run at once; None: as many as the engine takes.
    `deadline` in seconds, None when there is none.
    """

    requests: int = 10000
    prompt: int = 1024
    output: int = 256
    shared_prefix: int = 0
    concurrency: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        for name in ("requests", "prompt", "output"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise PlanError(
                    f"{name} must be at least 1 and at most {_MOST:,}, not {getattr(self, name)}"
                )
        if not 0 <= self.shared_prefix <= self.prompt:
            raise PlanError(
                f"the shared prefix of {self.shared_prefix} tokens is longer than the prompt "
                f"of {self.prompt}"
                if self.shared_prefix > 0
                else f"the shared prefix must not be negative, not {self.shared_prefix}"
            )
        if self.concurrency is not None and not 1 <= self.concurrency <= _MOST:
            raise PlanError(
                f"concurrency must be at least 1 and at most {_MOST:,}, not {self.concurrency}"
            )
        if self.deadline is not None and self.deadline <= 0:
            raise PlanError(f"the deadline must be positive, not {self.deadline} s")

    @property
    def length(self) -> int:
        return self.prompt + self.output

    def demand(self, settings: Settings) -> int:
        """Requests that should run at once."""
        wanted = self.concurrency or settings.max_num_seqs
        return min(self.requests, wanted)


@dataclass(frozen=True, slots=True)
class JobTime:
    """Seconds of one worker's share; rates are of one worker with its batch full."""

    startup: float
    prefill: float
    decode: float
    batch: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    latency: float
    """Of one request once it is admitted."""

    @property
    def total(self) -> float:
        return self.startup + self.prefill + self.decode


def job_time(
    job: Job,
    settings: Settings,
    roofline: Roofline,
    efficiency: Efficiency,
    max_sequences: int,
    workers: int,
) -> JobTime:
    """Time of the worker with the largest share. `max_sequences` must be at least 1."""
    share = math.ceil(job.requests / workers)
    limit = min(max_sequences, settings.max_num_seqs, job.concurrency or max_sequences)
    batch = min(limit, share)
    prefill = _prefill_seconds(job, settings, roofline, efficiency, share)
    full, rest = divmod(share, batch)
    context = job.prompt + job.output / 2

    def wave(size: int) -> float:
        """One token of each comes out of its prefill, the others out of a step each."""
        step = roofline.decode(size, context, job.shared_prefix).seconds(efficiency)
        return (job.output - 1) * step

    decode = full * wave(batch) + (wave(rest) if rest else 0.0)
    step = roofline.decode(batch, context, job.shared_prefix).seconds(efficiency)
    new_tokens = job.shared_prefix + share * max(job.prompt - job.shared_prefix, 1)
    return JobTime(
        startup=_PROCESS_START + roofline.weights.total * roofline.tp / _LOAD_BYTES_PER_SECOND,
        prefill=prefill,
        decode=decode,
        batch=batch,
        prefill_tokens_per_second=new_tokens / prefill,
        decode_tokens_per_second=batch / step,
        latency=prefill / share * batch + wave(batch),
    )


def _prefill_seconds(
    job: Job, settings: Settings, roofline: Roofline, efficiency: Efficiency, share: int
) -> float:
    """Prompt tokens in steps of the engine's token budget; the shared ones once."""
    budget = settings.max_num_batched_tokens
    seconds = 0.0
    done = 0
    while done < job.shared_prefix:
        chunk = min(budget, job.shared_prefix - done)
        seconds += roofline.prefill(chunk, done).seconds(efficiency)
        done += chunk
    own = max(job.prompt - job.shared_prefix, 1)
    if own > budget:
        one = 0.0
        for start in range(0, own, budget):
            chunk = min(budget, own - start)
            one += roofline.prefill(chunk, job.shared_prefix + start).seconds(efficiency)
        return seconds + share * one
    together = max(1, min(budget // own, share))
    steps = share / together
    work = roofline.prefill(together * own, job.shared_prefix, together)
    return seconds + steps * work.seconds(efficiency)


def spot_seconds(time: JobTime, cards_per_worker: int, per_hour: float) -> float:
    """Expected time when each machine is taken away `per_hour` times an hour.

    Finished requests are kept; a loss costs the replacement, a start and, for the requests in
    flight, half their time on average.
    """
    loss = _SPOT_REPLACEMENT + time.startup + time.latency / 2
    working = time.prefill + time.decode
    return time.startup + working * (1 + per_hour * cards_per_worker * loss / 3600)
