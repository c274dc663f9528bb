"""What an earlier run left: which lines have ended, and a torn last line cut off."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from headrace.producer.bulk.errors import UnusableOutput
from headrace.producer.bulk.idset import IdSet

_RETRYABLE_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


@dataclass(slots=True)
class Ended:
    """The input lines that need nothing more. Bad lines count by number, the rest by custom_id."""

    custom_ids: IdSet = field(default_factory=IdSet)
    bad_lines: set[int] = field(default_factory=set)
    succeeded: int = 0
    failed: int = 0


def cut_torn_end(path: Path) -> int:
    """Cut what a crash left at the end of `path` that is no whole JSON line; bytes cut.

    A power loss may leave more than a torn line (a block of zeros, say), so everything from the
    first damaged line on is cut, provided that no sound line follows it; damage in the middle
    raises UnusableOutput: no crash makes that.
    """
    sound_end = position = 0
    damaged_at: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            position += len(line)
            if line.endswith(b"\n") and _entry(line) is not None:
                if damaged_at is not None:
                    raise UnusableOutput(
                        "damaged",
                        f"{path} is damaged in the middle (line {damaged_at}): repair it, or use"
                        " --restart to start over",
                        damaged_at,
                    )
                sound_end = position
            elif damaged_at is None:
                damaged_at = number
    if position > sound_end:
        with path.open("r+b") as file:
            file.truncate(sound_end)
            os.fsync(file.fileno())
    return position - sound_end


def read_ended(output: Path, errors: Path) -> Ended:
    """Read both files of an earlier run; call `cut_torn_end` on them first."""
    ended = Ended()
    for entry in entries(output):
        if ended.custom_ids.add(entry["custom_id"]):
            ended.succeeded += 1
    for entry in entries(errors):
        error = entry.get("error")
        if isinstance(error, dict) and isinstance(error.get("line"), int):
            if error["line"] not in ended.bad_lines:
                ended.bad_lines.add(error["line"])
                ended.failed += 1
        elif ended.custom_ids.add(entry["custom_id"]):
            ended.failed += 1
    return ended


def drop_retryable(errors: Path) -> int:
    """Take the retryable failures out of the error file, so that they run again; how many.

    The new file replaces the old one at once: killed in between, either has happened whole.
    """
    if not errors.exists():
        return 0
    dropped = 0
    replacement = errors.with_name(errors.name + ".tmp")
    with errors.open("rb") as source, replacement.open("wb") as sink:
        for line in source:
            entry = _entry(line)
            if entry is not None and is_retryable(entry):
                dropped += 1
            else:
                sink.write(line)
        sink.flush()
        os.fsync(sink.fileno())
    if dropped and replacement.stat().st_size == 0:
        errors.unlink()
        replacement.unlink()
    elif dropped:
        replacement.replace(errors)
    else:
        replacement.unlink()
    return dropped


def is_retryable(entry: dict[str, Any]) -> bool:
    """Whether the same request may succeed when sent again."""
    error = entry.get("error")
    if isinstance(error, dict):
        return "line" not in error and bool(error.get("retryable"))
    response = entry.get("response")
    return isinstance(response, dict) and response.get("status_code") in _RETRYABLE_STATUS


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of an output or error file; nothing when it does not exist."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            entry = _entry(line)
            if entry is not None:
                yield entry


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or "custom_id" not in value:
        return None
    error = value.get("error")
    named = isinstance(value["custom_id"], str)
    if not named and not (isinstance(error, dict) and isinstance(error.get("line"), int)):
        return None
    return value
