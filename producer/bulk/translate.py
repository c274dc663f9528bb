"""An OpenAI request body to the fields of `schemas.Request`, with nothing dropped in silence.

A parameter is taken over, or it has the value that means "not asked for", or it only names the
caller and cannot change an answer, or it is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from headrace.producer.schemas import Sampling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
URLS = (CHAT, COMPLETIONS)

_TAKEN = frozenset(Sampling.model_fields) | {"model", "metadata"}
_TAKEN_BY_URL = {
    CHAT: _TAKEN | {"messages", "chat_template_kwargs"},
    COMPLETIONS: _TAKEN | {"prompt"},
}
# Values that ask for nothing beyond what we do anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
_CALLER_ONLY = frozenset({"user", "safety_identifier", "prompt_cache_key"})
_MESSAGE_KEYS = frozenset({"role", "content", "name"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class Refused(Exception):
    """A body that cannot become a request: `code`, a message and the parameter."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def _unsupported(param: str, message: str | None = None) -> Refused:
    return Refused("unsupported_parameter", message or f"{param} is not supported", param)


def _invalid(param: str, message: str) -> Refused:
    return Refused("invalid_request", message, param)


def request_fields(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `schemas.Request`, their types still unchecked. Raises Refused."""
    taken = _TAKEN_BY_URL[url]
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in _CALLER_ONLY:
            continue
        if name in taken:
            fields[name] = value
        elif name == "max_completion_tokens" and url == CHAT:
            if body.get("max_tokens", value) != value:
                raise _invalid(name, "max_tokens and max_completion_tokens differ: give one")
            fields["max_tokens"] = value
        elif not any(
            value == neutral and isinstance(value, type(neutral))
            for neutral in _NEUTRAL.get(name, ())
        ):
            raise _unsupported(name)
    if url == CHAT:
        fields["messages"] = _messages(fields.get("messages"))
    else:
        fields["prompt"] = _prompt(fields.get("prompt"))
        _completion_logprobs(fields)
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise _invalid("model", "model must be text")
    if model in ("", "default"):
        del fields["model"]
    return fields


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "messages must be a list with at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _invalid(where, f"{where} must be an object with role and content")
    for key, value in message.items():
        if key not in _MESSAGE_KEYS and value not in (None, [], ""):
            raise _unsupported(f"{where}.{key}")
    role = message.get("role")
    if not isinstance(role, str):
        raise _invalid(f"{where}.role", f"{where}.role must be text")
    if role in ("tool", "function"):
        raise _unsupported(f"{where}.role", f"messages of role {role} are not supported")
    taken: dict[str, Any] = {
        # OpenAI's newer name for the same thing; chat templates know only "system".
        "role": "system" if role == "developer" else role,
        "content": _content(f"{where}.content", message.get("content")),
    }
    if message.get("name") is not None:
        taken["name"] = message["name"]
    return taken


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(where, f"{where} must be text or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise _unsupported(f"{where}[{index}]", f"{where}[{index}]: only text is supported")
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{where}[{index}].text", f"{where}[{index}].text must be text")
        texts.append(part["text"])
    return "".join(texts)


def _prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, list) and any(isinstance(item, (str, list)) for item in value):
        raise _unsupported("prompt", "several prompts in one line are not supported: one a line")
    if value in (None, "", []):
        raise _invalid("prompt", "the prompt is empty")
    return value


def _completion_logprobs(fields: dict[str, Any]) -> None:
    """`/v1/completions` gives the number of alternatives in `logprobs` itself."""
    count = fields.get("logprobs")
    if isinstance(count, int) and not isinstance(count, bool):
        fields["logprobs"] = True
        fields.setdefault("top_logprobs", count)
