"""From the wire to the engine: a claimed job's payload becomes sequences.

Everything that can be wrong with a request is found here or in `Engine.add` and comes out as one
RequestError, so that it ends as that job's failure and nobody else's. Codes:

invalid_payload        not JSON, not UTF-8, not an object
unsupported_version    written by a newer producer
unknown_parameter      a field that nobody knows
unsupported_parameter  a field of the OpenAI API that is not served here
invalid_request        a value of the wrong type or out of range (`param` says which)
empty_prompt, prompt_too_long, template_error, model_not_found

Nothing here knows Redis, RQ or the loop.
"""

import hashlib
from typing import Any, NoReturn

import pydantic
import pydantic_core

from headrace.engine.errors import RequestError
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence
from headrace.producer import schemas
from headrace.worker.serving_engine import JobEngine, JobTokenizer
from headrace.worker.source import ClaimedJob

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024

UNSUPPORTED = frozenset(
    {
        "audio",
        "best_of",
        "echo",
        "function_call",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "prompt_logprobs",
        "reasoning_effort",
        "response_format",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "structured_outputs",
        "suffix",
        "tool_choice",
        "tools",
        "user",
        "verbosity",
        "web_search_options",
    }
)
"""Parameters of the OpenAI API and of vLLM that are refused by name instead of ignored."""


def parse_request(payload: bytes) -> schemas.Request:
    """The checked request. Raises RequestError; `unsupported_version` before anything else."""
    try:
        return schemas.Request.model_validate_json(payload, strict=True)
    except pydantic.ValidationError as error:
        failure = _explain(error)
        if failure.code != "invalid_payload":
            _check_version(payload)
        raise failure from None


def wire_version(payload: bytes) -> int | None:
    """The schema version that a payload declares; None when it declares none that is readable."""
    try:
        document = pydantic_core.from_json(payload)
    except ValueError:
        return None
    version = document.get("v", schemas.WIRE_VERSION) if isinstance(document, dict) else None
    return version if isinstance(version, int) and not isinstance(version, bool) else None


def _check_version(payload: bytes) -> None:
    version = wire_version(payload)
    if version is not None and version > schemas.WIRE_VERSION:
        raise RequestError(
            "unsupported_version",
            f"the request is of schema version {version}; this worker reads versions up to "
            f"{schemas.WIRE_VERSION}. Upgrade the workers before the producers",
            "v",
        )


def _explain(error: pydantic.ValidationError) -> RequestError:
    """The first finding as one RequestError; never the input itself, which may be private."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    found = next((item for item in details if item["type"] == "extra_forbidden"), details[0])
    kind, place, message = found["type"], found["loc"], found["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return RequestError("invalid_payload", f"the payload is not JSON: {message}")
    if kind == "model_type" and not place:
        return RequestError("invalid_payload", "the payload is JSON but not an object")
    name = ".".join(str(part) for part in place if part not in ("str", "list[int]", "list[str]"))
    name = name[:200]
    if kind == "extra_forbidden":
        if str(place[0]) in UNSUPPORTED:
            return RequestError("unsupported_parameter", f"{name} is not supported", name)
        return RequestError("unknown_parameter", f"{name} is not a known parameter", name)
    if kind == "string_type" and place[0] == "messages" and place[-1] == "content":
        message = "only text content is supported"
        return RequestError("unsupported_parameter", f"{name}: {message}", name)
    if not place:
        return RequestError("invalid_request", message)
    return RequestError("invalid_request", f"{name}: {message}", name)


def to_sequences(request: schemas.Request, job: ClaimedJob, engine: JobEngine) -> list[Sequence]:
    """One sequence for each of the `n` answers, told apart by `sample_index`.

    They share one prompt, so the prefix cache computes it once. Raises RequestError.
    """
    if request.v > schemas.WIRE_VERSION or request.v < 1:
        _refuse_version(request.v)
    params = to_params(request, engine.default_sampling)
    params.check(engine.tokenizer.vocab_size)
    prompt = _prompt_token_ids(request, engine)
    seed = params.seed if params.seed is not None else seed_of(job.job_id)
    return [
        Sequence(
            request_id=job.execution_id,
            prompt_token_ids=prompt,
            params=params,
            seed=seed,
            sample_index=index,
        )
        for index in range(request.n or 1)
    ]


def _refuse_version(version: int) -> NoReturn:
    raise RequestError(
        "unsupported_version",
        f"the request is of schema version {version}; this worker reads versions 1 to "
        f"{schemas.WIRE_VERSION}. Upgrade the workers before the producers",
        "v",
    )


def to_params(request: schemas.Request, defaults: dict[str, Any]) -> SamplingParams:
    """What the request sets, then the model's own defaults (generation_config), then ours."""
    chosen = {name: defaults[name] for name in _SAME_NAME & defaults.keys()}
    for name in _SAME_NAME & request.model_fields_set:
        value = getattr(request, name)
        if value is not None:
            chosen[name] = value
    stop = request.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(
            "invalid_request", f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS}", "stop"
        )
    longest = max((len(text) for text in stops), default=0)
    if longest > MAX_STOP_LENGTH:
        message = f"stop has a string of {longest} characters; at most {MAX_STOP_LENGTH}"
        raise RequestError("invalid_request", message, "stop")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError(
            "invalid_request", "top_logprobs needs logprobs to be true", "top_logprobs"
        )
    chosen["stop"] = stops
    chosen["stop_token_ids"] = tuple(request.stop_token_ids or ())
    chosen["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(**chosen)


_SAME_NAME = frozenset(
    {
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "ignore_eos",
    }
)


def seed_of(job_id: str) -> int:
    """64 bits that every worker derives alike: a resumed job draws the noise it began with."""
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "little")


