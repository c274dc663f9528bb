"""What each policy reads from the same queue."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from headrace.worker.autoscale.policy import (
    Deadline,
    Outstanding,
    PendingOnly,
    ScalingPolicy,
    Tokens,
    jobs_target,
    replicas_wanted,
)
from headrace.worker.autoscale.required import Capacity, Due
from headrace.worker.autoscale.service import ServiceRate

RATE = ServiceRate(1000.0, 100.0, 16)
EMPTY = Capacity(0, (), 60.0)


@dataclass
class Queue:
    pending: int = 0
    running: int = 0
    scheduled_due: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    works: Sequence[Due] = ()
    there: Capacity = EMPTY

    def due(self) -> Sequence[Due]:
        return self.works

    def capacity(self) -> Capacity:
        return self.there


ALL: list[ScalingPolicy] = [
    Outstanding(10.0),
    Tokens(60.0, RATE),
    Deadline(max_replicas=20, catch_up_s=600.0),
]


def test_pending_only_reads_zero_while_every_worker_is_full() -> None:
    """40 jobs in flight and none waiting: the policies that see them keep their workers."""
    full = Queue(0, 40, 0, 40_000, 20_000, [Due(300.0, 240.0, 40)], Capacity(4, (), 60.0))
    assert replicas_wanted(PendingOnly(10.0), full) == 0
    assert [replicas_wanted(policy, full) for policy in ALL] == [4, 4, 1]


def test_retries_that_fall_due_soon_count() -> None:
    assert replicas_wanted(Outstanding(10.0), Queue(scheduled_due=11)) == 2


@pytest.mark.parametrize("policy", [PendingOnly(10.0), *ALL])
def test_an_empty_queue_asks_for_nothing(policy: ScalingPolicy) -> None:
    assert replicas_wanted(policy, Queue()) == 0


def test_tokens_tell_long_jobs_from_short_ones() -> None:
    """10 jobs of 100 tokens and 10 of 1000: outstanding cannot tell, tokens ask tenfold."""
    short = Queue(pending=10, output_tokens=10 * 600)
    long = Queue(pending=10, output_tokens=10 * 6000)
    assert replicas_wanted(Outstanding(10.0), short) == replicas_wanted(Outstanding(10.0), long)
    assert [replicas_wanted(Tokens(60.0, RATE), q) for q in (short, long)] == [1, 10]


def test_the_jobs_target_is_what_one_replica_does_in_the_acceptable_wait() -> None:
    """16 slots, jobs of 20 s in a full batch, 5 minutes: 16 x 300 / 20 = 240; never below one."""
    assert jobs_target(16, 300.0, 20.0) == 240.0
    assert jobs_target(1, 5.0, 600.0) == 1.0


def test_work_is_prompt_over_prefill_plus_output_over_decode() -> None:
    assert RATE.work_s(2000, 50) == 2.5
    assert RATE.alone_s(2000, 50) == 40.0
    assert ServiceRate(1000.0, 100.0, 16, 25.0).alone_s(2000, 50) == 10.0


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 0)])
def test_rates_must_be_above_zero(bad: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        ServiceRate(*bad)
