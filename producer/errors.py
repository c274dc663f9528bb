"""Errors of the queue's side: one tree, each with what happened and what to do.

HeadraceError
├── InvalidRequest (ValueError)      the request cannot be sent: which field, why
│   ├── InvalidName                  a job id, queue, tenant or batch that can't be a key
│   └── PayloadTooLarge              larger than the limit
├── PayloadError                     what lies in Redis is no job of ours (garbage, pickle, ...)
├── QueueFull                        admission refused: depth, bytes or Redis memory
├── IdempotencyConflict              the same id or key with another body
├── JobError                         how a job ended, from `result()`; `.job_id`, `.result`
│   ├── JobFailed                    with a failure: `.failure.code`, `.failure.message`
│   ├── JobExpired                   its deadline passed
│   └── JobCancelled                 it was cancelled or stopped
├── JobNotFound                      no such job: never sent, forgotten, or its TTL passed
├── ResultTimeout (TimeoutError)     not finished in time; the job goes on
└── RedisUnavailable (ConnectionError)  Redis can't be reached, or not used as it is
"""

from headrace.producer.schemas import Failure, Result


class HeadraceError(Exception):
    """Base of everything that this package raises on purpose. `accepted`: ids of jobs that the same
    call had sent before, which go on."""

    accepted: tuple[str, ...] = ()


class InvalidRequest(HeadraceError, ValueError):
    """A request that cannot be sent. `param` names the field when there is one, `index` the
    request's place among those of one call."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.index: int | None = None

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.index is None else f"requests[{self.index}]: {message}"


class InvalidName(InvalidRequest):
    """A name that cannot be part of a Redis key."""


class PayloadTooLarge(InvalidRequest):
    """The encoded request is larger than the limit; the message gives both."""


class PayloadError(HeadraceError):
    """Bytes in Redis that are no job of ours. `code` is the failure code that the job gets."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class QueueFull(HeadraceError):
    """Admission refused. `accepted`: those of the same call that did get in."""

    def __init__(self, message: str, accepted: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.accepted = accepted


class IdempotencyConflict(HeadraceError):
    """The id (or idempotency key) is taken by a job with another body."""

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"job {job_id} exists with another body; use a new id or key, or send the same body"
        )
        self.job_id = job_id


class JobError(HeadraceError):
    """A job that ended without an answer."""

    def __init__(self, job_id: str, failure: Failure, result: Result | None = None) -> None:
        super().__init__(f"job {job_id}: {failure.code}: {failure.message}")
        self.job_id = job_id
        self.failure = failure
        self.result = result


class JobFailed(JobError):
    """The job ended with a failure."""


class JobExpired(JobError):
    """The job's deadline passed before it was done."""


class JobCancelled(JobError):
    """The job was cancelled, or stopped by an operator."""


class JobNotFound(HeadraceError):
    """No such job in Redis."""

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"no job {job_id}: it was never sent, was forgotten, or its result's time has passed"
        )
        self.job_id = job_id


class ResultTimeout(HeadraceError, TimeoutError):
    """The job was not finished in time. It goes on; ask again."""


class RedisUnavailable(HeadraceError, ConnectionError):
    """Redis cannot be reached or cannot be used; the message says why and what to do."""


EXPIRED = "expired"
CANCELLED = "cancelled"
STOPPED = "stopped"
WORKER_LOST = "worker_lost"

_BY_CODE: dict[str, type[JobError]] = {
    EXPIRED: JobExpired,
    CANCELLED: JobCancelled,
    STOPPED: JobCancelled,
}


def error_for(result: Result) -> JobError | None:
    """The error that `result()` raises for a result, or None for an answer."""
    if result.failure is None:
        return None
    kind = _BY_CODE.get(result.failure.code, JobFailed)
    return kind(result.job_id, result.failure, result)
