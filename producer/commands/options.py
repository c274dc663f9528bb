"""Options that several commands share. Every one has its HEADRACE_ variable."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import orjson

from headrace.producer import codec
from headrace.producer.bulk.reader import MAX_LINE_BYTES
from headrace.producer.errors import InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, env: str | None = None, **settings: Any) -> Callable[[F], F]:
    """click.option with a HEADRACE_ variable, by default named after the option, and shown."""
    long = next(name for name in names if name.startswith("--"))
    variable = env or long.removeprefix("--").split("/")[0].replace("-", "_").upper()
    settings.setdefault("show_envvar", True)
    return click.option(*names, envvar=f"HEADRACE_{variable}", **settings)


def redis_url(command: F) -> F:
    return option(
        "--redis-url",
        metavar="URL",
        help="redis://, rediss://, unix:// or redis+sentinel://.",
    )(command)


def as_json(command: F) -> F:
    return option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")(command)


def queue(command: F) -> F:
    return option("--queue", help="Queue; by default the model's name.")(command)


# The worker's own ranges, which every line would be refused by.
_COUNT = click.IntRange(0)
_SHARE = click.FloatRange(0.0, 1.0)
_PENALTY = click.FloatRange(-2.0, 2.0)
_SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", _COUNT, "Most tokens to generate."),
    ("min_tokens", _COUNT, "Fewest tokens to generate."),
    ("temperature", click.FloatRange(0.0, 100.0), "0 is greedy."),
    ("top_p", click.FloatRange(0.0, 1.0, min_open=True), "Nucleus sampling."),
    ("top_k", _COUNT, "Sample among the k likeliest."),
    ("min_p", _SHARE, "Least probability, as a share of the likeliest token's."),
    ("repetition_penalty", click.FloatRange(0.0, min_open=True), "Above 1: repeat less."),
    ("presence_penalty", _PENALTY, "-2 to 2."),
    ("frequency_penalty", _PENALTY, "-2 to 2."),
    ("seed", int, "Same seed, same answer."),
)
_MAX_STOPS, _MAX_STOP_LENGTH = 64, 1024


def sampling(command: F) -> F:
    """Sampling parameters for lines that do not set their own."""
    for name, kind, text in reversed(_SAMPLING):
        command = option(f"--{name.replace('_', '-')}", type=kind, help=text)(command)
    command = option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")(
        command
    )
    return option("--stop", multiple=True, help="Stop at this text; may be given several times.")(
        command
    )


def take_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that were given, taken out of a command's arguments. InvalidRequest
    for a value that no request could carry."""
    values: dict[str, Any] = {}
    for name, _, _ in _SAMPLING:
        value = given.pop(name)
        if value is not None:
            values[name] = value
    if given.pop("ignore_eos"):
        values["ignore_eos"] = True
    if stop := given.pop("stop"):
        values["stop"] = list(stop)
        if not all(0 < len(text) <= _MAX_STOP_LENGTH for text in stop) or len(stop) > _MAX_STOPS:
            raise InvalidRequest(
                f"--stop: at most {_MAX_STOPS} texts of 1 to {_MAX_STOP_LENGTH} characters", "stop"
            )
    least, most = values.get("min_tokens", 0), values.get("max_tokens")
    if most is not None and least > most:
        raise InvalidRequest(f"--min-tokens {least} is above --max-tokens {most}", "min_tokens")
    codec.parse_sampling(values)
    return values


def line_limits(command: F) -> F:
    command = option("--max-tasks", type=click.IntRange(1), help="Refuse files with more lines.")(
        command
    )
    return option(
        "--max-line-bytes",
        type=click.IntRange(64),
        default=MAX_LINE_BYTES,
        show_default=True,
        help="Longer lines are line_too_long.",
    )(command)


FILE = click.Path(path_type=Path)


def print_json(value: Any) -> None:
    """A file's name may hold bytes that are no text; they are shown, not refused."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    except TypeError:
        text = json.dumps(value, indent=2)
    click.echo(text)
