"""Output lines are what OpenAI's own client package accepts."""

import json

import pytest
from openai.types import BatchError, Completion
from openai.types.chat import ChatCompletion

from headrace.producer.bulk.errors import BadLine
from headrace.producer.bulk.output import bad_line, result_line
from headrace.producer.schemas import Choice, Failure, Result, TokenLogprob, Usage

LOGPROBS = [
    TokenLogprob(
        token="Hé", logprob=-0.5, bytes=[72, 195, 169], top=[TokenLogprob(token="x", logprob=-2.0)]
    ),
    TokenLogprob(token="!", logprob=-0.25, bytes=[33]),
]
RESULT = Result(
    job_id="run-7",
    model="m",
    created=1_700_000_000,
    choices=[
        Choice(index=0, text="Hé!", finish_reason="stop", stop_reason="END", logprobs=LOGPROBS),
        Choice(index=1, text="", finish_reason="length"),
    ],
    usage=Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4),
    system_fingerprint="fp_0123456789abcdef",
)
CHAT_RESULT = RESULT.model_copy(update={"object": "chat.completion"})


def test_a_chat_answer_validates_as_openai_chat_completion() -> None:
    line, ok = result_line("c", CHAT_RESULT)
    assert ok and line.endswith(b"\n") and line.count(b"\n") == 1
    entry = json.loads(line)
    assert (entry["id"], entry["custom_id"], entry["error"]) == ("batch_req_run-7", "c", None)
    assert (entry["response"]["status_code"], entry["response"]["request_id"]) == (200, "run-7")
    body = ChatCompletion.model_validate(entry["response"]["body"], strict=True)
    assert body.id.startswith("chatcmpl-") and body.model == "m"
    assert body.system_fingerprint == "fp_0123456789abcdef"
    assert body.choices[0].message.role == "assistant"
    assert body.choices[0].message.content == "Hé!"
    assert body.choices[0].logprobs is not None and body.choices[0].logprobs.content is not None
    assert body.choices[0].logprobs.content[0].top_logprobs[0].token == "x"
    assert body.choices[1].finish_reason == "length"
    assert body.usage is not None and body.usage.prompt_tokens_details is not None
    assert (body.usage.total_tokens, body.usage.prompt_tokens_details.cached_tokens) == (7, 4)


def test_a_text_answer_validates_as_openai_completion() -> None:
    body = Completion.model_validate(
        json.loads(result_line("c", RESULT)[0])["response"]["body"], strict=True
    )
    assert body.object == "text_completion" and body.choices[0].text == "Hé!"
    logprobs = body.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hé", "!"] and logprobs.text_offset == [0, 2]
    assert logprobs.top_logprobs == [{"x": -2.0}, {}]


@pytest.mark.parametrize(
    ("code", "retryable", "status"),
    [
        ("invalid_request", False, 400),
        ("prompt_too_long", False, 400),
        ("model_not_found", False, 404),
        ("internal_error", False, 500),
        ("something_passing", True, 503),
    ],
)
def test_a_rejected_request_keeps_its_status_inside_the_response(
    code: str, retryable: bool, status: int
) -> None:
    failure = Failure(code=code, message="why", param="p", retryable=retryable)
    line, ok = result_line("c", Result(job_id="j", failure=failure))
    entry = json.loads(line)
    assert not ok and entry["error"] is None
    assert entry["response"]["status_code"] == status
    error = entry["response"]["body"]["error"]
    assert (error["message"], error["param"], error["code"]) == ("why", "p", code)


@pytest.mark.parametrize(
    ("code", "shown"),
    [("expired", "batch_expired"), ("cancelled", "batch_cancelled"), ("dead", "worker_lost")],
)
def test_what_never_ran_has_no_response(code: str, shown: str) -> None:
    failure = Failure(code=code, message="why")
    entry = json.loads(result_line("c", Result(job_id="j", failure=failure))[0])
    assert entry["response"] is None
    assert (entry["error"]["code"], entry["error"]["message"]) == (shown, "why")
    assert entry["error"]["retryable"] is (code != "dead")


def test_a_bad_line_validates_as_openai_batch_error() -> None:
    entry = json.loads(bad_line("run", BadLine(17, "url_mismatch", "why", "c", "url")))
    assert entry["response"] is None and entry["custom_id"] == "c"
    error = BatchError.model_validate(entry["error"], strict=True)
    assert (error.line, error.code, error.message, error.param) == (
        17,
        "url_mismatch",
        "why",
        "url",
    )
