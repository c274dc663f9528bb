"""Sampling options that no worker would take are refused before anything starts, once."""

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.engine.errors import RequestError
from headrace.engine.sampling_params import SamplingParams
from headrace.producer import cli
from headrace.producer.commands import options
from headrace.worker import wire_request

OUT_OF_RANGE = [
    ("max_tokens", "-5"),
    ("min_tokens", "-1"),
    ("temperature", "-0.1"),
    ("temperature", "100.5"),
    ("top_p", "0"),
    ("top_p", "1.5"),
    ("top_k", "-1"),
    ("min_p", "1.01"),
    ("min_p", "-0.1"),
    ("repetition_penalty", "0"),
    ("presence_penalty", "2.5"),
    ("frequency_penalty", "-2.5"),
]
IN_RANGE = [
    ("max_tokens", "0"),
    ("temperature", "100"),
    ("temperature", "0"),
    ("top_p", "1"),
    ("top_k", "0"),
    ("min_p", "1"),
    ("repetition_penalty", "0.001"),
    ("presence_penalty", "-2"),
    ("frequency_penalty", "2"),
]


def asked(command: str, tmp_path: Path, *arguments: str) -> tuple[int, str]:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    words = [command, str(source), *arguments]
    if command == "run":
        words += ["-o", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(cli.main, words)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"], "nothing was begun"
    return done.exit_code, done.output if done.output else str(done.exception)


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_sampling_option_that_every_line_would_be_refused_for_is_told_once(
    command: str, name: str, value: str, tmp_path: Path
) -> None:
    flag = f"--{name.replace('_', '-')}"
    status, told = asked(command, tmp_path, flag, value)
    assert status == 2
    assert told.count(flag) == 1 and "not in the range" in told


def test_the_ranges_are_the_engines_own() -> None:
    kinds = {field.name: type(field.default) for field in dataclasses.fields(SamplingParams)}
    types = {name: kind for name, kind, _ in options._SAMPLING}
    for name, value in OUT_OF_RANGE:
        number = float(value) if kinds[name] is float else int(value)
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: number}).check(100)
    for name, value in IN_RANGE:
        SamplingParams(**{name: types[name].convert(value, None, None)}).check(100)
    assert options._MAX_STOPS == wire_request.MAX_STOP_STRINGS
    assert options._MAX_STOP_LENGTH == wire_request.MAX_STOP_LENGTH


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--stop", ""], "--stop: at most 64 texts of 1 to 1024 characters"),
        (["--stop", "x" * 1025], "--stop: at most 64 texts"),
        (["--stop", "x"] * 65, "--stop: at most 64 texts"),
        (["--min-tokens", "9", "--max-tokens", "8"], "--min-tokens 9 is above --max-tokens 8"),
        (["--temperature", "nan"], "temperature"),
        (["--repetition-penalty", "inf"], "repetition_penalty"),
    ],
)
def test_options_that_contradict_each_other_are_told_once(
    command: str, arguments: list[str], problem: str, tmp_path: Path
) -> None:
    status, told = asked(command, tmp_path, *arguments)
    assert status != 0
    assert told.count(problem) == 1
