"""Each kind of bad line has its code and its number; nothing in a file can crash the reader."""

import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.producer.bulk.errors import BadLine, UnusableInput
from headrace.producer.bulk.idset import IdSet
from headrace.producer.bulk.lines import LineParser, Task
from headrace.producer.bulk.reader import ReadOptions, raw_lines, read_tasks, scan


def read(data: bytes, options: ReadOptions | None = None, **parser: Any) -> list[Task | BadLine]:
    with IdSet() as ids:
        return list(read_tasks(io.BytesIO(data), LineParser(**parser), ids, options))


def chat(custom_id: object = "a", **body: Any) -> bytes:
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}], **body},
    }
    return json.dumps(line).encode() + b"\n"


def only_bad(data: bytes, options: ReadOptions | None = None, **parser: Any) -> BadLine:
    bad = [item for item in read(data, options, **parser) if isinstance(item, BadLine)]
    assert len(bad) == 1
    return bad[0]


def test_good_lines_become_tasks_with_their_line_number() -> None:
    data = chat("a", model="m", max_tokens=3) + b"\n" + chat(17, temperature=0)
    first, second = read(data)
    assert isinstance(first, Task) and isinstance(second, Task)
    assert (first.line, first.custom_id, first.request.max_tokens) == (1, "a", 3)
    assert (second.line, second.custom_id, second.request.temperature) == (3, "17", 0.0)


def test_byte_order_mark_crlf_blank_lines_and_a_missing_last_newline_are_tolerated() -> None:
    data = b"\xef\xbb\xbf" + chat("a").rstrip() + b"\r\n\r\n   \r\n" + chat("b").rstrip()
    items = read(data)
    assert [(i.line, i.custom_id) for i in items] == [(1, "a"), (4, "b")]
    assert all(isinstance(item, Task) for item in items)


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b'{"custom_id": "x", "bo\n', "invalid_json_line", None),
        (b'{"custom_id": "\xff\xfe"}\n', "invalid_json_line", None),
        (b"[1, 2]\n", "invalid_json_line", None),
        (b'"text"\n', "invalid_json_line", None),
        (b"null\n", "invalid_json_line", None),
        (b"[" * 100_000 + b"\n", "invalid_json_line", None),
        (b'{"custom_id": "\\ud800", "body": {}}\n', "invalid_json_line", None),
        (b"\x80\x04\x95\x00\x00garbage\x00\n", "invalid_json_line", None),
        (chat("a").replace(b'"custom_id": "a", ', b""), "missing_custom_id", "custom_id"),
        (chat(""), "missing_custom_id", "custom_id"),
        (chat(None), "missing_custom_id", "custom_id"),
        (chat(True), "invalid_request", "custom_id"),
        (chat("x" * 513), "invalid_request", "custom_id"),
        (chat().replace(b"chat/completions", b"embeddings"), "unsupported_url", "url"),
        (chat().replace(b'"/v1/chat/completions"', b"7"), "unsupported_url", "url"),
        (chat().replace(b"POST", b"GET"), "invalid_request", "method"),
        (chat().replace(b'"method"', b'"methods"'), "invalid_request", "methods"),
        (b'{"custom_id":"a","url":"/v1/chat/completions"}\n', "invalid_request", "body"),
        (chat(messages=[]), "invalid_request", "messages"),
        (chat(messages="hi"), "invalid_request", "messages"),
        (chat(messages=[{"role": "user"}]), "invalid_request", "messages[0].content"),
        (chat(messages=[{"content": "x"}]), "invalid_request", "messages[0].role"),
        (chat(messages=["hi"]), "invalid_request", "messages[0]"),
        (chat(max_tokens="many"), "invalid_request", "max_tokens"),
        (chat(max_tokens=1.5), "invalid_request", "max_tokens"),
        (chat(temperature=True), "invalid_request", "temperature"),
        (chat(n=0), "invalid_request", "n"),
        (chat(stop=[1]), "invalid_request", "stop"),
        (chat(model=7), "invalid_request", "model"),
        (chat(max_tokens=1, max_completion_tokens=2), "invalid_request", "max_completion_tokens"),
        (chat(stream=True), "unsupported_parameter", "stream"),
        (chat(response_format={"type": "json_object"}), "unsupported_parameter", "response_format"),
        (chat(tools=[{"type": "function"}]), "unsupported_parameter", "tools"),
        (chat(no_such_thing=1), "unsupported_parameter", "no_such_thing"),
        (chat(prompt="x"), "unsupported_parameter", "prompt"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "unsupported_parameter",
            "messages[0].content[0]",
        ),
        (
            chat(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]),
            "unsupported_parameter",
            "messages[0].tool_calls",
        ),
        (
            chat(messages=[{"role": "tool", "content": "1"}]),
            "unsupported_parameter",
            "messages[0].role",
        ),
        (b'{"prompt": ""}\n', "invalid_request", "prompt"),
        (b'{"prompt": "a", "messages": []}\n', "invalid_request", None),
        (b'{"prompt": ["a", "b"]}\n', "unsupported_parameter", "prompt"),
        (b'{"prompt": [1, -1.5]}\n', "invalid_request", "prompt"),
        (b'{"prompt": "a", "echo": true}\n', "unsupported_parameter", "echo"),
    ],
)
def test_a_bad_line_gets_its_code_and_its_number_and_the_others_go_on(
    data: bytes, code: str, param: str | None
) -> None:
    good = b'{"prompt": "good"}\n'
    before, bad, after = read(good + data + good)
    assert isinstance(before, Task) and isinstance(after, Task)
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.code, bad.param) == (2, code, param)
    assert bad.message


