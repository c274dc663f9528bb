"""Options that several commands share. Every one has its HEADRACE_ variable."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import orjson

from headrace.producer import codec
from headrace.producer.bulk.reader import MAX_LINE_BYTES

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


_SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "Most tokens to generate."),
    ("min_tokens", int, "Fewest tokens to generate."),
    ("temperature", float, "0 is greedy."),
    ("top_p", float, "Nucleus sampling."),
    ("top_k", int, "Sample among the k likeliest."),
    ("min_p", float, "Least probability, as a share of the likeliest token's."),
    ("repetition_penalty", float, "Above 1: repeat less."),
    ("presence_penalty", float, "-2 to 2."),
    ("frequency_penalty", float, "-2 to 2."),
    ("seed", int, "Same seed, same answer."),
)


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
