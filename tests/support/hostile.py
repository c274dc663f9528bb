"""Hostile input: strategies for hypothesis, and a watch over what must never happen meanwhile."""

import contextlib
import json
import os
import pickle
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from headrace.producer import codec
from headrace.producer.schemas import Request

CASES = int(os.environ.get("HEADRACE_FUZZ_CASES", "2000"))
"""Of all fuzz tests together; `make fuzz` sets it."""

SECONDS_PER_CASE = 10


def cases(share: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Hypothesis settings for `share` of all cases."""
    return settings(
        max_examples=max(10, round(CASES * share)),
        deadline=None,
        derandomize=CASES <= 2000,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


class Hang(BaseException):
    """A case took longer than twice SECONDS_PER_CASE."""


class Forbidden(BaseException):
    """Input made us do what no input may: unpickle, import, start a program, call a host."""


_armed = False
_ports: frozenset[int] = frozenset()
seen: list[str] = []
_EVENTS = {
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.startfile",
    "subprocess.Popen",
    "urllib.Request",
    "ctypes.dlopen",
    "webbrowser.open",
    "shutil.rmtree",
    "socket.getaddrinfo",
}
_NEVER_IMPORTED = ("hostile_canary", "antigravity", "subprocess_canary")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _armed:
        return
    bad = event in _EVENTS
    bad |= event == "import" and str(arguments[0]).split(".")[0] in _NEVER_IMPORTED
    if event == "socket.connect":
        address = arguments[1]
        bad |= not (isinstance(address, tuple) and address[1] in _ports)
    if event == "socket.getaddrinfo":
        bad = arguments[0] not in ("127.0.0.1", "localhost") or arguments[1] not in _ports
    if bad:
        seen.append(f"{event}{arguments!r:.200}")
        raise Forbidden(seen[-1])


sys.addaudithook(_audit)


@contextlib.contextmanager
def watched(*ports: int) -> Iterator[None]:
    """One case: no hang, and nothing forbidden in any thread; connections only to `ports`."""
    global _armed, _ports

    late = False

    def hang(number: int, frame: object) -> None:
        nonlocal late
        if late:
            raise Hang(f"more than {2 * SECONDS_PER_CASE} s")
        # Once more: this process may only have been stopped for a while.
        late = True
        signal.alarm(SECONDS_PER_CASE)

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS_PER_CASE)
    _ports, _armed = frozenset(ports), True
    try:
        yield
    finally:
        _armed = False
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    found, seen[:] = list(seen), []
    assert not found, found


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from(
        [
            2**31 - 1,
            2**31,
            -(2**31) - 1,
            2**53 + 1,
            2**63 - 1,
            2**63,
            -(2**63) - 1,
            2**64,
            10**40,
            0.0,
            -0.0,
            1e-300,
            5e-324,
            1e300,
            1e308,
            float("inf"),
            float("-inf"),
            float("nan"),
            0.1,
            100.0,
        ]
    ),
    st.floats(),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "\x00",
            "\ud800",
            "\u202e",
            "a" * 5000,
            "🏳️‍🌈",
            "<|im_end|>",
            "{{ 7 * 7 }}",
            "../../etc/passwd",
            "__import__('os')",
            "default",
            "rq:queue:tiny",
            "*",
            "a b\r\nFLUSHALL\r\n",
        ]
    ),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}),
        st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), VALUES, max_size=4),
    ),
    max_size=3,
)
_FIELDS = [*Request.model_fields, "tools", "stream", "response_format", "func", "x" * 300]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Objects that look like requests: mostly one or two things wrong with a good one."""
    fields: dict[str, Any] = draw(
        st.one_of(
            st.fixed_dictionaries({"prompt": TEXTS}),
            st.fixed_dictionaries({"prompt": st.lists(NUMBERS, max_size=6)}),
            st.fixed_dictionaries({"messages": MESSAGES}),
            st.just({}),
        )
    )
    names = draw(st.lists(st.sampled_from(_FIELDS), max_size=3, unique=True))
    for name in names:
        fields[name] = draw(st.one_of(VALUES, NUMBERS, st.lists(TEXTS, max_size=3)))
    if draw(st.integers(0, 9)) == 0:
        fields[draw(TEXTS)] = draw(VALUES)
    if draw(st.booleans()):
        fields.setdefault("max_tokens", draw(st.integers(0, 6)))
    return fields


def dumps(value: Any) -> bytes:
    """JSON as a careless sender writes it: NaN, huge numbers, lone surrogates and all."""
    return json.dumps(value).encode()


@st.composite
def texts_of_payloads(draw: st.DrawFn) -> bytes:
    """What may stand where a request's JSON is expected."""
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return draw(st.binary(max_size=60))
    if kind == 1:
        return dumps(draw(VALUES))
    if kind == 2:
        depth = draw(st.sampled_from([5, 200, 20000]))
        opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"prompt":', b"}")]))
        return opening * depth + b"1" + closing * draw(st.sampled_from([0, depth]))
    text = dumps(draw(requests()))
    if kind == 3:
        cut = draw(st.integers(0, len(text)))
        return text[:cut] + draw(st.binary(max_size=4)) + text[cut + draw(st.integers(0, 3)) :]
    if kind == 4:
        return text.decode().encode(draw(st.sampled_from(["utf-16", "utf-8-sig", "utf-7"])))
    if kind == 5 and text != b"{}":
        return text[:-1] + b"," + text[1:]
    return text


class _Bomb:
    """Unpickling it calls something."""

    def __init__(self, call: str) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        if self.call == "system":
            return os.system, ("true",)
        import importlib

        return importlib.import_module, ("hostile_canary",)


BOMBS = [zlib.compress(b"[" * size, 9) for size in (1000, 40_000_000)]
"""40 kB that unpack to 40 MB."""

FUNCTIONS = st.one_of(
    st.sampled_from(
        [
            codec.FUNCTION,
            "os.system",
            "hostile_canary.touch",
            "builtins.eval",
            "subprocess.run",
            "headrace.worker.jobs.generate ",
            "headrace.worker.jobs",
            "",
        ]
    ),
    VALUES,
)


@st.composite
def data_fields(draw: st.DrawFn) -> bytes:
    """What may stand in the data field of an RQ job."""
    kind = draw(st.integers(0, 6))
    if kind == 0:
        return draw(st.binary(max_size=80))
    if kind == 1:
        protocol = draw(st.integers(0, 5))
        bomb = pickle.dumps(_Bomb(draw(st.sampled_from(["system", "import"]))), protocol)
        return draw(st.sampled_from([bomb, zlib.compress(bomb)]))
    if kind == 2:
        call = [draw(FUNCTIONS), draw(VALUES), draw(VALUES), draw(VALUES)]
        return zlib.compress(dumps(call[: draw(st.integers(0, 4))]))
    if kind == 3:
        call = [draw(FUNCTIONS), None, [draw(requests())], draw(st.sampled_from([{}, {"a": 1}]))]
        text = dumps(call)
        return draw(st.sampled_from([text, zlib.compress(text)]))
    if kind == 4:
        bomb = draw(st.sampled_from(BOMBS))
        return bomb[: draw(st.one_of(st.just(len(bomb)), st.integers(1, len(bomb))))]
    packed = codec.pack(draw(texts_of_payloads()))
    if kind == 5:
        at = draw(st.integers(0, len(packed) - 1))
        return packed[:at] + bytes([packed[at] ^ (1 << draw(st.integers(0, 7)))]) + packed[at + 1 :]
    return packed


NAMES = st.one_of(TEXTS, st.text("aA0_-.:/@ \n\0*?[", max_size=10), VALUES, st.binary(max_size=5))