def test_one_url_a_file() -> None:
    completion = (
        b'{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    bad = only_bad(chat("a") + completion + chat("c"))
    assert (bad.line, bad.code, bad.custom_id) == (2, "url_mismatch", "b")


def test_one_model_a_file_and_default_or_missing_means_the_served_one() -> None:
    data = chat("a", model="default") + chat("b", model="m") + chat("c", model="other") + chat("d")
    bad = only_bad(data)
    assert (bad.line, bad.code, bad.param) == (3, "model_mismatch", "model")
    assert "line 2 has m" in bad.message
    assert only_bad(chat("a", model="m"), expected_model="served").code == "model_mismatch"


def test_the_second_use_of_a_custom_id_is_refused_also_across_number_and_text() -> None:
    bad = only_bad(chat("7") + chat(7) + chat("8"))
    assert (bad.line, bad.code, bad.custom_id) == (2, "duplicate_custom_id", "7")


def test_a_plain_line_is_named_after_its_number_and_takes_the_defaults() -> None:
    data = b'\n{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 2}\n'
    first, second = read(data, defaults={"max_tokens": 9, "seed": 1})
    assert isinstance(first, Task) and isinstance(second, Task)
    assert (first.custom_id, second.custom_id) == ("line-2", "line-3")
    assert (first.request.max_tokens, second.request.max_tokens) == (9, 2)
    assert first.request.seed == 1


def test_values_that_ask_for_nothing_are_accepted() -> None:
    neutral = {
        "stream": False,
        "tools": [],
        "response_format": {"type": "text"},
        "user": "someone",
        "stop": None,
        "logit_bias": {"5": -1.5},
        "max_completion_tokens": 4,
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "refusal": None, "tool_calls": []},
        ],
    }
    (task,) = read(chat("a", **neutral))
    assert isinstance(task, Task)
    assert task.request.max_tokens == 4
    assert task.request.logit_bias == {5: -1.5}
    assert task.request.messages is not None
    assert [m.role for m in task.request.messages] == ["system", "assistant"]


def test_completions_logprobs_is_a_count() -> None:
    (task,) = read(b'{"prompt": [1, 2, 3], "logprobs": 3}\n')
    assert isinstance(task, Task)
    assert (task.request.logprobs, task.request.top_logprobs) == (True, 3)
    assert task.request.prompt == [1, 2, 3]


