"""A result as a line of the output or the error file, as OpenAI's Batch API writes them."""

from typing import Any

import orjson

from headrace.producer.bulk.errors import BadLine
from headrace.producer.schemas import Choice, Failure, Result, TokenLogprob, Usage

# Failures of jobs that no engine answered; everything else is a response with a status code.
_NEVER_RAN = {
    "expired": "batch_expired",
    "cancelled": "batch_cancelled",
    "stopped": "batch_cancelled",
    "worker_lost": "worker_lost",
    "dead": "worker_lost",
}
_STATUS = {
    "model_not_found": 404,
    "payload_too_large": 413,
    "queue_full": 429,
    "engine_error": 500,
    "internal_error": 500,
}


def status_code(failure: Failure) -> int:
    """400 for what is wrong with the request; 5xx for what went wrong here."""
    return _STATUS.get(failure.code, 503 if failure.retryable else 400)


def result_line(custom_id: str, result: Result) -> tuple[bytes, bool]:
    """The line with its LF, and whether it belongs to the output file (else: the error file)."""
    job_id = result.job_id
    failure = result.failure
    line: dict[str, Any] = {"id": f"batch_req_{job_id}", "custom_id": custom_id}
    if failure is not None and failure.code in _NEVER_RAN:
        line["response"] = None
        line["error"] = {
            "code": _NEVER_RAN[failure.code],
            "message": failure.message,
            "retryable": failure.retryable or failure.code != "dead",
        }
    else:
        line["response"] = {
            "status_code": 200 if failure is None else status_code(failure),
            "request_id": job_id,
            "body": _failed(failure) if failure is not None else _answer(result),
        }
        line["error"] = None
    return orjson.dumps(line) + b"\n", failure is None


def bad_line(run_id: str, bad: BadLine) -> bytes:
    """The error file's line for an input line that never became a request."""
    line = {
        "id": f"batch_req_{run_id}-{bad.line}",
        "custom_id": bad.custom_id,
        "response": None,
        "error": bad_line_fields(bad),
    }
    return orjson.dumps(line) + b"\n"


def bad_line_fields(bad: BadLine) -> dict[str, Any]:
    """The fields of OpenAI's BatchError: code, line, message, param."""
    return {"code": bad.code, "line": bad.line, "message": bad.message, "param": bad.param}


def _failed(failure: Failure) -> dict[str, Any]:
    kind = "server_error" if status_code(failure) >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": failure.message,
            "type": kind,
            "param": failure.param,
            "code": failure.code,
        }
    }


def _answer(result: Result) -> dict[str, Any]:
    is_chat = result.object == "chat.completion"
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{result.job_id}",
        "object": result.object,
        "created": result.created,
        "model": result.model or "default",
        "system_fingerprint": result.system_fingerprint,
        "choices": [_chat_choice(c) if is_chat else _text_choice(c) for c in result.choices],
        "usage": _usage(result.usage),
    }
    if result.metadata is not None:
        body["metadata"] = result.metadata
    return body


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chat_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = {"content": [_chat_logprob(item) for item in choice.logprobs], "refusal": None}
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text},
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _chat_logprob(item: TokenLogprob) -> dict[str, Any]:
    return {
        "token": item.token,
        "logprob": item.logprob,
        "bytes": item.bytes,
        "top_logprobs": [
            {"token": top.token, "logprob": top.logprob, "bytes": top.bytes}
            for top in item.top or ()
        ],
    }


def _text_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        offsets: list[int] = []
        position = 0
        for item in choice.logprobs:
            offsets.append(position)
            position += len(item.token)
        logprobs = {
            "tokens": [item.token for item in choice.logprobs],
            "token_logprobs": [item.logprob for item in choice.logprobs],
            "top_logprobs": [
                {top.token: top.logprob for top in item.top or ()} for item in choice.logprobs
            ],
            "text_offset": offsets,
        }
    line = {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.token_ids is not None:
        line["token_ids"] = choice.token_ids
    return line
