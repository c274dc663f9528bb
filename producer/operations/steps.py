"""The form that every operation has: a generator that yields calls and is sent their replies."""

from collections.abc import Generator
from typing import Any, Final, TypeVar

from headrace.producer.scripts import Call

T = TypeVar("T")
Steps = Generator[Call, Any, T]

MANY: Final = 256
"""Jobs in one call to Redis, at most."""


def text_of(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def mapping_of(reply: Any) -> dict[str, str]:
    """HGETALL's reply, which a pipeline may give raw or as a mapping."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {text_of(name): text_of(value) for name, value in pairs}
