"""The public names of the producer's side. Nothing here imports torch or anything of the worker."""

from headrace.producer.aio import AsyncClient, AsyncJob
from headrace.producer.client import Client, Job
from headrace.producer.errors import (
    HeadraceError,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobError,
    JobExpired,
    JobFailed,
    JobNotFound,
    PayloadTooLarge,
    QueueFull,
    RedisUnavailable,
    ResultTimeout,
)
from headrace.producer.operations import (
    BatchStatus,
    CancelOutcome,
    Completed,
    JobState,
    WorkerInfo,
)
from headrace.producer.schemas import Failure, Message, Request, Result

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "BatchStatus",
    "CancelOutcome",
    "Client",
    "Completed",
    "Failure",
    "HeadraceError",
    "IdempotencyConflict",
    "InvalidRequest",
    "Job",
    "JobCancelled",
    "JobError",
    "JobExpired",
    "JobFailed",
    "JobNotFound",
    "JobState",
    "Message",
    "PayloadTooLarge",
    "QueueFull",
    "RedisUnavailable",
    "Request",
    "Result",
    "ResultTimeout",
    "WorkerInfo",
]
