"""Reads a bulk file as a stream: never more than one line in memory."""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from headrace.producer.bulk.errors import BadLine, UnusableInput
from headrace.producer.bulk.idset import IdSet
from headrace.producer.bulk.lines import LineParser, Task

MAX_LINE_BYTES = 8 * 2**20
_CHUNK = 2**16
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawLine:
    """`number` counts every physical line from 1; `data` is None for a line over the limit."""

    number: int
    length: int
    data: bytes | None


def raw_lines(
    file: BinaryIO,
    max_line_bytes: int = MAX_LINE_BYTES,
    seen: Callable[[bytes], object] | None = None,
) -> Iterator[RawLine]:
    """Lines that are not blank, without a byte order mark and without their end (LF or CRLF).

    `seen` gets every byte of the file once, in order (to hash it).
    """
    number = 0
    while chunk := file.readline(max_line_bytes + 2):
        number += 1
        length, whole = len(chunk), chunk.endswith(b"\n")
        if seen is not None:
            seen(chunk)
        too_long = len(chunk.rstrip(b"\r\n")) > max_line_bytes
        if not whole and len(chunk) == max_line_bytes + 2:
            too_long = True
            chunk = b""
            while not whole and (rest := file.readline(_CHUNK)):
                if seen is not None:
                    seen(rest)
                length += len(rest)
                whole = rest.endswith(b"\n")
        if too_long:
            yield RawLine(number, length, None)
            continue
        if number == 1 and chunk.startswith(_BOM):
            chunk = chunk[len(_BOM) :]
        data = chunk.rstrip(b"\r\n")
        if data.strip():
            yield RawLine(number, len(data), data)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`max_tasks` None: any number."""

    max_line_bytes: int = MAX_LINE_BYTES
    max_tasks: int | None = None


def read_tasks(
    file: BinaryIO,
    parser: LineParser,
    ids: IdSet,
    options: ReadOptions | None = None,
    seen: Callable[[bytes], object] | None = None,
) -> Iterator[Task | BadLine]:
    """Every line that is not blank, in order, as a task or as a typed reason why not.

    Raises UnusableInput `too_many_tasks` at the line that is one too many.
    """
    options = options or ReadOptions()
    count = 0
    for raw in raw_lines(file, options.max_line_bytes, seen):
        count += 1
        if options.max_tasks is not None and count > options.max_tasks:
            raise UnusableInput(
                "too_many_tasks",
                f"more than {options.max_tasks} requests (line {raw.number} is the first too many):"
                " split the file",
                raw.number,
            )
        if raw.data is None:
            yield BadLine(
                raw.number,
                "line_too_long",
                f"the line has {raw.length} bytes; the limit is {options.max_line_bytes}",
            )
            continue
        item = parser.parse(raw.number, raw.data)
        if isinstance(item, Task) and not ids.add(item.custom_id):
            yield BadLine(
                item.line,
                "duplicate_custom_id",
                "an earlier line has the same custom_id",
                item.custom_id,
                "custom_id",
            )
        else:
            yield item


@dataclass(slots=True)
class Scan:
    """What one pass over the file found. `examples`: the first few bad lines."""

    tasks: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: list[BadLine] = field(default_factory=list)
    sha256: str = ""
    size: int = 0
    stamp: tuple[int, int] = (0, 0)

    @property
    def bad_lines(self) -> int:
        return sum(self.bad.values())


_OTHER_KINDS = (
    (b"\xff\xfe", "UTF-16", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16", "save it as UTF-8"),
    (b"{\0", "UTF-16", "save it as UTF-8"),
    (b"\0{", "UTF-16", "save it as UTF-8"),
    (b"\x1f\x8b", "compressed with gzip", "`gunzip -c FILE | headrace run - ...`"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "`zstdcat FILE | headrace run - ...`"),
    (b"PK\x03\x04", "a ZIP archive", "unpack it first"),
    (b"PAR1", "Parquet", "write it as lines of JSON"),
)
"""How files begin whose every line would otherwise be called bad."""


def open_input(path: Path) -> BinaryIO:
    """Raises UnusableInput for what cannot be read twice, and for what is no text in
    UTF-8, by name."""
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise UnusableInput(
                "unreadable", f"{path} is a pipe or a device: write it to a file first"
            )
        file = path.open("rb", buffering=2**20)
    except OSError as error:
        raise UnusableInput("unreadable", f"cannot read {path}: {error.strerror}") from None
    beginning = file.peek(4)[:4]  # type: ignore[attr-defined]
    for magic, kind, remedy in _OTHER_KINDS:
        if beginning.startswith(magic):
            file.close()
            raise UnusableInput("unreadable", f"{path} is {kind}: {remedy}")
    return file


def stamp(file: BinaryIO) -> tuple[int, int]:
    """Size and time of the last change: a file that changes while it is read shows."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def scan(
    path: Path,
    parser: LineParser,
    options: ReadOptions | None = None,
    *,
    max_examples: int = 10,
) -> Scan:
    """Check a whole file. Raises UnusableInput: unreadable, `empty_file`, `too_many_tasks`."""
    found = Scan()
    hashed = hashlib.sha256()
    with open_input(path) as file, IdSet() as ids:
        found.stamp = stamp(file)
        for item in read_tasks(file, parser, ids, options, hashed.update):
            if isinstance(item, Task):
                found.tasks += 1
            else:
                found.bad[item.code] += 1
                if len(found.examples) < max_examples:
                    found.examples.append(item)
        found.size = file.tell()
    if not found.tasks and not found.bad:
        raise UnusableInput("empty_file", f"{path} has no requests")
    found.sha256 = hashed.hexdigest()
    return found
