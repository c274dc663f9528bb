"""What arrives as a payload and cannot be served: one typed failure each, naming the culprit."""

import json
import pickle
import zlib

import pytest

from headrace.engine.errors import Failure, RequestError
from headrace.producer import codec, schemas
from headrace.worker import jobs, wire_request, wire_result
from headrace.worker.source import ClaimedJob


def refused(payload: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        wire_request.parse_request(payload)
    return caught.value


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"nonsense",
        b"[1, 2]",
        b"null",
        b'"text"',
        b"17",
        b'{"prompt": "cut',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        pickle.dumps({"prompt": "x"}),
        zlib.compress(b'{"prompt": "x"}'),
        b'{"prompt":"a","metadata":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a_payload_that_is_no_json_object_is_an_invalid_payload(payload: bytes) -> None:
    assert refused(payload).code == "invalid_payload"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "10"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("stop", 3),
        ("logit_bias", {"a": 1}),
        ("logit_bias", [1]),
        ("n", 0),
        ("n", 129),
        ("seed", 2**64),
        ("custom_id", "x" * 513),
        ("logprobs", 5),
        ("stop_token_ids", ["a"]),
    ],
)
def test_a_value_of_the_wrong_type_is_named(field: str, value: object) -> None:
    error = refused(json.dumps({"prompt": "a", field: value}).encode())
    assert error.code == "invalid_request"
    assert error.param is not None
    assert error.param.split(".")[0] == field


@pytest.mark.parametrize("field", ["tools", "response_format", "stream", "best_of", "user"])
def test_a_parameter_that_is_not_served_is_refused_by_name(field: str) -> None:
    error = refused(json.dumps({"prompt": "a", field: None}).encode())
    assert (error.code, error.param) == ("unsupported_parameter", field)


def test_a_parameter_that_nobody_knows_is_refused_by_name() -> None:
    error = refused(b'{"prompt": "a", "temprature": 1, "max_tokens": "x"}')
    assert (error.code, error.param) == ("unknown_parameter", "temprature")


def test_content_that_is_not_text_is_refused_by_its_place() -> None:
    message = {"role": "user", "content": [{"type": "image_url"}]}
    error = refused(json.dumps({"messages": [message]}).encode())
    assert (error.code, error.param) == ("unsupported_parameter", "messages.0.content")


def test_a_newer_schema_is_told_apart_from_an_unknown_parameter() -> None:
    error = refused(b'{"v": 2, "prompt": "a", "brand_new": 1}')
    assert (error.code, error.param) == ("unsupported_version", "v")
    assert wire_request.wire_version(b'{"v": 2, "prompt": "a", "brand_new": 1}') == 2


def test_neither_or_both_inputs_are_refused() -> None:
    assert refused(b'{"max_tokens": 1}').code == "invalid_request"
    assert refused(b'{"prompt": "a", "messages": []}').code == "invalid_request"


def test_a_refusal_never_repeats_the_prompt() -> None:
    secret = "the patient's name"
    for broken in ({"prompt": secret, "max_tokens": secret}, {"prompt": {"x": secret}}):
        assert secret not in refused(json.dumps(broken).encode()).message


def test_the_function_refuses_to_run_under_a_stock_worker() -> None:
    with pytest.raises(jobs.WrongWorker, match="headrace worker"):
        jobs.generate({"prompt": "a"})
    assert f"{jobs.generate.__module__}.{jobs.generate.__name__}" == codec.FUNCTION


def test_what_a_request_leaves_unset_comes_from_the_model_then_from_us() -> None:
    request = schemas.Request(prompt="a", top_p=0.5, top_k=None)
    params = wire_request.to_params(
        request, {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "x": 1}
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.5, 20, 0.0)


def test_top_logprobs_without_logprobs_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        wire_request.to_params(schemas.Request(prompt="a", top_logprobs=3), {})
    assert caught.value.param == "top_logprobs"


def test_too_many_or_too_long_stop_strings_are_refused() -> None:
    for stop in (["x"] * 65, ["x" * 1025]):
        with pytest.raises(RequestError) as caught:
            wire_request.to_params(schemas.Request(prompt="a", stop=stop), {})
        assert caught.value.param == "stop"


def test_the_noise_of_a_job_depends_on_its_id_alone() -> None:
    assert wire_request.seed_of("a") == wire_request.seed_of("a") != wire_request.seed_of("b")
    assert 0 <= wire_request.seed_of("a") < 2**64


def test_a_failed_result_takes_the_callers_data_back() -> None:
    request = schemas.Request(prompt="a", custom_id="r1", metadata={"k": [1]})
    job = ClaimedJob("j", "e", "q", b"")
    failure = Failure("prompt_too_long", "too long", "prompt")
    result = wire_result.failed_result(failure, job, request, model="m")
    back = codec.decode_result("j", codec.encode_result(result))
    assert back.failure is not None and back.failure.code == "prompt_too_long"
    assert (back.custom_id, back.metadata, back.failure.param) == ("r1", {"k": [1]}, "prompt")
