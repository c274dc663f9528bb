"""The Lua scripts: their text, loaded once, and what to call them with.

A script runs by its hash (EVALSHA) and is sent whole where the server does not know it yet. The
text of `lib.lua` goes in front of every script, and RQ's prefix in front of that. Nothing here
holds a connection.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from headrace.producer import keys

Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Script:
    """A script's name, full text and hash."""

    name: str
    text: str
    sha: str

    @classmethod
    def from_text(cls, name: str, text: str) -> "Script":
        return cls(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@cache
def load(package: str, name: str) -> Script:
    """The script `lua/NAME.lua` of a package (`headrace.producer` or `headrace.worker`)."""
    library = resources.files("headrace.producer").joinpath("lua/lib.lua").read_text()
    body = resources.files(package).joinpath(f"lua/{name}.lua").read_text()
    return Script.from_text(name, f"local P = '{keys.PREFIX}'\n{library}\n{body}")


def producer(name: str) -> Script:
    return load("headrace.producer", name)


@dataclass(frozen=True, slots=True)
class Eval:
    """A call of a script. All of ours are safe to send twice."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Commands:
    """Plain commands in one round trip, read-only or safe to send twice."""

    commands: tuple[tuple[Argument, ...], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A blocking read, `seconds` at most; answers None when nothing came."""

    command: tuple[Argument, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, outside Redis."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ReadBlob:
    """Content that a job refers to by its hash; answers bytes."""

    job_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class WriteBlobs:
    """Contents of jobs, (id, content) each, too large for Redis."""

    contents: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class DeleteBlobs:
    job_ids: tuple[str, ...]


RedisCall = Eval | Commands | Block | Pause
BlobCall = ReadBlob | WriteBlobs | DeleteBlobs
Call = RedisCall | BlobCall
