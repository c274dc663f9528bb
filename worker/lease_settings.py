"""What an operator chooses about leases and attempts. Frozen; knows no Redis command."""

import random
from dataclasses import dataclass

from headrace.producer import codec, keys


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Times in seconds. `max_attempts` counts engine errors, `max_crashes` lost workers.

    A failed attempt waits `backoff_first` doubled each time, at most `backoff_most`, less up to
    half of it by chance. `deadline_horizon`: how near a deadline lets a job pass the others.
    `ageing`: the wait that lifts a job one priority class. `clock`: tests only.
    """

    lease: float = 60.0
    max_attempts: int = 3
    max_crashes: int = 3
    backoff_first: float = 1.0
    backoff_most: float = 300.0
    deadline_horizon: float = 30.0
    ageing: float = 300.0
    result_ttl: int = keys.RESULT_TTL
    failure_ttl: int = keys.FAILURE_TTL
    max_payload_bytes: int = codec.MAX_PAYLOAD_BYTES
    allowed_callbacks: frozenset[str] = frozenset()
    clock: str = ""


def backoff(settings: LeaseSettings, failed_attempts: int) -> float:
    """Seconds before the next attempt after `failed_attempts` (1 or more) of them."""
    most = min(settings.backoff_most, settings.backoff_first * 2.0 ** (failed_attempts - 1))
    return most * random.uniform(0.5, 1.0)