def test_line_limit_counts_the_line_without_its_end() -> None:
    line = b'{"prompt": "' + b"x" * 50 + b'"}'
    for end in (b"\n", b"\r\n", b""):
        (item,) = read(line + end, ReadOptions(max_line_bytes=len(line)))
        assert isinstance(item, Task)
        (item,) = read(line + end, ReadOptions(max_line_bytes=len(line) - 1))
        assert isinstance(item, BadLine) and item.code == "line_too_long"
        assert str(len(line) - 1) in item.message


def test_a_20_mb_line_is_refused_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "' + b"x" * 20_000_000 + b'"}\n{"prompt": "next"}\n')
    tracemalloc.start()
    with path.open("rb") as file, IdSet() as ids:
        bad, good = read_tasks(file, LineParser(), ids, ReadOptions(max_line_bytes=2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(bad, BadLine) and bad.code == "line_too_long" and bad.line == 1
    assert isinstance(good, Task) and good.line == 2
    assert peak < 6 * 2**20


def test_empty_files_and_unreadable_ones_are_unusable(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    for content in (b"", b"\n\n  \n", b"\xef\xbb\xbf\r\n"):
        empty.write_bytes(content)
        with pytest.raises(UnusableInput) as raised:
            scan(empty, LineParser())
        assert raised.value.code == "empty_file"
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UnusableInput) as raised:
            scan(path, LineParser())
        assert raised.value.code == "unreadable"
    empty.write_bytes('{"prompt": "x"}\n'.encode("utf-16"))
    with pytest.raises(UnusableInput, match="UTF-16"):
        scan(empty, LineParser())


def test_too_many_tasks_names_the_first_line_that_is_one_too_many() -> None:
    with pytest.raises(UnusableInput) as raised:
        read(b'{"prompt": "x"}\n\n' * 3, ReadOptions(max_tasks=2))
    assert (raised.value.code, raised.value.line) == ("too_many_tasks", 5)


def test_scan_counts_by_code(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(chat("a") + b"nonsense\n" + chat("a") + chat("b") + b"{}\n")
    found = scan(path, LineParser())
    assert found.tasks == 2
    assert dict(found.bad) == {
        "invalid_json_line": 1,
        "duplicate_custom_id": 1,
        "missing_custom_id": 1,
    }
    assert [bad.line for bad in found.examples] == [2, 3, 5]


@given(st.binary(max_size=300), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_raw_lines_agree_with_splitting_the_whole_file(data: bytes, limit: int) -> None:
    """Oracle: split at LF, number from 1, strip ends and a first BOM, drop blanks."""
    expected = []
    for number, line in enumerate(data.split(b"\n"), 1):
        body = line.rstrip(b"\r")
        if len(body) > limit:
            expected.append((number, None))
        else:
            body = body.removeprefix(b"\xef\xbb\xbf") if number == 1 else body
            if body.strip():
                expected.append((number, body))
    fed: list[bytes] = []
    got = list(raw_lines(io.BytesIO(data), limit, fed.append))
    assert [(line.number, line.data) for line in got] == expected
    assert b"".join(fed) == data


@given(st.lists(st.text(max_size=3)), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_id_set_is_a_set_also_when_it_spills(texts: list[str], in_memory: int) -> None:
    known: set[str] = set()
    with IdSet(in_memory) as ids:
        for text in texts:
            assert ids.add(text) is (text not in known)
            known.add(text)
        assert len(ids) == len(known)
        assert all(text in ids for text in known)
        assert "\0absent" not in ids


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_bytes_crash_the_parser(data: bytes) -> None:
    item = LineParser().parse(1, data)
    assert isinstance(item, (Task, BadLine))


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-16"),
        ('{"prompt": "a"}'.encode("utf-16-le"), "UTF-16"),
        ('{"prompt": "a"}'.encode("utf-16-be"), "UTF-16"),
        (gzip.compress(b'{"prompt": "a"}'), "gunzip"),
        (b"PK\x03\x04rest", "ZIP"),
        (b"\x28\xb5\x2f\xfdrest", "zstd"),
        (b"PAR1rest", "Parquet"),
    ],
)
def test_a_file_of_another_kind_is_told_once_and_not_line_by_line(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(UnusableInput, match=said):
        scan(path, LineParser())
