"""Command-line options that the worker and the exporter share. Every one has its variable."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class PortType(click.ParamType[int]):
    """A port number. Kubernetes sets `HEADRACE_..._PORT=tcp://10.0.0.1:80` for a Service of that
    name; such a value is not ours and the default stands."""

    name = "port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and value.startswith("tcp://"):
            value = param.default if param is not None else 0
        try:
            port = int(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not a port number", param, ctx)
        if not 0 <= port <= 65535:
            self.fail(f"{port} is not between 0 and 65535", param, ctx)
        return port


class FiniteType(click.FloatRange):
    """A number from `low` on, or above it, up to `high`. "nan" passes click's own comparison; "inf"
    would be a lease that never ends."""

    name = "number"

    def __init__(self, low: float, high: float | None = None, *, above: bool = False) -> None:
        super().__init__(low, high, min_open=above)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no such number", param, ctx)
        return number


_MOST_BYTES = 1 << 50


class BytesType(click.ParamType[int]):
    """A number of bytes, plain or with k, M, G (powers of 1024)."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().removesuffix("B").removesuffix("i")
        scale = {"k": 1 << 10, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        try:
            number = float(text[:-1] if scale > 1 else text)
        except ValueError:
            self.fail(f"{value!r} is no size; write 500M or 2G", param, ctx)
        if not 0 < number * scale <= _MOST_BYTES:
            self.fail(f"{value!r} must be a number above 0 that memory can have", param, ctx)
        return int(number * scale)


def redis_url(command: F) -> F:
    return click.option(
        "--redis-url",
        envvar="HEADRACE_REDIS_URL",
        default="redis://localhost:6379/0",
        show_default=True,
        help="redis://, rediss://, unix:// or redis+sentinel://",
    )(command)


def logging(command: F) -> F:
    form = click.option(
        "--log-format",
        type=click.Choice(["auto", "text", "json"]),
        envvar="HEADRACE_LOG_FORMAT",
        default="auto",
        show_default=True,
        help="auto: text on a terminal, JSON elsewhere.",
    )
    level = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        envvar="HEADRACE_LOG_LEVEL",
        default="info",
        show_default=True,
    )
    return form(level(command))


def option(*names: str, env: str, **settings: Any) -> Callable[[F], F]:
    """click.option with a HEADRACE_ variable and its default shown."""
    settings.setdefault("show_default", True)
    return click.option(*names, envvar=f"HEADRACE_{env}", **settings)
