"""Renders a model's chat template, in a sandbox: templates come with checkpoints, from strangers.

The environment is the one that templates are written for: blocks are trimmed, and
`raise_exception`, `strftime_now`, the `tojson` filter, loop controls and the `generation` tag
exist. Knows text only.
"""

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.engine.errors import RequestError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusal(jinja2.TemplateError):
    """What a template raises by `raise_exception`."""


class ChatTemplate:
    """One template with the model's special tokens (`bos_token`, `eos_token`, ...) as variables."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens
        self._template: jinja2.Template | None = None

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """The conversation as the model was trained to read it.

        `kwargs` are the template's own variables; `add_generation_prompt` is true unless set.
        Raises RequestError `template_error`, with the template's words where it gives any.
        """
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **kwargs,
            "messages": messages,
        }
        try:
            if self._template is None:
                self._template = _environment().from_string(self._source)
            return self._template.render(variables)
        except _TemplateRefusal as error:
            message = f"the chat template refuses these messages: {error}"
        except jinja2.TemplateSyntaxError as error:
            message = f"the model's chat template is broken at line {error.lineno}: {error.message}"
        except Exception as error:  # a template is foreign code: whatever it raises is its failure
            message = f"the chat template failed: {type(error).__name__}: {error}"
        raise RequestError("template_error", message, "messages")


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
