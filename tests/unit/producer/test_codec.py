"""Bytes on the wire: what is accepted, what is refused, and that nothing is ever unpickled."""

import contextlib
import json
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.producer import codec
from headrace.producer.errors import InvalidRequest, PayloadError, PayloadTooLarge
from headrace.producer.schemas import Choice, Request, Result


def call(*parts: object) -> bytes:
    return zlib.compress(json.dumps(list(parts)).encode())


class Bomb:
    """Writes a file when unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('unpickled')",))


def test_a_request_comes_out_of_the_data_field_as_it_went_in() -> None:
    request = Request(prompt="grüße 🙂", max_tokens=3, metadata={"a": None, "b": [1]})
    payload = codec.unpack(codec.pack(codec.encode_request(request)))
    assert json.loads(payload) == {
        "prompt": "grüße 🙂",
        "max_tokens": 3,
        "metadata": {"a": None, "b": [1]},
    }


def test_what_stock_rq_enqueues_is_read_too() -> None:
    data = call(codec.FUNCTION, None, [{"prompt": "hi"}], {})
    assert json.loads(codec.unpack(data)) == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_payload"),
        (b"garbage", "invalid_payload"),
        (zlib.compress(b"{"), "invalid_payload"),
        (pickle.dumps(Bomb()), "invalid_payload"),
        (zlib.compress(pickle.dumps((codec.FUNCTION, None, (Bomb(),), {}))), "invalid_payload"),
        (call("os.system", None, ["id"], {}), "unknown_function"),
        (call(codec.FUNCTION, "instance", [{}], {}), "unknown_function"),
        (call(codec.FUNCTION, None, [], {}), "invalid_payload"),
        (call(codec.FUNCTION, None, [{}, {}], {}), "invalid_payload"),
        (call(codec.FUNCTION, None, [{}], {"a": 1}), "invalid_payload"),
        (call(codec.FUNCTION, None, ["text"], {}), "invalid_payload"),
        (zlib.compress(json.dumps({"a": 1}).encode()), "invalid_payload"),
        (zlib.compress(b"[" * 100_000), "invalid_payload"),
    ],
)
def test_anything_else_is_refused_by_a_typed_error(data: bytes, code: str) -> None:
    with pytest.raises(PayloadError) as caught:
        codec.unpack(data)
    assert caught.value.code == code


def test_a_decompression_bomb_is_refused_without_being_inflated() -> None:
    bomb = zlib.compress(b"x" * 50_000_000)
    with pytest.raises(PayloadError) as caught:
        codec.unpack(bomb, limit=1_000_000)
    assert caught.value.code == "payload_too_large"


def test_a_request_larger_than_the_limit_is_refused_with_both_sizes() -> None:
    with pytest.raises(PayloadTooLarge, match=r"1,0\d\d bytes; the limit is 1,000"):
        codec.encode_request(Request(prompt="x" * 1000), limit=1000)


def test_a_result_survives_its_stream_entry() -> None:
    result = Result(
        job_id="j",
        choices=[Choice(index=0, text="hi", finish_reason="stop")],
        metadata={"k": {"n": None}},
    )
    entry = {b"return_value": codec.stream_value(codec.encode_result(result))}
    assert codec.read_stream("j", entry) == result


def test_a_result_of_a_newer_worker_is_read_without_what_is_new_in_it() -> None:
    result = Result(job_id="j", choices=[Choice(index=0, text="yes", finish_reason="stop")])
    fields = json.loads(codec.encode_result(result))
    fields["choices"][0]["reasoning"] = "because"
    newer = json.dumps({**fields, "energy_joules": 3}).encode()
    assert codec.decode_result("j", newer) == result


def test_a_failure_that_rq_recorded_itself_is_a_failure_with_its_last_line() -> None:
    entry = {b"type": b"2", b"exc_string": codec.stream_error("Traceback\nValueError: no")}
    failure = codec.read_stream("j", entry).failure
    assert failure is not None
    assert failure.message == "ValueError: no"


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(InvalidRequest, match="tools") as caught:
        codec.parse_request({"prompt": "x", "tools": []})
    assert caught.value.param == "tools"


def test_an_invalid_value_is_reported_without_the_prompt() -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.parse_request({"prompt": "my secret", "n": 0})
    assert caught.value.param == "n"
    assert "secret" not in str(caught.value)


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_decoder(data: bytes) -> None:
    for candidate in (data, zlib.compress(data)):
        with contextlib.suppress(PayloadError):
            codec.unpack(candidate)


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_result_reader(data: bytes) -> None:
    try:
        codec.read_stream("j", {b"return_value": data, b"exc_string": data})
        codec.read_stream("j", {b"exc_string": data})
    except PayloadError:
        pass
