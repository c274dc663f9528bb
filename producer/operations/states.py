"""Where a job is, and what a cancel met, in our words and from RQ's."""

import enum
from typing import Final


class JobState(enum.Enum):
    """Where a job is. `EXPIRED` and `DEAD` are failures with a reason of their own."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


_STATES: Final = {
    "created": JobState.WAITING,
    "queued": JobState.QUEUED,
    "scheduled": JobState.SCHEDULED,
    "deferred": JobState.WAITING,
    "rate_limited": JobState.WAITING,
    "ready_to_enqueue": JobState.WAITING,
    "started": JobState.RUNNING,
    "finished": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "canceled": JobState.CANCELLED,
    "stopped": JobState.CANCELLED,
}


def state_of(status: str) -> JobState:
    """Our word for RQ's status."""
    return _STATES.get(status, JobState.WAITING)


class CancelOutcome(enum.Enum):
    """What a cancel met. Only the first three changed anything."""

    WAS_QUEUED = "was_queued"
    WAS_SCHEDULED = "was_scheduled"
    WAS_RUNNING = "was_running"
    ALREADY_SUCCEEDED = "already_succeeded"
    ALREADY_FAILED = "already_failed"
    ALREADY_CANCELLED = "already_cancelled"
    NOT_FOUND = "not_found"

    @property
    def cancelled(self) -> bool:
        return self.value.startswith("was_")


CANCELS: Final = {
    "queued": CancelOutcome.WAS_QUEUED,
    "created": CancelOutcome.WAS_QUEUED,
    "scheduled": CancelOutcome.WAS_SCHEDULED,
    "deferred": CancelOutcome.WAS_SCHEDULED,
    "rate_limited": CancelOutcome.WAS_SCHEDULED,
    "ready_to_enqueue": CancelOutcome.WAS_SCHEDULED,
    "started": CancelOutcome.WAS_RUNNING,
    "finished": CancelOutcome.ALREADY_SUCCEEDED,
    "failed": CancelOutcome.ALREADY_FAILED,
    "canceled": CancelOutcome.ALREADY_CANCELLED,
    "stopped": CancelOutcome.ALREADY_CANCELLED,
    "missing": CancelOutcome.NOT_FOUND,
}
