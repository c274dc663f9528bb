"""Arrival traces: when jobs arrive, how many tokens they have, and by when they are due.

Read from CSV, JSONL or a bulk file of requests; `shapes` makes them up. What is wrong with a file
is said with its line.
"""

import csv
import io
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson

# English text under common tokenizers; only for requests whose tokens nobody counted.
BYTES_PER_TOKEN = 4.0
MOST_JOBS = 10_000_000


class TraceError(ValueError):
    """A trace that cannot be used. `line` is the line of the file, from 1."""

    def __init__(self, source: str, line: int | None, problem: str) -> None:
        super().__init__(f"{source}:{line}: {problem}" if line else f"{source}: {problem}")
        self.source, self.line, self.problem = source, line, problem


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of arrival, one entry each in four arrays of the same length.

    arrival: seconds from the start. deadline: seconds from the start, infinite where there is none.
    """

    name: str
    arrival: "array[float]"
    prompt_tokens: "array[int]"
    output_tokens: "array[int]"
    deadline: "array[float]"

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def end_s(self) -> float:
        return self.arrival[-1] if self.arrival else 0.0


@dataclass(frozen=True, slots=True)
class Job:
    arrival: float
    prompt_tokens: int
    output_tokens: int
    deadline_s: float | None = None


def build(name: str, jobs: list[Job]) -> Trace:
    """Jobs in any order to a Trace; `deadline_s` counts from the job's arrival."""
    jobs.sort(key=lambda job: job.arrival)
    return Trace(
        name,
        array("d", (j.arrival for j in jobs)),
        array("q", (j.prompt_tokens for j in jobs)),
        array("q", (j.output_tokens for j in jobs)),
        array(
            "d",
            (math.inf if j.deadline_s is None else j.arrival + j.deadline_s for j in jobs),
        ),
    )


def read_trace(path: Path) -> Trace:
    """A CSV file with a header line, or JSONL (by the name's ending).

    Columns or keys: `arrival` (seconds, or an ISO 8601 time), `prompt_tokens`, `output_tokens`, and
    optionally `deadline_s` (seconds after arrival) and `count` (that many equal jobs). Times are
    made relative to the first arrival where they are ISO 8601. Raises TraceError, OSError.
    """
    suffix = path.suffix.lower()
    if suffix == ".csv":
        rows = _csv_rows(path)
    elif suffix in {".jsonl", ".ndjson"}:
        rows = _json_rows(path)
    else:
        raise TraceError(str(path), None, "the name must end in .csv, .jsonl or .ndjson")
    jobs: list[Job] = []
    absolute: bool | None = None
    for line, row in rows:
        where = _Row(str(path), line, row)
        arrival, is_time = where.arrival()
        if absolute is not None and absolute is not is_time:
            raise TraceError(str(path), line, "arrival mixes seconds and ISO 8601 times")
        absolute = is_time
        job = Job(
            arrival,
            where.count("prompt_tokens", minimum=1),
            where.count("output_tokens", minimum=1),
            where.seconds("deadline_s"),
        )
        count = where.count("count", minimum=1, default=1)
        if len(jobs) + count > MOST_JOBS:
            raise TraceError(str(path), line, f"more than {MOST_JOBS:,} jobs in all")
        jobs += [job] * count
    if not jobs:
        raise TraceError(str(path), None, "no job in it")
    if absolute:
        first = min(job.arrival for job in jobs)
        jobs = [
            Job(j.arrival - first, j.prompt_tokens, j.output_tokens, j.deadline_s) for j in jobs
        ]
    return build(path.name, jobs)


def read_bulk_file(path: Path, *, output_tokens: int, deadline_s: float | None) -> Trace:
    """A file of batch requests, all arriving at 0.

    Prompt tokens are estimated from the bytes of the text, output tokens are the request's
    `max_tokens` or `max_completion_tokens`, else `output_tokens`. Raises TraceError, OSError.
    """
    jobs = []
    for line, row in _json_rows(path):
        body = row.get("body", row)
        if not isinstance(body, Mapping):
            raise TraceError(str(path), line, "body is no object")
        text = body.get("messages", body.get("prompt"))
        if text is None:
            raise TraceError(str(path), line, "neither messages nor prompt")
        limit = body.get("max_completion_tokens", body.get("max_tokens", output_tokens))
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise TraceError(str(path), line, f"max_tokens {limit!r} is no whole number above 0")
        prompt = max(1, round(len(orjson.dumps(text)) / BYTES_PER_TOKEN))
        jobs.append(Job(0.0, prompt, limit, deadline_s))
    if not jobs:
        raise TraceError(str(path), None, "no request in it")
    return build(path.name, jobs)


class _Row:
    """One line with its place, to say what is wrong with it."""

    def __init__(self, source: str, line: int, row: Mapping[str, object]) -> None:
        self._source, self._line, self._row = source, line, row

    def _bad(self, problem: str) -> TraceError:
        return TraceError(self._source, self._line, problem)

    def _number(self, key: str, raw: object) -> float:
        try:
            if isinstance(raw, bool) or not isinstance(raw, int | float | str):
                raise ValueError
            value = float(raw)
        except ValueError:
            raise self._bad(f"{key} {raw!r} is no number") from None
        if not math.isfinite(value):
            raise self._bad(f"{key} {raw!r} is not finite")
        return value

    def arrival(self) -> tuple[float, bool]:
        """Seconds, and whether they came from a time of day."""
        raw = self._row.get("arrival")
        if raw is None or raw == "":
            raise self._bad("arrival is missing")
        if isinstance(raw, str) and ("T" in raw or raw.count("-") >= 2):
            try:
                time = datetime.fromisoformat(raw)
            except ValueError:
                raise self._bad(f"arrival {raw!r} is neither seconds nor ISO 8601") from None
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), True
        value = self._number("arrival", raw)
        if value < 0:
            raise self._bad(f"arrival {raw!r} is negative")
        return value, False

    def count(self, key: str, *, minimum: int, default: int | None = None) -> int:
        raw = self._row.get(key)
        if raw is None or raw == "":
            if default is None:
                raise self._bad(f"{key} is missing")
            return default
        value = self._number(key, raw)
        if value != int(value) or value < minimum:
            raise self._bad(f"{key} {raw!r} is no whole number of at least {minimum}")
        return int(value)

    def seconds(self, key: str) -> float | None:
        raw = self._row.get(key)
        if raw is None or raw == "":
            return None
        value = self._number(key, raw)
        if value <= 0:
            raise self._bad(f"{key} {raw!r} is not above 0")
        return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise TraceError(str(path), number, "not UTF-8") from None
        yield number, text.rstrip("\r")


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    text = "\n".join(line for _, line in _lines(path))
    reader = csv.reader(io.StringIO(text), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            line = reader.line_num
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                missing = {"arrival", "prompt_tokens", "output_tokens"} - set(header)
                if missing:
                    names = ", ".join(sorted(missing))
                    raise TraceError(str(path), line, f"the header lacks {names}")
                continue
            if len(cells) != len(header):
                raise TraceError(
                    str(path), line, f"{len(cells)} cells where the header has {len(header)}"
                )
            yield line, dict(zip(header, (cell.strip() for cell in cells), strict=True))
    except csv.Error as error:
        raise TraceError(str(path), reader.line_num, str(error)) from None


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, text in _lines(path):
        if not text.strip():
            continue
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise TraceError(str(path), number, f"no JSON: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(str(path), number, "not a JSON object")
        yield number, row
