"""A private Redis: started for one process, reachable by one user, ended with that process.

Nothing here knows jobs or queues.
"""

import contextlib
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from headrace.producer.child import end_guarded, spawn_guarded
from headrace.producer.redis_binary import (
    MINIMUM_VERSION,
    RedisServerError,
    ServerBinary,
    find_server,
    read_version,
)

_START_SECONDS = 20.0
# A unix socket's path must fit sockaddr_un (108 bytes on Linux, 104 on macOS).
_SOCKET_PATH_LIMIT = 100

_PREFIX = "headrace-redis-"
_OWNER = "owner.pid"

# The two memory knobs keep a queued job with a short prompt near 520 bytes and a finished one near
# 1,500. `ziplist` is the name that 6.2, 7 and Valkey all accept.
SETTINGS: Mapping[str, str] = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": '""',
    "maxmemory-policy": "noeviction",
    "hash-max-ziplist-value": "4096",
    "stream-node-max-bytes": "256",
    "loglevel": "warning",
    "daemonize": "no",
}


def _quoted(value: str | Path) -> str:
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _remove_orphans(parent: Path) -> None:
    """Delete the folders of servers that were killed together with their process and its guard."""
    for note in parent.glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):
            if note.stat().st_uid != os.getuid():
                continue
            try:
                os.kill(int(note.read_text()), 0)
            except ProcessLookupError:
                shutil.rmtree(note.parent, ignore_errors=True)


class PrivateRedis:
    """A Redis server that only this user can reach, and that ends when this process does.

    It listens on a unix socket in a folder of mode 0700, or with `tcp=True` (or where the socket's
    path would be too long) on a loopback port with a random password. `directory` None: a
    temporary folder, deleted at the end; a given folder is kept, with its data. Use as a context
    manager, or call `start` and `stop`.

    When this process is killed, even by SIGKILL, the server ends within 5 seconds (`guard`).
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        tcp: bool = False,
        binary: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._keep = directory is not None
        self._given = directory
        self._tcp = tcp
        self._binary = binary
        self._settings = {**SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._url: str | None = None
        self.server: ServerBinary | None = None

    @property
    def url(self) -> str:
        """What `redis.Redis.from_url` takes. It may hold a password: do not log it."""
        if self._url is None:
            raise RedisServerError("the private Redis is not running; call start() first")
        return self._url

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise RedisServerError("the private Redis is not running; call start() first")
        return self._directory

    def start(self) -> Self:
        """Start and wait until it answers. Raises RedisServerError with the end of its log."""
        if self._process is not None:
            return self
        if self._binary is not None:
            version = read_version(self._binary)
            if version is None or version < MINIMUM_VERSION:
                raise RedisServerError(f"{self._binary} is no Redis of version 6.2 or later")
            self.server = ServerBinary(self._binary, version, "given")
        else:
            self.server = find_server()
        self._directory = self._make_directory()
        attempts = 5
        for attempt in range(attempts):
            configuration = self._write_configuration()
            process = self._launch(self.server.path, configuration)
            try:
                self._wait_until_ready(process)
                return self
            except RedisServerError as error:
                self._end_process()
                # Another process may have taken the port between our look and the server's bind.
                if attempt + 1 < attempts and "Address already in use" in str(error):
                    continue
                self._forget()
                raise
        raise AssertionError("unreachable")

    def revive(self) -> bool:
        """Start again, with its data and at the same URL, if it has died; whether it had."""
        if self._process is None or self._process.poll() is None:
            return False
        if self.server is None:
            raise RedisServerError("the private Redis is not running; call start() first")
        end_guarded(self._process, grace=0.0)
        process = self._launch(self.server.path, self.directory / "redis.conf")
        self._wait_until_ready(process)
        return True

    def stop(self) -> None:
        """End the server and, unless a directory was given, delete its data. Idempotent."""
        self._end_process()
        self._forget()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _make_directory(self) -> Path:
        if self._given is not None:
            self._given.mkdir(parents=True, exist_ok=True)
            directory = self._given.resolve()
            directory.chmod(stat.S_IRWXU)
            return directory
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _SOCKET_PATH_LIMIT - 40 and os.access("/tmp", os.W_OK):
            parent = Path("/tmp")
        _remove_orphans(parent)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        (directory / _OWNER).write_text(str(os.getpid()))
        return directory

    def _write_configuration(self) -> Path:
        directory = self.directory
        lines = [f"{name} {value}" for name, value in self._settings.items()]
        lines += [f"dir {_quoted(directory)}", f"logfile {_quoted(directory / 'redis.log')}"]
        path = directory / "redis.sock"
        if self._tcp or len(str(path).encode()) > _SOCKET_PATH_LIMIT:
            port, password = _free_port(), secrets.token_urlsafe(24)
            lines += ["bind 127.0.0.1", f"port {port}", f"requirepass {password}"]
            self._url = f"redis://:{password}@127.0.0.1:{port}/0"
        else:
            path.unlink(missing_ok=True)
            lines += ["port 0", f"unixsocket {_quoted(path)}", "unixsocketperm 700"]
            self._url = f"unix://{path}?db=0"
        configuration = directory / "redis.conf"
        configuration.touch(mode=0o600)
        configuration.chmod(0o600)
        configuration.write_text("\n".join(lines) + "\n")
        (directory / "redis.log").unlink(missing_ok=True)
        return configuration

    def _launch(self, binary: Path, configuration: Path) -> subprocess.Popen[bytes]:
        remove = "" if self._keep else str(self.directory)
        self._process = spawn_guarded(
            [str(binary), str(configuration)],
            remove=remove,
            # Redis 7 refuses to start under a locale that the machine does not have.
            environment={**os.environ, "LC_ALL": "C"},
            output=self.directory / "output.log",
        )
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with contextlib.closing(redis.Redis.from_url(self.url, socket_timeout=2)) as connection:
            while True:
                with contextlib.suppress(redis.RedisError):
                    connection.ping()
                    return
                if (code := process.poll()) is not None:
                    raise RedisServerError(f"Redis ended at once (status {code}): {self._log()}")
                if time.monotonic() > deadline:
                    raise RedisServerError(
                        f"Redis did not answer within {_START_SECONDS:.0f} s: {self._log()}"
                    )
                time.sleep(0.01)

    def _log(self) -> str:
        texts = []
        for name in ("output.log", "redis.log"):
            with contextlib.suppress(OSError):
                texts.append((self.directory / name).read_text(errors="replace").strip())
        return " ".join(text for text in texts if text)[-800:] or "nothing in its log"

    def _end_process(self) -> None:
        if self._process is not None:
            end_guarded(self._process, grace=5.0)
            self._process = None

    def _forget(self) -> None:
        if not self._keep and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None
        self._url = None