def _prompt_token_ids(request: schemas.Request, engine: JobEngine) -> list[int]:
    tokenizer, limit = engine.tokenizer, engine.limits.max_model_len
    if request.messages is not None:
        if not request.messages:
            raise RequestError("empty_prompt", "messages is empty", "messages")
        for index, message in enumerate(request.messages):
            _refuse_far_too_long(message.content, f"messages.{index}.content", tokenizer, limit)
        ids = tokenizer.apply_chat_template(
            [message.model_dump(exclude_none=True) for message in request.messages],
            **_template_kwargs(request.chat_template_kwargs),
        )
        if not ids:
            raise RequestError("empty_prompt", "the chat template made no token", "messages")
        return ids
    prompt = request.prompt
    if not prompt:
        raise RequestError("empty_prompt", "prompt is empty", "prompt")
    if isinstance(prompt, str):
        _refuse_far_too_long(prompt, "prompt", tokenizer, limit)
        ids = tokenizer.encode(prompt, add_special_tokens=True)
        if not ids:
            raise RequestError("empty_prompt", "prompt has no token", "prompt")
        return ids
    vocab_size = tokenizer.vocab_size
    for position, token in enumerate(prompt):
        if not 0 <= token < vocab_size:
            raise RequestError(
                "invalid_request",
                f"prompt[{position}] is {token}; token ids are between 0 and {vocab_size - 1}",
                "prompt",
            )
    return list(prompt)


_RESERVED_TEMPLATE_KWARGS = frozenset({"messages", "tokenize", "chat_template", "tools"})


def _template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    for name in kwargs or ():
        if name in _RESERVED_TEMPLATE_KWARGS:
            param = f"chat_template_kwargs.{name}"
            raise RequestError("unsupported_parameter", f"{param} cannot be set", param)
    return kwargs or {}


def _refuse_far_too_long(text: str, param: str, tokenizer: JobTokenizer, limit: int) -> None:
    """Refuse a huge text by its beginning: tokenizing 20 MB would cost seconds and gigabytes."""
    beginning = 16 * limit
    if len(text) <= 2 * beginning:
        return
    length = len(tokenizer.encode(text[:beginning], add_special_tokens=False))
    if length > limit + 1:
        raise RequestError(
            "prompt_too_long",
            f"{param} has {len(text)} characters, more than {length} tokens; "
            f"the limit of prompt and answer together is {limit} tokens",
            param,
        )
