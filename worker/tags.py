"""What a log line says of a job: its id, and its trace where the producer gave one."""

from headrace.producer import schemas, trace_context
from headrace.worker.source import ClaimedJob


def tags(
    job: ClaimedJob, request: schemas.Request | None = None, **more: object
) -> dict[str, object]:
    """For `extra=` of a logging call. `request` None: it could not be read."""
    found: dict[str, object] = {"job_id": job.job_id, **more}
    context = trace_context.carried(request.metadata) if request is not None else None
    if context is not None:
        found["trace_id"] = context.trace_id
        found["traceparent"] = context.traceparent
    return found
