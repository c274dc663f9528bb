"""Jobs that end without an answer: what is written of them, cancelling, and forgetting records."""

from collections.abc import Sequence
from typing import Final

import orjson

from headrace.producer import codec, errors, keys, scripts
from headrace.producer.operations.settings import Settings
from headrace.producer.operations.states import CANCELS, CancelOutcome
from headrace.producer.operations.steps import MANY, Steps, text_of
from headrace.producer.schemas import Failure
from headrace.producer.scripts import DeleteBlobs, Eval


def closing_values(outcome: str) -> tuple[bytes, bytes]:
    """Result and error text, as RQ keeps them, of a job that ended without running to its end."""
    message = CLOSING_MESSAGES[outcome]
    failure = Failure(code=outcome, message=message, retryable=outcome != errors.EXPIRED)
    body = orjson.dumps({"v": 1, "failure": failure.model_dump(exclude_defaults=True)})
    return codec.stream_value(body), codec.stream_error(f"{outcome}: {message}")


CLOSING_MESSAGES: Final = {
    errors.EXPIRED: "the deadline passed before the job was done",
    errors.CANCELLED: "the job was cancelled",
    errors.STOPPED: "the job was stopped by an operator",
    errors.WORKER_LOST: "every worker that ran the job died with it; see `headrace dead show`",
}


def cancel(
    job_ids: Sequence[str], settings: Settings, batch: str = "", outcome: str = errors.CANCELLED
) -> Steps[list[CancelOutcome | None]]:
    """What each cancel met; None for a job that is not of `batch`."""
    for job_id in job_ids:
        keys.check_id("job_id", job_id)
    value, text = closing_values(outcome)
    replies = yield Eval(
        scripts.producer("cancel"),
        (keys.queues(),),
        (settings.clock, outcome, settings.failure_ttl, value, text, batch, *job_ids),
    )
    return [None if text_of(r) == "other" else CANCELS[text_of(r)] for r in replies]


def forget(job_ids: Sequence[str], settings: Settings) -> Steps[int]:
    """Deletes the records of ended jobs; how many."""
    deleted = 0
    for start in range(0, len(job_ids), MANY):
        some = [keys.check_id("job_id", job_id) for job_id in job_ids[start : start + MANY]]
        call = Eval(scripts.producer("forget"), (keys.queues(),), (settings.clock, *some))
        gone = yield call
        deleted += len(gone)
        if settings.large and gone:
            yield DeleteBlobs(tuple(text_of(job_id) for job_id in gone))
    return deleted
