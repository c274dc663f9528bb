"""Reading what became of jobs: their states and their results, waiting where asked to."""

import time
from collections.abc import Sequence
from typing import Any, Final

import orjson

from headrace.producer import blobs, codec, errors, keys
from headrace.producer.errors import InvalidRequest, JobNotFound, ResultTimeout
from headrace.producer.operations.states import JobState, state_of
from headrace.producer.operations.steps import Steps, text_of
from headrace.producer.schemas import Result
from headrace.producer.scripts import Block, Commands, ReadBlob

WAIT_SLICE: Final = 5.0


def status(job_id: str) -> Steps[JobState]:
    keys.check_id("job_id", job_id)
    (value,) = yield Commands((("HGET", keys.job(job_id), "status"),))
    if value is None:
        raise JobNotFound(job_id)
    return state_of(text_of(value))


def wait_result(job_id: str, timeout: float | None) -> Steps[Result]:
    """The job's result, waiting for it; JobNotFound, or ResultTimeout after `timeout` seconds."""
    keys.check_id("job_id", job_id)
    number = isinstance(timeout, int | float) and timeout == timeout
    if timeout is not None and not number:
        raise InvalidRequest(f"timeout is {timeout!r:.40}; give seconds or None", "timeout")
    end = None if timeout is None else time.monotonic() + timeout
    last = b"0-0"
    while True:
        state, entries = yield Commands(
            (
                ("HGET", keys.job(job_id), "status"),
                ("XREVRANGE", keys.results(job_id), "+", "-", "COUNT", 1),
            )
        )
        if state is None and not entries:
            raise JobNotFound(job_id)
        job_state = state_of(text_of(state)) if state else JobState.SUCCEEDED
        if job_state.terminal:
            if entries:
                result = yield from read_entry(job_id, entries[0][1])
                return (yield from _complete(job_id, result))
            if job_state is JobState.CANCELLED:
                return codec.failed(job_id, errors.CANCELLED, "the job was cancelled")
            return codec.failed(job_id, "result_gone", "the job ended but its result is gone")
        if entries:
            last = entries[0][0]
        left = WAIT_SLICE if end is None else min(WAIT_SLICE, end - time.monotonic())
        if left <= 0:
            raise ResultTimeout(
                f"job {job_id} is {job_state.value} after {timeout:g} s; it goes on"
            )
        yield Block(
            ("XREAD", "BLOCK", max(1, int(left * 1000)), "STREAMS", keys.results(job_id), last),
            left,
        )


def read_entry(job_id: str, entry: dict[bytes, bytes]) -> Steps[Result]:
    try:
        text = codec.stream_text(job_id, entry)
        digest = blobs.digest_in(text) if text is not None else None
        if digest is None:
            return codec.read_stream(job_id, entry)
        content = yield ReadBlob(job_id, digest)
        return codec.decode_result(job_id, content)
    except errors.PayloadError as error:
        # A record that others wrote over must not stop the reader of a whole batch.
        return codec.failed(job_id, error.code, str(error))


def _complete(job_id: str, result: Result) -> Steps[Result]:
    """Results that the queue wrote itself lack the caller's data; take it from the request."""
    if result.failure is None or result.custom_id is not None or result.metadata is not None:
        return result
    (data,) = yield Commands((("HGET", keys.job(job_id), "data"),))
    return _with_caller_data(result, data)


def _with_caller_data(result: Result, data: bytes | None) -> Result:
    if not data:
        return result
    try:
        request = orjson.loads(codec.unpack(data))
    except (errors.PayloadError, orjson.JSONDecodeError):
        return result
    if not isinstance(request, dict):
        return result
    custom_id, metadata = request.get("custom_id"), request.get("metadata")
    update: dict[str, Any] = {}
    if isinstance(custom_id, str):
        update["custom_id"] = custom_id
    if isinstance(metadata, dict):
        update["metadata"] = metadata
    return result.model_copy(update=update) if update else result


def read_results(job_ids: Sequence[str]) -> Steps[dict[str, Result]]:
    """Results of those that have one, in one round trip (two where some failed)."""
    for job_id in job_ids:
        keys.check_id("job_id", job_id)
    if not job_ids:
        return {}
    replies = yield Commands(
        tuple(("XREVRANGE", keys.results(job_id), "+", "-", "COUNT", 1) for job_id in job_ids)
    )
    found = {}
    for job_id, entries in zip(job_ids, replies, strict=True):
        if entries:
            found[job_id] = yield from read_entry(job_id, entries[0][1])
    return (yield from complete_many(found))


def complete_many(found: dict[str, Result]) -> Steps[dict[str, Result]]:
    bare = [
        job_id
        for job_id, result in found.items()
        if result.failure is not None and result.custom_id is None and result.metadata is None
    ]
    if bare:
        data = yield Commands(tuple(("HGET", keys.job(job_id), "data") for job_id in bare))
        for job_id, packed in zip(bare, data, strict=True):
            found[job_id] = _with_caller_data(found[job_id], packed)
    return found
