"""What a client does, as plain generators: each yields calls for Redis and is sent their replies.

`Client` and `AsyncClient` drive the same generators, one by blocking, one by awaiting. Nothing here
does input or output. A file a noun: `outgoing` jobs and their `admission`, `states`, `results`,
`endings`, `batches`, `live_workers`.
"""

from headrace.producer.operations.admission import (
    check_memory,
    enqueue,
    resolve_queue,
    submit_chunk,
)
from headrace.producer.operations.batches import (
    BatchStatus,
    Completed,
    batch_status,
    cancel_batch,
    completed,
    create_batch,
)
from headrace.producer.operations.endings import cancel, closing_values, forget
from headrace.producer.operations.live_workers import WorkerInfo, lists_of, workers
from headrace.producer.operations.outgoing import (
    DEFAULT_OUTPUT_TOKENS,
    Outgoing,
    Placement,
    RequestLike,
    encode,
    idempotent_id,
    new_job_id,
    to_request,
)
from headrace.producer.operations.results import read_results, status, wait_result
from headrace.producer.operations.settings import Settings
from headrace.producer.operations.states import CancelOutcome, JobState, state_of
from headrace.producer.operations.steps import MANY, Steps

__all__ = [
    "DEFAULT_OUTPUT_TOKENS",
    "MANY",
    "BatchStatus",
    "CancelOutcome",
    "Completed",
    "JobState",
    "Outgoing",
    "Placement",
    "RequestLike",
    "Settings",
    "Steps",
    "WorkerInfo",
    "batch_status",
    "cancel",
    "cancel_batch",
    "check_memory",
    "closing_values",
    "completed",
    "create_batch",
    "encode",
    "enqueue",
    "forget",
    "idempotent_id",
    "lists_of",
    "new_job_id",
    "read_results",
    "resolve_queue",
    "state_of",
    "status",
    "submit_chunk",
    "to_request",
    "wait_result",
    "workers",
]
