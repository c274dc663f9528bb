"""From the engine to the wire: the ends of a job's sequences become its one result.

Nothing here knows Redis, RQ or the loop.
"""

import math
import time
from collections.abc import Sequence as Seq
from typing import Any

from headrace.engine.errors import Failure
from headrace.engine.sequence import FinishReason, Sequence, TokenLogprobs
from headrace.producer import schemas
from headrace.worker.serving_engine import JobEngine, JobTokenizer
from headrace.worker.source import ClaimedJob

LOWEST_LOGPROB = -9999.0
"""JSON has no -inf; what the field sends in its place."""


def to_result(
    request: schemas.Request,
    job: ClaimedJob,
    sequences: Seq[Sequence],
    engine: JobEngine,
    *,
    model: str,
    claimed_at: float = 0.0,
    resumed_from_tokens: int = 0,
    digest: str = "",
) -> schemas.Result:
    """The result of finished sequences; the first that failed makes the whole job a failure.

    `claimed_at` is in Unix seconds. Output tokens taken over from a checkpoint are part of
    `completion_tokens`, once, and told apart by `resumed_from_tokens`. `digest`: of all that the
    answer depends on beside the request.
    """
    failed = next((s for s in sequences if s.finish_reason is FinishReason.FAILED), None)
    if failed is not None:
        failure = failed.failure or Failure("engine_error", "the engine gave no reason")
        return failed_result(failure, job, request, model=model)
    first = sequences[0]
    # model_construct: these are our own values, and validating them again costs 20 us a job.
    usage = schemas.Usage.model_construct(
        prompt_tokens=first.num_prompt_tokens,
        completion_tokens=sum(len(s.output_token_ids) for s in sequences),
        cached_tokens=min(first.num_cached_tokens, first.num_prompt_tokens),
        resumed_from_tokens=resumed_from_tokens,
    )
    return schemas.Result.model_construct(
        job_id=job.job_id,
        model=model,
        object=_object_name(request),
        created=int(time.time()),
        choices=[_to_choice(s, request, engine.tokenizer) for s in sequences],
        usage=usage,
        timing=_timing(sequences, job, claimed_at),
        system_fingerprint=digest or None,
        custom_id=request.custom_id,
        metadata=request.metadata,
    )


def failed_result(
    failure: Failure,
    job: ClaimedJob,
    request: schemas.Request | None = None,
    *,
    model: str | None = None,
) -> schemas.Result:
    """A result that says why there is no answer. `request` None: it could not be read."""
    return schemas.Result(
        job_id=job.job_id,
        model=model,
        object=_object_name(request),
        created=int(time.time()),
        failure=schemas.Failure(
            code=failure.code,
            message=failure.message,
            param=failure.param,
            retryable=failure.retryable,
        ),
        custom_id=request.custom_id if request else None,
        metadata=request.metadata if request else None,
    )


def _object_name(request: schemas.Request | None) -> Any:
    chat = request is not None and request.messages is not None
    return "chat.completion" if chat else "text_completion"


def _to_choice(
    sequence: Sequence, request: schemas.Request, tokenizer: JobTokenizer
) -> schemas.Choice:
    """Ids travel back where ids came: the text alone would not say which tokens it was."""
    logprobs = None
    if sequence.params.logprobs is not None:
        logprobs = [_to_logprob(entry, tokenizer) for entry in sequence.logprobs]
    return schemas.Choice.model_construct(
        index=sequence.sample_index,
        text=sequence.text,
        token_ids=list(sequence.output_token_ids) if isinstance(request.prompt, list) else None,
        finish_reason="length" if sequence.finish_reason is FinishReason.LENGTH else "stop",
        stop_reason=sequence.stop_reason,
        logprobs=logprobs,
    )


def _to_logprob(entry: TokenLogprobs, tokenizer: JobTokenizer) -> schemas.TokenLogprob:
    top = [_one_logprob(token, value, tokenizer) for token, value in entry.top]
    sampled = _one_logprob(entry.token_id, entry.logprob, tokenizer)
    return sampled.model_copy(update={"top": top}) if top else sampled


def _one_logprob(token: int, value: float, tokenizer: JobTokenizer) -> schemas.TokenLogprob:
    raw = tokenizer.token_bytes(token)
    return schemas.TokenLogprob(
        token=tokenizer.token_text(token),
        logprob=value if math.isfinite(value) else LOWEST_LOGPROB,
        bytes=list(raw) if raw is not None else None,
    )


def _timing(sequences: Seq[Sequence], job: ClaimedJob, claimed_at: float) -> schemas.Timing:
    """`first_token` and `total` count from the arrival in the engine."""
    arrivals = [s.arrival_time for s in sequences if s.arrival_time]
    started = min(arrivals, default=0.0)
    firsts = [s.first_token_time for s in sequences if s.first_token_time]
    ended = max(s.finish_time for s in sequences)
    return schemas.Timing.model_construct(
        queued=round(max(0.0, claimed_at - job.enqueued_at), 4) if job.enqueued_at else 0.0,
        first_token=round(max(0.0, min(firsts) - started), 4) if firsts else 0.0,
        total=round(max(0.0, ended - started), 4),
    )
