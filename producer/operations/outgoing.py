"""From a request and its terms to a job as ENQUEUE takes it: encoded, estimated, named."""

import base64
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from headrace.producer import blobs, codec, keys
from headrace.producer.errors import InvalidRequest
from headrace.producer.operations.settings import Settings
from headrace.producer.schemas import Request

RequestLike = str | list[int] | Mapping[str, Any] | Request

DEFAULT_OUTPUT_TOKENS: Final = 256
BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One encoded job, ready for ENQUEUE. `estimate` is 'prompt,output,bytes'."""

    job_id: str
    data: bytes
    estimate: str
    options: bytes
    blob: bytes | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where jobs go and under which terms. `deadline` and `start_at` are Unix seconds."""

    name: str
    batch: str = ""
    deadline: float | None = None
    start_at: float | None = None
    max_attempts: int | None = None
    result_ttl: int | None = None
    failure_ttl: int | None = None


def new_job_id() -> str:
    """80 random bits in 16 characters: short, because Redis keeps an id in half a dozen places."""
    return base64.b32encode(os.urandom(10)).decode().lower()


def idempotent_id(key: str, job_id: str | None = None) -> str:
    """The job id of an idempotency key, which may be any text."""
    if job_id is not None:
        raise InvalidRequest("give job_id or idempotency_key, not both", "idempotency_key")
    if not isinstance(key, str):
        raise InvalidRequest("an idempotency key must be text", "idempotency_key")
    text = key.encode("utf-8", "surrogatepass")
    return "k-" + hashlib.blake2b(text, digest_size=16).hexdigest()


def to_request(item: RequestLike, defaults: Mapping[str, Any]) -> Request:
    """A request from a prompt, a mapping or a Request, with defaults for unset fields."""
    if isinstance(item, Request):
        if not defaults:
            return item
        item = item.model_dump(exclude_unset=True)
    # Whatever is no mapping is a prompt, or is refused as one that can't be.
    fields: dict[str, Any] = dict(item) if isinstance(item, Mapping) else {"prompt": item}
    given = {name: value for name, value in defaults.items() if value is not None}
    return codec.parse_request(
        {name: _without_arrays(value) for name, value in {**given, **fields}.items()}
    )


def _without_arrays(value: Any) -> Any:
    """Numbers and token ids of numpy or torch as Python's own, alone or in a list."""
    if isinstance(value, list | tuple) and value and hasattr(value[0], "tolist"):
        return [item.tolist() if hasattr(item, "tolist") else item for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def encode(request: Request, placement: Placement, job_id: str, settings: Settings) -> Outgoing:
    payload = codec.encode_request(request, settings.max_payload_bytes)
    if isinstance(request.prompt, list):
        prompt_tokens = len(request.prompt)
    else:
        prompt_tokens = -(-len(payload) // BYTES_PER_TOKEN)
    blob = None
    size = len(payload)
    if settings.large and size > settings.large:
        blob, payload = payload, blobs.reference(hashlib.sha256(payload).hexdigest(), size)
    output = DEFAULT_OUTPUT_TOKENS if request.max_tokens is None else max(0, request.max_tokens)
    return Outgoing(
        job_id=keys.check_id("job_id", job_id),
        data=codec.pack(payload),
        estimate=f"{prompt_tokens},{output * (request.n or 1)},{len(payload)}",
        options=_options(placement, settings),
        blob=blob,
    )


def _options(placement: Placement, settings: Settings) -> bytes:
    options: dict[str, Any] = {}
    if placement.deadline is not None:
        options["dl"] = placement.deadline
    if placement.start_at is not None:
        options["at"] = placement.start_at
    own: dict[str, str] = {}
    if placement.max_attempts is not None:
        own["max_att"] = str(placement.max_attempts)
    result_ttl = settings.result_ttl if placement.result_ttl is None else placement.result_ttl
    failure_ttl = settings.failure_ttl if placement.failure_ttl is None else placement.failure_ttl
    if result_ttl != keys.RESULT_TTL:
        own["result_ttl"] = str(result_ttl)
    if failure_ttl != keys.FAILURE_TTL:
        own["failure_ttl"] = str(failure_ttl)
    if own:
        options["set"] = own
    return orjson.dumps(options) if options else b""
