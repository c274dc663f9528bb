"""The wire: what a producer sends and what it gets back. Frozen, versioned, JSON only.

Version 1. A worker refuses a newer version with a typed error instead of guessing. Fields that are
unset are not sent. Nothing here knows Redis, RQ or the engine.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator, model_validator

from headrace.producer import json_value, trace_context

WIRE_VERSION = 1

FailureCode = str
# A number is no text and no truth value, here as in the worker, which reads JSON.
Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Number = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Token = Annotated[int, Strict()]


class Wire(BaseModel):
    """What is asked: a field that is not known is refused, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Reply(BaseModel):
    """What is answered: workers newer than the producer may say more than it knows."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Message(Wire):
    """One chat turn. `content` is text; other kinds of content are refused by name."""

    role: str = Field(min_length=1, max_length=64)
    content: str
    name: str | None = None


class Sampling(Wire):
    """Sampling parameters in their usual names; unset ones take the model's own defaults
    (generation_config), then temperature 1. Ranges are checked by the worker, which knows the
    vocabulary; types are checked here."""

    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    temperature: Number | None = None
    top_k: Whole | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: Flag | None = None
    logprobs: Flag | None = None
    top_logprobs: Whole | None = None


class Request(Sampling):
    """One job: exactly one of `prompt` (text, or token ids) and `messages`.

    `model` None or "default": whatever the queue's worker serves. `custom_id` and `metadata` are
    the caller's data and travel back untouched; neither is ever part of a Redis key. A
    `traceparent` in `metadata` must be one (`trace_context`): the job is then part of that trace.
    """

    v: Annotated[int, Strict()] = WIRE_VERSION
    model: str | None = None
    prompt: str | list[Token] | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    custom_id: str | None = Field(default=None, max_length=512)
    metadata: dict[str, Any] | None = None

    @field_validator("metadata", "chat_template_kwargs")
    @classmethod
    def _plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        json_value.check(value)
        return value

    @field_validator("metadata")
    @classmethod
    def _traced(cls, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        trace_context.carried(metadata)
        return metadata

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self


class Failure(Reply):
    """Why a request has no answer. `retryable`: the same request may succeed when sent again."""

    code: FailureCode
    message: str
    param: str | None = None
    retryable: bool = False


class TokenLogprob(Reply):
    """Natural-log probability of one token; `token` is its text, `bytes` its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top: list["TokenLogprob"] | None = None


class Choice(Reply):
    index: int
    text: str
    token_ids: list[int] | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None


class Usage(Reply):
    """`cached_tokens`: prompt tokens taken from the prefix cache. `resumed_from_tokens`: output
    tokens that an earlier worker had generated before this one went on."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    resumed_from_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Timing(Reply):
    """Seconds of wall time on the worker; `queued` is from enqueue to claim."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


class Result(Reply):
    """The one visible end of a job: `choices`, or a `failure`. `job_id` is empty where `map` met a
    request that can't be sent.

    `system_fingerprint`: digest of the weights, code, types, versions and machine that gave the
    answer; in deterministic mode the same request gets the same answer from whatever has the same.
    """

    v: int = WIRE_VERSION
    job_id: str
    model: str | None = None
    object: Literal["chat.completion", "text_completion"] = "text_completion"
    created: int = 0
    choices: list[Choice] = []
    usage: Usage = Usage()
    timing: Timing | None = None
    system_fingerprint: str | None = None
    failure: Failure | None = None
    custom_id: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def text(self) -> str:
        """The first answer's text; empty for a failure."""
        return self.choices[0].text if self.choices else ""
