"""W3C Trace Context that a request carries in its metadata: `traceparent`, and `tracestate` beside.

The form is that of https://www.w3.org/TR/trace-context/ (4, "Trace Context HTTP Headers Format"):
version, 32 digits of the trace, 16 of the caller's span, flags. Knows no tracing library.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

_FORM: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`parent_id`: the caller's span; `sampled`: the caller records this trace."""

    traceparent: str
    trace_id: str
    parent_id: str
    sampled: bool


def parse(value: object) -> TraceContext:
    """The context that a `traceparent` says. Raises ValueError with what is wrong.

    A version later than 00 may say more after the flags, which is not read; ff is none.
    """
    if not isinstance(value, str):
        raise ValueError(f"traceparent is {type(value).__name__}; it must be text")
    found = _FORM.fullmatch(value)
    if found is None or (found["version"] == "00" and found["more"]):
        raise ValueError(
            "traceparent must be 00-TRACE-PARENT-FLAGS with 32, 16 and 2 lower-case hexadecimal"
            " digits (W3C Trace Context)"
        )
    if found["version"] == "ff":
        raise ValueError("traceparent has the version ff, which is none")
    for name, digits in (("trace", found["trace"]), ("parent", found["parent"])):
        if not digits.strip("0"):
            raise ValueError(f"traceparent has a {name} id of zeros only")
    sampled = bool(int(found["flags"], 16) & 1)
    return TraceContext(value, found["trace"], found["parent"], sampled)


def carried(metadata: Mapping[str, Any] | None) -> TraceContext | None:
    """The context in a request's metadata, which has been checked; None: none was given."""
    if not metadata or TRACEPARENT not in metadata:
        return None
    return parse(metadata[TRACEPARENT])
