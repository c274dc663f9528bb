"""One line of a bulk file: a task, or a typed reason why not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from headrace.producer import json_value
from headrace.producer.bulk import translate
from headrace.producer.bulk.errors import BadLine
from headrace.producer.schemas import Request

_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
MAX_CUSTOM_ID = 512


@dataclass(frozen=True, slots=True)
class Task:
    """A line that can run; `size` is its length in bytes."""

    line: int
    size: int
    custom_id: str
    request: Request

    def prefix_key(self) -> str:
        """Sorting by this puts requests that share a beginning beside each other."""
        request = self.request
        if request.messages is not None:
            return "\0".join(f"{message.role}\1{message.content}" for message in request.messages)
        if isinstance(request.prompt, str):
            return request.prompt
        return "".join(map(chr, (token % 0xD800 for token in request.prompt or ())))


class LineParser:
    """Parses the lines of one file in order, remembering what all lines must share.

    `defaults`: request fields for lines that do not set them. `expected_model`: the name that
    explicit models must equal; None: the first explicit one in the file. Duplicates are not its
    business (`reader`).
    """

    def __init__(
        self, *, defaults: Mapping[str, Any] | None = None, expected_model: str | None = None
    ) -> None:
        self._defaults = dict(defaults or {})
        self._expected_model = expected_model
        self._model_from = "the worker serves" if expected_model else ""
        self._url: str | None = None
        self._url_line = 0

    def parse(self, number: int, data: bytes) -> Task | BadLine:
        """`data` is the line without its end. Never raises for what a file may hold."""
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            return BadLine(number, "invalid_json_line", f"not valid JSON: {_short(str(error))}")
        if not isinstance(value, dict):
            kind = type(value).__name__
            return BadLine(number, "invalid_json_line", f"a line must be a JSON object, not {kind}")
        custom_id = _custom_id(value.get("custom_id"))
        try:
            custom_id, url, body = self._envelope(number, value, custom_id)
            request = self._request(number, url, body, custom_id)
        except translate.Refused as refused:
            return BadLine(number, refused.code, refused.message, custom_id, refused.param)
        return Task(number, len(data), custom_id, request)

    def _envelope(
        self, number: int, value: dict[str, Any], custom_id: str | None
    ) -> tuple[str, str, dict[str, Any]]:
        plain = "body" not in value and "url" not in value and "method" not in value
        if plain and ("prompt" in value or "messages" in value):
            if "prompt" in value and "messages" in value:
                raise translate.Refused("invalid_request", "give prompt or messages, not both")
            rest = {key: item for key, item in value.items() if key != "custom_id"}
            url = translate.CHAT if "messages" in value else translate.COMPLETIONS
            if custom_id is None and value.get("custom_id") is not None:
                raise translate.Refused("invalid_request", _BAD_CUSTOM_ID, "custom_id")
            return custom_id or f"line-{number}", url, rest
        if custom_id is None:
            if value.get("custom_id") in (None, ""):
                raise translate.Refused(
                    "missing_custom_id", "custom_id is missing or empty", "custom_id"
                )
            raise translate.Refused("invalid_request", _BAD_CUSTOM_ID, "custom_id")
        url = self._checked_url(number, value.get("url"))
        if value.get("method", "POST") != "POST":
            raise translate.Refused("invalid_request", "method must be POST", "method")
        for key in value:
            if key not in _ENVELOPE:
                raise translate.Refused(
                    "invalid_request", f"unknown field {_short(key)} beside body", _short(key)
                )
        body = value.get("body")
        if not isinstance(body, dict):
            raise translate.Refused("invalid_request", "body must be a JSON object", "body")
        return custom_id, url, body

    def _checked_url(self, number: int, url: Any) -> str:
        if not isinstance(url, str) or url not in translate.URLS:
            shown = _short(url) if isinstance(url, str) else "missing"
            raise translate.Refused(
                "unsupported_url", f"url is {shown}; supported: {', '.join(translate.URLS)}", "url"
            )
        if self._url is None:
            self._url, self._url_line = url, number
        elif url != self._url:
            raise translate.Refused(
                "url_mismatch",
                f"url is {url}, but line {self._url_line} has {self._url}: one url a file",
                "url",
            )
        return url

    def _request(self, number: int, url: str, body: dict[str, Any], custom_id: str) -> Request:
        fields = translate.request_fields(url, body)
        model = fields.get("model")
        if model is not None:
            self._check_model(number, model)
        fields = {**self._defaults, **fields, "custom_id": custom_id}
        try:
            for name in ("metadata", "chat_template_kwargs"):
                json_value.check(fields.get(name))
            # JSON mode: there the text keys of logit_bias are read as the numbers they are.
            return Request.model_validate_json(orjson.dumps(fields), strict=True)
        except ValidationError as error:
            raise _refused(error) from None
        except (TypeError, ValueError) as error:
            # Nested too deeply, or a number of more than 64 bits among the defaults.
            raise translate.Refused("invalid_request", _short(str(error), 300)) from None

    def _check_model(self, number: int, model: str) -> None:
        if self._expected_model is None:
            self._expected_model = model
            self._model_from = f"line {number} has"
        elif model != self._expected_model:
            raise translate.Refused(
                "model_mismatch",
                f"model is {_short(model)}, but {self._model_from} {self._expected_model}",
                "model",
            )


_BAD_CUSTOM_ID = f"custom_id must be text of 1 to {MAX_CUSTOM_ID} characters, or a number"


def _custom_id(value: Any) -> str | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and 0 < len(value) <= MAX_CUSTOM_ID:
        return value
    return None


def _refused(error: ValidationError) -> translate.Refused:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"] if not _is_union_branch(part))
    message = first["msg"].removeprefix("Value error, ")
    message = f"{param}: {message}" if param else message
    return translate.Refused("invalid_request", _short(message, 300), param or None)


def _is_union_branch(part: Any) -> bool:
    """Pydantic names the branch of a union in an error's path: `stop.list[str]`."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def _short(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
