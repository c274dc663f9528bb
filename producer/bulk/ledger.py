"""The state of one run on disk: what has ended, and where each new line goes.

Owns OUT, the error file and the sidecar; knows no Redis.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from headrace.producer.bulk import resume
from headrace.producer.bulk.errors import BadLine, UnusableOutput
from headrace.producer.bulk.lines import Task
from headrace.producer.bulk.ordered import InOrder
from headrace.producer.bulk.output import bad_line, result_line
from headrace.producer.bulk.sidecar import (
    Fingerprint,
    Sidecar,
    new_sidecar,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from headrace.producer.bulk.writer import AppendFile, OutputLock
from headrace.producer.schemas import Result

OnBadLine = Literal["quarantine", "fail", "skip"]

_TO_OUTPUT, _TO_ERRORS = b"o", b"e"


@dataclass(frozen=True, slots=True)
class Work:
    """A task that still has to run, and its place among them (for `--ordered`)."""

    position: int
    task: Task
    job_id: str


@dataclass(slots=True)
class Counts:
    """Lines by how they ended, earlier runs included. `skipped` bad lines are in no file."""

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def ended(self) -> int:
        return self.succeeded + self.failed


class Ledger:
    """Open it, ask it for the `work` that is left, `record` each result, and `sync`.

    Opening takes the lock on OUT, refuses a file that another run made, cuts torn ends and reads
    what has ended. Raises UnusableOutput.
    """

    def __init__(
        self,
        output: Path,
        errors: Path,
        fingerprint: Fingerprint,
        *,
        restart: bool = False,
        retry_errors: bool = False,
        ordered: bool = False,
    ) -> None:
        self._output_path = output
        self._errors_path = errors
        self._stack = contextlib.ExitStack()
        self._in_order = InOrder() if ordered else None
        self._unsynced: list[str] = []
        self._output = AppendFile(output)
        self.counts = Counts()
        if output.resolve() == errors.resolve():
            raise UnusableOutput("same_file", "OUT and the error file must be two files")
        try:
            self._stack.enter_context(OutputLock(output))
            self.sidecar = self._open(fingerprint, restart, retry_errors)
            for path in (output, errors):
                if path.exists():
                    resume.cut_torn_end(path)
            # Two runs whose OUT are `a` and `a.jsonl` have one error file.
            self._errors = AppendFile(errors, exclusive=not errors.exists())
            self._ended = resume.read_ended(output, errors)
            self._stack.callback(self._ended.custom_ids.close)
        except BaseException:
            self._stack.close()
            raise
        self.counts.succeeded = self._ended.succeeded
        self.counts.failed = self._ended.failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_resumed(self) -> bool:
        return self._ended.succeeded + self._ended.failed > 0

    def work(
        self, items: Iterable[Task | BadLine], on_bad_line: OnBadLine = "quarantine"
    ) -> Iterator[Work]:
        """The tasks that have not ended, in order; bad lines are written or counted on the way."""
        position = 0
        for item in items:
            if isinstance(item, Task):
                if item.custom_id not in self._ended.custom_ids:
                    yield Work(position, item, f"{self.sidecar.job_prefix}-{item.line}")
                    position += 1
            elif on_bad_line == "skip":
                self.counts.skipped += 1
            elif item.line not in self._ended.bad_lines:
                self._put(position, _TO_ERRORS, bad_line(self.sidecar.run_id, item))
                self.counts.failed += 1
                position += 1

    def record(self, work: Work, result: Result) -> None:
        """Write how a task ended. It is safe on disk after the next `sync`."""
        line, ok = result_line(work.task.custom_id, result)
        self._put(work.position, _TO_OUTPUT if ok else _TO_ERRORS, line)
        if ok:
            self.counts.succeeded += 1
        else:
            self.counts.failed += 1
        self._unsynced.append(work.job_id)

    def sync(self) -> list[str]:
        """Make what was recorded durable; the job ids that Redis may forget now.

        With `ordered`, a line that waits for an earlier one is not on disk yet: should this process
        be killed now, its task runs again. Redis may forget it all the same, or one slow task would
        make the queue grow without bound.
        """
        self._output.sync()
        self._errors.sync()
        done, self._unsynced = self._unsynced, []
        return done

    def close(self) -> None:
        """Sync and let go of the lock."""
        with self._stack:
            if self._in_order is not None:
                self._in_order.close()
            self._output.close()
            self._errors.close()

    def _put(self, position: int, where: bytes, line: bytes) -> None:
        lines = [where + line]
        if self._in_order is not None:
            lines = self._in_order.put(position, lines[0])
        for tagged in lines:
            file = self._output if tagged[:1] == _TO_OUTPUT else self._errors
            file.add(tagged[1:])

    def _open(self, fingerprint: Fingerprint, restart: bool, retry_errors: bool) -> Sidecar:
        output, errors = self._output_path, self._errors_path
        if restart:
            with output.open("wb"):
                pass
            errors.unlink(missing_ok=True)
            sidecar_path(output).unlink(missing_ok=True)
        earlier = read_sidecar(output)
        if earlier is None:
            for path in (output, errors):
                if path.exists() and path.stat().st_size > 0:
                    raise UnusableOutput(
                        "foreign",
                        f"{path} exists and no earlier run of this command wrote it: choose"
                        " another name, or use --restart to overwrite it",
                    )
            sidecar = new_sidecar(fingerprint)
            write_sidecar(output, sidecar)
            return sidecar
        differences = earlier.fingerprint.differences(fingerprint)
        if differences and not _has_lines(output, errors, earlier):
            # It never came to an answer, say for a mistyped model: nothing to keep apart.
            sidecar = new_sidecar(fingerprint)
            write_sidecar(output, sidecar)
            return sidecar
        if differences:
            raise UnusableOutput(
                "other_run",
                f"{output} belongs to a run that differs in {' and in '.join(differences)}: choose"
                " another name, or use --restart to start over",
            )
        if retry_errors and errors.exists():
            # New job ids come first: under the old ones Redis may still hold the failures.
            earlier = Sidecar(earlier.fingerprint, earlier.run_id, earlier.attempt + 1)
            write_sidecar(output, earlier)
            resume.cut_torn_end(errors)
            resume.drop_retryable(errors)
        return earlier


def _has_lines(output: Path, errors: Path, earlier: Sidecar) -> bool:
    """Whether a run wrote anything, also into an error file of another name."""
    named = (earlier.fingerprint.settings or {}).get("error file")
    places = {output, errors, *([output.resolve().parent / named] if named else [])}
    return any(path.exists() and path.stat().st_size > 0 for path in places)
