"""Traces: read as written, and refused with the line that is wrong."""

import math
from pathlib import Path

import pytest

from headrace.worker.autoscale.shapes import SHAPES, Load, make
from headrace.worker.autoscale.trace import TraceError, read_bulk_file, read_trace

HEAD = "arrival,prompt_tokens,output_tokens,deadline_s,count\n"


def write(tmp_path: Path, name: str, text: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_csv_and_jsonl_say_the_same(tmp_path: Path) -> None:
    csv = read_trace(write(tmp_path, "t.csv", HEAD + "5,10,20,60,\n0.5,1,2,,3\n"))
    jsonl = read_trace(
        write(
            tmp_path,
            "t.jsonl",
            '\ufeff{"arrival": 5, "prompt_tokens": 10, "output_tokens": 20, "deadline_s": 60}\r\n\n'
            '{"arrival": 0.5, "prompt_tokens": 1, "output_tokens": 2, "count": 3}\n',
        )
    )
    for trace in (csv, jsonl):
        assert list(trace.arrival) == [0.5, 0.5, 0.5, 5.0]
        assert list(trace.prompt_tokens) == [1, 1, 1, 10]
        assert list(trace.output_tokens) == [2, 2, 2, 20]
        assert list(trace.deadline) == [math.inf] * 3 + [65.0]


def test_times_of_day_become_seconds_from_the_first(tmp_path: Path) -> None:
    text = (
        "arrival,prompt_tokens,output_tokens\n"
        "2026-03-01T12:00:30Z,1,1\n2026-03-01T13:00:00+01:00,1,1\n"
    )
    assert list(read_trace(write(tmp_path, "t.csv", text)).arrival) == [0.0, 30.0]


@pytest.mark.parametrize(
    ("name", "text", "line", "problem"),
    [
        ("t.csv", HEAD + "0,1,1,,\n1,x,1,,\n", 3, "prompt_tokens 'x' is no number"),
        ("t.csv", HEAD + "0,1,1,,\n\n-1,1,1,,\n", 4, "arrival '-1' is negative"),
        ("t.csv", HEAD + "0,1,1\n", 2, "3 cells where the header has 5"),
        ("t.csv", HEAD + "0,1,0,,\n", 2, "output_tokens '0' is no whole number"),
        ("t.csv", HEAD + "0,1,1,-5,\n", 2, "deadline_s '-5' is not above 0"),
        ("t.csv", HEAD + "nan,1,1,,\n", 2, "not finite"),
        ("t.csv", HEAD + "2026-13-01T00:00:00,1,1,,\n", 2, "neither seconds nor ISO 8601"),
        ("t.csv", HEAD + "0,1,1,,\n2026-01-01T00:00:00,1,1,,\n", 3, "mixes seconds"),
        ("t.csv", "when,prompt_tokens\n", 1, "the header lacks arrival, output_tokens"),
        ("t.csv", HEAD + '0,1,"1,,\n', 2, "unexpected end of data"),
        ("t.jsonl", '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}\n{"a"\n', 2, "no JSON"),
        ("t.jsonl", "[1]\n", 1, "not a JSON object"),
        ("t.jsonl", '{"prompt_tokens": 1, "output_tokens": 1}', 1, "arrival is missing"),
        ("t.jsonl", '{"arrival": true}', 1, "arrival True is no number"),
        ("t.jsonl", '{"arrival": 0, "prompt_tokens": 1.5}', 1, "prompt_tokens 1.5 is no whole"),
        ("t.jsonl", b'{"arrival": 0}\n\xff\n', 1, "prompt_tokens is missing"),
        ("t.jsonl", b"\n\xff\n", 2, "not UTF-8"),
        ("t.csv", HEAD, None, "no job in it"),
        ("t.txt", "0 1 1", None, "must end in .csv"),
    ],
)
def test_a_bad_trace_is_refused_by_name_and_line(
    tmp_path: Path, name: str, text: str | bytes, line: int | None, problem: str
) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.line == line
    assert problem in caught.value.problem
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")


def test_a_bulk_file_arrives_at_once_with_its_own_limits(tmp_path: Path) -> None:
    text = (
        '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",'
        ' "body": {"model": "m", "messages": [{"role": "user", "content": "hello there"}],'
        ' "max_tokens": 7}}\n{"prompt": "12345678"}\n'
    )
    trace = read_bulk_file(write(tmp_path, "b.jsonl", text), output_tokens=99, deadline_s=60.0)
    assert list(trace.arrival) == [0.0, 0.0]
    assert list(trace.output_tokens) == [7, 99]
    assert trace.prompt_tokens[1] == 2
    assert list(trace.deadline) == [60.0, 60.0]


@pytest.mark.parametrize("line", ['{"body": 3}', '{"prompt": "x", "max_tokens": 0}', "{}"])
def test_a_bad_bulk_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "b.jsonl", '{"prompt": "x"}\n' + line)
    with pytest.raises(TraceError, match=r"b\.jsonl:2: "):
        read_bulk_file(path, output_tokens=1, deadline_s=None)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_the_same_for_one_seed_and_another_for_another(shape: str) -> None:
    load = Load(2000, 3600.0, 800.0, 200.0, deadline_s=60.0, seed=3)
    one, same = make(shape, load), make(shape, load)
    assert (one.arrival, one.prompt_tokens) == (same.arrival, same.prompt_tokens)
    other = make(shape, Load(2000, 3600.0, 800.0, 200.0, seed=4))
    assert one.prompt_tokens != other.prompt_tokens
    assert list(one.arrival) == sorted(one.arrival)
    assert 0.0 <= one.arrival[0] <= one.end_s <= 3600.0
    # Means of 2000 log-normal draws with spread 1: standard error 2.2 %.
    assert sum(one.prompt_tokens) / 2000 == pytest.approx(800.0, rel=0.1)


def test_daily_is_quiet_at_night_and_busy_at_noon() -> None:
    trace = make("daily", Load(50_000, 86400.0, 10.0, 10.0, spread=0.0))
    hours = [0] * 24
    for arrival in trace.arrival:
        hours[int(arrival // 3600)] += 1
    assert hours[12] > 8 * hours[0]


def test_burst_puts_nine_tenths_into_three_hundredths_of_the_time() -> None:
    trace = make("burst", Load(10_000, 10_000.0, 10.0, 10.0, spread=0.0))
    inside = sum(
        1 for at in trace.arrival for start in (1000, 4000, 7000) if start <= at <= start + 100
    )
    assert inside >= 9000
