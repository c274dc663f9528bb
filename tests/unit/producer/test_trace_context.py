"""What is a traceparent (W3C Trace Context), who looks at it, and what it costs who gives none."""

import json

import pytest
from pydantic import ValidationError

from headrace.engine.errors import RequestError
from headrace.producer import codec, schemas, trace_context
from headrace.producer.bulk.errors import BadLine
from headrace.producer.bulk.lines import LineParser, Task
from headrace.producer.bulk.output import result_line
from headrace.producer.errors import InvalidRequest
from headrace.worker import wire_request

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{PARENT}-01"

BAD = {
    "": "must be 00-TRACE",
    GOOD.upper().replace("0AF", "0af"): "lower-case",
    f"00-{TRACE}-{PARENT}": "must be 00-TRACE",
    f"00-{TRACE[1:]}-{PARENT}-01": "32, 16 and 2",
    f"{GOOD}-more": "must be 00-TRACE",
    f"{GOOD}\n": "must be 00-TRACE",
    f"ff-{TRACE}-{PARENT}-01": "version ff",
    f"00-{'0' * 32}-{PARENT}-01": "trace id of zeros",
    f"00-{TRACE}-{'0' * 16}-01": "parent id of zeros",
}


@pytest.mark.parametrize(
    ("text", "sampled"),
    [(GOOD, True), (f"00-{TRACE}-{PARENT}-00", False), (f"cc-{TRACE}-{PARENT}-03-later", True)],
)
def test_a_traceparent_is_read_as_w3c_says(text: str, sampled: bool) -> None:
    """Of a later version the known fields are read, whatever follows them (section 4.3)."""
    assert trace_context.parse(text) == trace_context.TraceContext(text, TRACE, PARENT, sampled)


@pytest.mark.parametrize(("text", "reason"), BAD.items())
def test_what_is_no_traceparent_is_refused_where_it_is_given(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        codec.parse_request({"prompt": "a", "metadata": {"traceparent": text}})
    assert caught.value.param == "metadata"
    with pytest.raises(ValidationError):
        schemas.Request(prompt="a", metadata={"traceparent": text})


def test_a_worker_refuses_one_that_another_language_sent() -> None:
    payload = json.dumps({"prompt": "a", "metadata": {"traceparent": 7}}).encode()
    with pytest.raises(RequestError) as caught:
        wire_request.parse_request(payload)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "metadata")
    assert str(caught.value) == "metadata: traceparent is int; it must be text"


def test_a_batch_line_carries_it_in_its_metadata_and_a_bad_one_is_a_bad_line() -> None:
    def parsed(traceparent: str) -> Task | BadLine:
        body = {"prompt": "a", "metadata": {"traceparent": traceparent, "team": "signs"}}
        line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
        return LineParser().parse(3, json.dumps(line).encode())

    task = parsed(GOOD)
    assert isinstance(task, Task)
    assert task.request.metadata == {"traceparent": GOOD, "team": "signs"}
    result = schemas.Result(job_id="j", metadata=task.request.metadata)
    assert json.loads(result_line("c", result)[0])["response"]["body"]["metadata"] == {
        "traceparent": GOOD,
        "team": "signs",
    }
    bad = parsed("00-1-2-3")
    assert isinstance(bad, BadLine)
    assert (bad.code, bad.line, bad.param) == ("invalid_request", 3, "metadata")
    assert bad.message.startswith("metadata: traceparent must be 00-TRACE-PARENT-FLAGS")


def test_a_request_without_one_has_not_a_byte_more_on_the_wire() -> None:
    request = codec.parse_request({"prompt": "Hello", "max_tokens": 16})
    assert codec.encode_request(request) == b'{"max_tokens":16,"prompt":"Hello"}'
    traced = codec.parse_request({"prompt": "Hello", "metadata": {"traceparent": GOOD}})
    read = wire_request.parse_request(codec.encode_request(traced))
    assert trace_context.carried(read.metadata) == trace_context.parse(GOOD)
