"""Whatever lies in a job: a typed error or an answer, never a crash, never a hang, never code."""

import base64
import zlib
from typing import Any

import hostile
import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.engine.engine import Engine
from headrace.engine.errors import RequestError
from headrace.engine.sequence import FinishReason, Sequence
from headrace.producer import codec, schemas
from headrace.producer.errors import PayloadError
from headrace.worker import checkpoint, wire_request, wire_result
from headrace.worker.source import ClaimedJob

STEPS = 12
"""Longer answers are cut off: what is looked for is a crash."""


@hostile.cases(0.35)
@given(data=hostile.data_fields())
def test_a_jobs_data_is_one_json_object_or_a_typed_error(data: bytes) -> None:
    with hostile.watched():
        try:
            payload = codec.unpack(data, 1 << 20)
        except PayloadError as error:
            assert error.code in ("invalid_payload", "unknown_function", "payload_too_large")
            assert str(error)
            return
        assert len(payload) <= (1 << 20) + 256
        parsed(payload)


@hostile.cases(0.25)
@given(payload=hostile.texts_of_payloads())
@example(payload=b"null")
@example(payload=b"[" * 20000)
def test_a_payload_is_a_request_or_a_typed_error(payload: bytes) -> None:
    with hostile.watched():
        parsed(payload)


def parsed(payload: bytes) -> schemas.Request | None:
    try:
        return wire_request.parse_request(payload)
    except RequestError as error:
        assert error.code and str(error)
        assert len(str(error)) < 2000, "an error must not carry the payload"
        return None


@hostile.cases(0.12)
@given(fields=hostile.requests())
def test_a_request_is_answered_or_refused_and_the_engine_stays_whole(
    engine: Engine, fields: dict[str, Any]
) -> None:
    with hostile.watched():
        request = parsed(hostile.dumps(fields))
        if request is None:
            return
        job = ClaimedJob("job", "job", "q", b"")
        try:
            sequences = wire_request.to_sequences(request, job, engine)
        except RequestError as error:
            assert error.code and str(error)
            return
        run(engine, request, job, sequences)


def run(
    engine: Engine, request: schemas.Request, job: ClaimedJob, sequences: list[Sequence]
) -> schemas.Result | None:
    """Some steps of it; the result when it has ended by then."""
    added = []
    try:
        for sequence in sequences:
            engine.add(sequence)
            added.append(sequence)
    except RequestError as error:
        assert error.code and str(error)
    for _ in range(STEPS):
        if not engine.has_unfinished:
            break
        engine.step()
    for sequence in added:
        engine.abort(sequence.seq_id)
        if sequence.finish_reason is FinishReason.FAILED:
            assert sequence.failure is not None and sequence.failure.code
            assert sequence.failure.code != "engine_error", sequence.failure.message
    engine.check_integrity()
    assert not engine.has_unfinished
    if len(added) < len(sequences) or not all(
        s.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for s in added
    ):
        return None
    result = wire_result.to_result(request, job, sequences, engine, model="tiny")
    assert codec.decode_result("job", codec.encode_result(result)).ok
    return result


_ANSWER = st.fixed_dictionaries(
    {
        "i": st.one_of(st.just(0), hostile.VALUES),
        "t": st.one_of(
            st.lists(st.integers(0, 300), max_size=30), st.lists(hostile.NUMBERS, max_size=5)
        ),
        "at": st.one_of(st.integers(0, 6), hostile.VALUES),
    },
    optional={
        "lp": st.one_of(hostile.VALUES, st.lists(st.lists(hostile.VALUES, max_size=3))),
        "end": st.one_of(
            hostile.VALUES,
            st.tuples(st.sampled_from(["stop", "length", "aborted", "failed"]), hostile.VALUES),
            st.tuples(st.sampled_from(["stop", "length"]), st.none(), hostile.TEXTS),
        ),
    },
)


@hostile.cases(0.05)
@given(data=st.data())
def test_a_checkpoint_is_taken_over_or_refused_and_the_engine_stays_whole(
    engine: Engine, data: st.DataObject
) -> None:
    fields: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 8, "temperature": 0}
    if data.draw(st.booleans()):
        fields |= {"logprobs": True}
    request = schemas.Request(**fields)
    job = ClaimedJob("job", "job", "q", b"")
    (fresh,) = wire_request.to_sequences(request, job, engine)
    answer = data.draw(_ANSWER)
    if data.draw(st.integers(0, 3)) and isinstance(answer["t"], list):
        answer["at"], answer["i"] = len(answer["t"]), 0
    good = {"v": 1, "fp": engine.fingerprint, "p": checkpoint._prompt_hash([1, 2]), "a": [answer]}
    if data.draw(st.integers(0, 3)) == 0:
        good[data.draw(st.sampled_from(["v", "fp", "p", "a"]))] = data.draw(hostile.VALUES)
    blob = hostile.dumps(good)
    if data.draw(st.integers(0, 5)) == 0:
        blob = data.draw(st.binary(max_size=40))
    with hostile.watched():
        restored = checkpoint.restore(blob, [fresh], engine.fingerprint)
        if restored.started_over is not None:
            assert fresh.output_token_ids == [] and not fresh.finished
        if not fresh.finished:
            run(engine, request, job, [fresh])
        else:
            fresh.finish_time = 1.0
            result = wire_result.to_result(request, job, [fresh], engine, model="tiny")
            codec.encode_result(result)


_ENTRY = st.dictionaries(
    st.sampled_from([b"return_value", b"exc_string", b"type", b"x"]),
    st.one_of(
        st.binary(max_size=40),
        st.binary(max_size=40).map(base64.b64encode),
        hostile.VALUES.map(lambda value: base64.b64encode(hostile.dumps(value))),
        st.dictionaries(
            st.sampled_from([*schemas.Result.model_fields]), hostile.VALUES, max_size=4
        ).map(lambda value: base64.b64encode(hostile.dumps(value))),
        hostile.TEXTS.map(
            lambda text: base64.b64encode(zlib.compress(text.encode("utf-8", "replace")))
        ),
    ),
    max_size=3,
)


@hostile.cases(0.05)
@given(entry=_ENTRY)
@example(entry={b"return_value": base64.b64encode(b'{"job_id":"another"}')})
def test_a_stored_result_is_read_or_a_typed_error(entry: dict[bytes, bytes]) -> None:
    with hostile.watched():
        try:
            result = codec.read_stream("job", entry)
        except PayloadError as error:
            assert error.code == "invalid_result"
            return
        assert result.job_id == "job"
        orjson.dumps(result.model_dump(mode="json"), option=orjson.OPT_NON_STR_KEYS)
