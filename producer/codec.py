"""Bytes on the wire: requests into RQ's data field, results out of RQ's result streams.

RQ's JSON form of a call is `zlib([function, null, [args], {kwargs}])`, a result is base64 of JSON.
Only our one function name is accepted, and nothing is ever unpickled or imported. Nothing here
talks to Redis.
"""

import base64
import binascii
import zlib
from typing import Any, Final

import orjson
from pydantic import ValidationError

from headrace.producer.errors import InvalidRequest, PayloadError, PayloadTooLarge
from headrace.producer.schemas import Failure, Request, Result, Sampling

FUNCTION: Final = "headrace.worker.jobs.generate"
MAX_PAYLOAD_BYTES: Final = 16 * 1024 * 1024

_HEAD: Final = b'["' + FUNCTION.encode() + b'",null,['
_TAIL: Final = b"],{}]"


def encode_request(request: Request, limit: int = MAX_PAYLOAD_BYTES) -> bytes:
    """The request as JSON with unset fields left out; PayloadTooLarge above `limit` bytes."""
    try:
        payload = orjson.dumps(
            request.model_dump(exclude_unset=True, exclude_none=True), option=_KEYS
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request has a value that is no JSON: {error}") from error
    if len(payload) > limit:
        raise PayloadTooLarge(f"the request has {len(payload):,} bytes; the limit is {limit:,}")
    return payload


_KEYS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS


def parse_request(data: Any) -> Request:
    """A Request from a mapping; InvalidRequest names the first field that is wrong."""
    try:
        return Request.model_validate(data)
    except ValidationError as error:
        raise invalid_request(error) from error


def parse_sampling(values: dict[str, Any]) -> Sampling:
    """Sampling parameters alone; InvalidRequest names the first that is wrong."""
    try:
        return Sampling.model_validate(values)
    except ValidationError as error:
        raise invalid_request(error) from error


def invalid_request(error: ValidationError) -> InvalidRequest:
    """Pydantic's findings in one sentence, without the values (which may be prompts)."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if _is_branch(first["loc"][-1] if first["loc"] else 0):
        # Of a list that is no text either, what is wrong inside it says more.
        alike = (one for one in found if one["loc"][:1] == first["loc"][:1])
        first = max(alike, key=lambda one: len(one["loc"]))
    param = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "is not a parameter that Headrace knows"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return InvalidRequest(f"{param}: {message}{more}" if param else message + more, param or None)


def _is_branch(part: int | str) -> bool:
    """Pydantic names the validator and the branch of a union in an error's path."""
    return isinstance(part, str) and (part == "str" or part.startswith(("function-", "list[")))


def pack(payload: bytes) -> bytes:
    """A payload as RQ's data field."""
    return zlib.compress(_HEAD + payload + _TAIL, 6)


def unpack(data: bytes, limit: int = MAX_PAYLOAD_BYTES) -> bytes:
    """The payload in RQ's data field: the JSON text of one object, not checked further.

    PayloadError, with a failure code, for anything else: not zlib or JSON (`invalid_payload`;
    pickle is one such), another function (`unknown_function`), other arguments, or more than
    `limit` bytes however small it was packed (`payload_too_large`).
    """
    text = _inflate(data, limit + 256)
    if len(text) > limit + 256:
        raise PayloadError("payload_too_large", f"the payload has more than {limit:,} bytes")
    if text.startswith(_HEAD) and text.endswith(_TAIL):
        return text[len(_HEAD) : -len(_TAIL)]
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise PayloadError(
            "invalid_payload",
            "the job's data is no JSON; enqueue with RQ's JSON serializer, never pickle",
        ) from None
    if not isinstance(call, list) or len(call) != 4:
        raise PayloadError(
            "invalid_payload", "the job's data is not [function, null, args, kwargs]"
        )
    function, instance, args, kwargs = call
    if function != FUNCTION or instance is not None:
        raise PayloadError("unknown_function", f"Headrace runs {FUNCTION} and nothing else")
    if not isinstance(args, list) or len(args) != 1 or kwargs or not isinstance(args[0], dict):
        raise PayloadError(
            "invalid_payload", f"{FUNCTION} takes one argument, the request as a JSON object"
        )
    return orjson.dumps(args[0])


def _inflate(data: bytes, limit: int) -> bytes:
    """RQ also accepts data that is not compressed."""
    inflater = zlib.decompressobj()
    try:
        return inflater.decompress(data, limit + 1)
    except zlib.error:
        return data


def encode_result(result: Result) -> bytes:
    """A result as JSON, without its job id, which its key has, and fields at their defaults."""
    fields = result.model_dump(exclude={"job_id"}, exclude_defaults=True, exclude_none=True)
    return orjson.dumps({"v": result.v, **fields}, option=orjson.OPT_NON_STR_KEYS)


def decode_result(job_id: str, text: bytes) -> Result:
    """A Result from `encode_result`'s JSON."""
    try:
        fields = orjson.loads(text)
        return Result.model_validate({**fields, "job_id": job_id})
    except (orjson.JSONDecodeError, ValidationError, TypeError) as error:
        raise PayloadError("invalid_result", f"job {job_id} has an unreadable result") from error


def stream_value(result: bytes) -> bytes:
    """JSON text as RQ keeps a return value in a result stream."""
    return base64.b64encode(result)


def stream_error(text: str) -> bytes:
    """A traceback's text as RQ keeps it in a result stream."""
    return base64.b64encode(zlib.compress(text.encode()))


def stream_text(job_id: str, entry: dict[bytes, bytes]) -> bytes | None:
    """The JSON in an entry of RQ's result stream, or None where RQ recorded a traceback alone."""
    value = entry.get(b"return_value")
    if value is None:
        return None
    try:
        return base64.b64decode(value)
    except binascii.Error as error:
        raise PayloadError("invalid_result", f"job {job_id} has no base64 result") from error


def read_stream(job_id: str, entry: dict[bytes, bytes]) -> Result:
    """A Result from an entry of RQ's result stream, ours or written by RQ itself."""
    value = stream_text(job_id, entry)
    if value is not None:
        return decode_result(job_id, value)
    text = b""
    if entry.get(b"exc_string"):
        try:
            text = zlib.decompress(base64.b64decode(entry[b"exc_string"]))
        except (binascii.Error, zlib.error):
            text = b"unreadable"
    last = text.decode(errors="replace").strip().splitlines()
    return failed(job_id, "failed", last[-1] if last else "RQ recorded a failure without a text")


def failed(
    job_id: str, code: str, message: str, param: str | None = None, retryable: bool = False
) -> Result:
    """A Result that is a failure."""
    failure = Failure(code=code, message=message, param=param, retryable=retryable)
    return Result(job_id=job_id, failure=failure)
