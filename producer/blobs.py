"""Payloads and results too large for Redis: kept in a folder or at an fsspec URL.

A job carries only a content hash; where the content lies is the operator's setting, the same for
producers and workers. A path or URL inside a job would let its sender read files and call hosts.
The file's name is made of the job's id and the hash, so that two deliveries of a job never
overwrite each other and a job's files go with the job. Nothing here knows Redis.
"""

import contextlib
import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from headrace.producer import keys
from headrace.producer.errors import PayloadError
from headrace.producer.scripts import BlobCall, ReadBlob, WriteBlobs

BLOBS_VARIABLE: Final = "HEADRACE_BLOBS"
THRESHOLD: Final = 64 * 1024
_REFERENCE: Final = re.compile(rb'\{"v":1,"blob":"([0-9a-f]{64})","bytes":\d{1,15}\}')


class Files(Protocol):
    """What a place for blobs must offer. Names are relative, with `/`."""

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, content: bytes) -> None: ...

    def delete(self, name: str) -> None: ...

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        """Names in a folder, without it, and when they were written (Unix seconds)."""
        ...


def reference(digest: str, size: int) -> bytes:
    """What stands in Redis in place of the content."""
    return orjson.dumps({"v": 1, "blob": digest, "bytes": size})


def digest_in(payload: bytes) -> str | None:
    """The content hash if the payload is a reference and nothing else."""
    found = _REFERENCE.fullmatch(payload) if len(payload) < 150 else None
    return found.group(1).decode() if found else None


class BlobStore:
    """Contents by job and hash under one root: a folder, or a URL when fsspec is installed."""

    def __init__(self, root: str) -> None:
        self._files: Files = _Remote(root) if "://" in root else _Folder(Path(root))

    def put(self, job_id: str, content: bytes) -> str:
        """Keep content for a job; its hash. Safe to repeat."""
        digest = hashlib.sha256(content).hexdigest()
        self._files.write(_name(job_id, digest), content)
        return digest

    def get(self, job_id: str, digest: str) -> bytes:
        """The content. PayloadError `blob_missing` when it is gone or is not what was put."""
        try:
            content = self._files.read(_name(job_id, digest))
        except FileNotFoundError:
            raise PayloadError(
                "blob_missing", f"the blob store has no {digest[:12]}... of job {job_id}"
            ) from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise PayloadError("blob_missing", f"the blob {digest[:12]}... is damaged")
        return content

    def delete(self, job_id: str) -> None:
        """Delete all that was put for a job."""
        folder = _folder(job_id)
        for name, _ in self._files.names(folder):
            if name.partition(".")[0] == job_id:
                self._files.delete(f"{folder}/{name}")

    def older_than(self, seconds: float) -> Iterator[str]:
        """Jobs with contents written longer ago than that, each once; for a sweep of those whose
        record is gone."""
        limit = time.time() - seconds
        for number in range(256):
            seen = {
                name.partition(".")[0]
                for name, written in self._files.names(f"{number:02x}")
                if written < limit
            }
            yield from sorted(seen)


def perform(store: BlobStore | None, call: BlobCall) -> bytes | None:
    """Carry out a client's call."""
    if store is None:
        if isinstance(call, ReadBlob):
            raise PayloadError(
                "blob_missing",
                f"the result of job {call.job_id} lies in a blob store; give the client the same "
                "blobs= that the workers have",
            )
        return None
    if isinstance(call, ReadBlob):
        return store.get(call.job_id, call.digest)
    if isinstance(call, WriteBlobs):
        for job_id, content in call.contents:
            store.put(job_id, content)
    else:
        for job_id in call.job_ids:
            store.delete(job_id)
    return None


def _folder(job_id: str) -> str:
    return hashlib.sha256(job_id.encode()).hexdigest()[:2]


def _name(job_id: str, digest: str) -> str:
    keys.check_id("job_id", job_id)
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise PayloadError("blob_missing", "the job names a blob by something that is no hash")
    return f"{_folder(job_id)}/{job_id}.{digest}"


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        path = self._root / name
        if path.exists():
            os.utime(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, also for a reader at this moment.
        part = path.with_name(f".{uuid.uuid4().hex}.part")
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if not entry.name.startswith("."):
                        yield entry.name, entry.stat().st_mtime


class _Remote:
    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(
                f"blobs at {url} need fsspec: pip install 'headrace[blobs]'"
            ) from error
        self._fs: Any
        self._fs, self._root = fsspec.core.url_to_fs(url)

    def read(self, name: str) -> bytes:
        content: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return content

    def write(self, name: str, content: bytes) -> None:
        self._fs.makedirs(f"{self._root}/{name.partition('/')[0]}", exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{name}", content)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        with contextlib.suppress(FileNotFoundError):
            for entry in self._fs.ls(f"{self._root}/{folder}", detail=True, refresh=True):
                written = entry.get("mtime") or entry.get("created") or entry.get("LastModified")
                stamp = written.timestamp() if hasattr(written, "timestamp") else written
                yield entry["name"].rpartition("/")[2], float(stamp or time.time())
