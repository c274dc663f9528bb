"""Wire to engine and back: a claimed job's payload becomes sequences, their ends become a result.

Everything that can be wrong with a request is found here or in `Engine.add` and comes out as one
RequestError, so that it ends as that job's failure and nobody else's. Codes:

invalid_payload        not JSON, not UTF-8, not an object
unsupported_version    written by a newer producer
unknown_parameter      a field that nobody knows
unsupported_parameter  a field of the OpenAI API that is not served here
invalid_request        a value of the wrong type or out of range (`param` says which)
empty_prompt, prompt_too_long, template_error, model_not_found

Nothing here knows Redis, RQ or the loop. No job names code: the one function is `generate`.
"""

import hashlib
import math
import time
from collections.abc import Sequence as Seq
from typing import Any, NoReturn, Protocol

import pydantic
import pydantic_core

from headrace.engine.errors import Failure, RequestError
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import FinishReason, Sequence, TokenLogprobs
from headrace.producer import codec, schemas
from headrace.worker.source import ClaimedJob

FUNCTION = codec.FUNCTION

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
LOWEST_LOGPROB = -9999.0
"""JSON has no -inf; what the field sends in its place."""

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


class WrongWorker(RuntimeError):
    """A stock RQ worker tried to run one of our jobs."""


def generate(*_args: Any, **_kwargs: Any) -> NoReturn:
    """The name that every job carries. It runs nowhere: our worker never calls it."""
    raise WrongWorker(
        "this job is served by Headrace's own worker, which batches many at once; "
        "run `headrace worker --model MODEL` instead of `rq worker` on this queue, "
        "and requeue the job"
    )


class JobTokenizer(Protocol):
    """What is needed of a tokenizer here (`engine.tokenizer.Tokenizer`)."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes | None: ...


class JobLimits(Protocol):
    @property
    def max_model_len(self) -> int: ...


class JobEngine(Protocol):
    """What is needed of an engine here."""

    @property
    def tokenizer(self) -> JobTokenizer: ...
    @property
    def limits(self) -> JobLimits: ...
    @property
    def default_sampling(self) -> dict[str, Any]: ...


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
    kind, place, message = found["type"], found["loc"], found["msg"]
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
        return RequestError("invalid_request", message.removeprefix("Value error, "))
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
