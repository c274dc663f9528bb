"""Appends result lines, made durable in groups, and says which of them are on disk."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.producer.bulk.errors import UnusableOutput
from headrace.producer.bulk.sidecar import sync_folder


class AppendFile:
    """A file that grows by whole lines. It comes into being with its first line. `exclusive`: it
    did not exist; should somebody else have made it by then, it is theirs."""

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        self.path = path
        self._exclusive = exclusive
        self._descriptor: int | None = None
        self._pending: list[bytes] = []
        self._failed: UnusableOutput | None = None

    def add(self, line: bytes) -> None:
        self._pending.append(line)

    def sync(self) -> None:
        """Everything added so far is on disk when this returns. UnusableOutput when it cannot be
        written (a full disk, say), now and from then on."""
        if not self._pending:
            return
        if self._failed is not None:
            # Nothing is known of what a failed write left; the next run reads and mends it.
            raise self._failed
        view = memoryview(b"".join(self._pending))
        try:
            if self._descriptor is None:
                self._descriptor = self._opened()
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            self._failed = UnusableOutput(
                "unwritable",
                f"cannot write {self.path}: {error.strerror}; mend that and run the same command"
                " again to go on",
            )
            raise self._failed from error
        self._pending.clear()

    def _opened(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags | (os.O_EXCL if self._exclusive else 0), 0o666)
        except FileExistsError:
            raise UnusableOutput(
                "locked", f"another run has begun to write {self.path}: choose another name"
            ) from None
        sync_folder(self.path.parent)
        return descriptor

    def close(self) -> None:
        self.sync()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class OutputLock:
    """One run per OUT: an advisory lock on OUT itself, which ends with this process."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self._output, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UnusableOutput(
                "unwritable", f"cannot write {self._output}: {error.strerror}"
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise UnusableOutput(
                "locked", f"another run is writing {self._output}: wait for it, or end it"
            ) from None
        except OSError as error:
            os.close(self._descriptor)
            raise UnusableOutput(
                "unwritable",
                f"cannot lock {self._output} ({error.strerror}): choose a file system with locks",
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def errors_path(output: Path) -> Path:
    """OUT's name with `.errors.jsonl` in place of `.jsonl`."""
    name = output.name.removesuffix(".jsonl")
    return output.with_name(f"{name}.errors.jsonl")
