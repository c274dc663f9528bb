"""`rediss://`: producers, workers, the exporter and Sentinels over TLS with an authority of one's
own, with and without client certificates, and what is said when something does not fit."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_support import CA, TLS, RedisServer, free_port, tls_binary, tls_files
from serving import WorkerProcess, wait_until

from headrace.producer import AsyncClient, Client, RedisUnavailable, connection
from headrace.worker.depth import DepthReader
from headrace.worker.lease import RedisSource
from headrace.worker.source import SourceUnavailable

OURS = f"ssl_certfile={TLS / 'server.pem'}&ssl_keyfile={TLS / 'server.key'}"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer(tls=True, tls_auth_clients="no", appendonly="yes")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def strict() -> Iterator[RedisServer]:
    """As Redis does by default: it wants the client's certificate too."""
    server = RedisServer(tls=True)
    yield server
    server.stop()


async def ask(url: str) -> str:
    async with AsyncClient(url, queue="tiny") as client:
        job = await client.submit([1, 2, 3], max_tokens=3)
        return (await job.result(60)).choices[0].finish_reason


def test_producers_worker_and_exporter_speak_tls(
    server: RedisServer, model: Path, tmp_path: Path
) -> None:
    worker = WorkerProcess(server.url, model, tmp_path / "worker.log")
    try:
        with Client(server.url, queue="tiny") as client:
            jobs = client.submit_many(["a", "b", "c"], max_tokens=4)
            assert all(job.result(120).text is not None for job in jobs)
            # The command channel is a TLS connection too.
            long = client.submit("long", max_tokens=3000, ignore_eos=True)
            wait_until(lambda: long.status().value == "running", "it runs")
            assert long.cancel().value == "was_running"
            wait_until(lambda: worker.value("headrace_jobs_lost_total") == 1, "the worker is told")
        assert asyncio.run(ask(server.url)) in ("stop", "length")
        assert DepthReader(server.url).read().queues["tiny"].finished == 4
        worker.signal(signal.SIGTERM)
        assert worker.exit_status() == 0, worker.log.read_text()
    finally:
        worker.end()


def test_a_server_that_wants_a_certificate_gets_the_one_in_the_url(strict: RedisServer) -> None:
    with Client(f"{strict.url}&{OURS}", queue="tiny") as client:
        client.submit("x")
    reader = DepthReader(f"{strict.url}&{OURS}")
    assert reader.read().queues["tiny"].pending == 1
    source = RedisSource.from_url(f"{strict.url}&{OURS}", ["tiny"])
    source.start()
    assert len(source.claim(1, 1.0)) == 1
    source.unregister()
    source.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("rediss://127.0.0.1:{open}/0", "not trusted: name the CA with ssl_ca_certs="),
        ("rediss://127.0.0.1:{strict}/0?ssl_ca_certs={ca}", "add ssl_certfile= and ssl_keyfile="),
        ("redis://127.0.0.1:{open}/0", "rediss:// for a TLS port"),
    ],
)
def test_what_does_not_fit_is_said_with_its_remedy(
    url: str, told: str, server: RedisServer, strict: RedisServer
) -> None:
    """At once where waiting can't help; where it might, when patience ends."""
    url = url.format(open=server.port, strict=strict.port, ca=CA)
    patience = 0.3 if url.startswith("redis:") else 60.0
    began = time.monotonic()
    with pytest.raises(RedisUnavailable) as caught:
        Client(url, queue="tiny", retry_for=patience).submit("x")
    assert told in str(caught.value)
    assert time.monotonic() - began < 30.0
    with pytest.raises(SourceUnavailable):
        RedisSource.from_url(url, ["tiny"]).start()


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("ssl_ca_certs=/nowhere.pem", "ssl_ca_certs: there is no /nowhere.pem"),
        ("ssl_cert_reqs=maybe", "maybe"),
        ("ssl_ca_cert=/etc/ca.pem", "ssl_ca_cert"),
    ],
)
@pytest.mark.parametrize("scheme", ["rediss://h:1/0", "rediss+sentinel://h:1/main"])
def test_a_url_that_cannot_be_used_is_refused_before_anything_is_sent(
    query: str, told: str, scheme: str
) -> None:
    for connect in (connection.connect, connection.connect_async):
        with pytest.raises(RedisUnavailable, match=told):
            connect(f"{scheme}?{query}")


def test_sentinels_and_the_server_they_name_speak_tls_and_want_passwords(tmp_path: Path) -> None:
    server = RedisServer(tls=True, requirepass="server-secret")
    port = free_port()
    files = "".join(f"{name} {value}\n" for name, value in tls_files().items())
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port 0\ntls-port {port}\nbind 127.0.0.1\ndir {tmp_path}\nrequirepass own-secret\n{files}"
        f"tls-replication yes\nsentinel monitor main 127.0.0.1 {server.port} 1\n"
        "sentinel auth-pass main server-secret\n"
    )
    log = tmp_path / "log"
    with log.open("wb") as sink:
        sentinel = subprocess.Popen([tls_binary(), str(config), "--sentinel"], stdout=sink)
    try:
        url = (
            f"rediss+sentinel://:server-secret@127.0.0.1:{port}/main"
            f"?ssl_ca_certs={CA}&{OURS}&sentinel_password=own-secret"
        )
        with Client(url, queue="tiny", retry_for=20) as client:
            job = client.submit("x")
            assert client.status(job.id).value == "queued"
        assert "secret" not in connection.redacted(url)

        async def look() -> str:
            async with AsyncClient(url, queue="tiny") as client:
                return (await client.status(job.id)).value

        assert asyncio.run(look()) == "queued"
        with pytest.raises(RedisUnavailable):
            Client(url.replace("own-secret", "wrong"), queue="tiny", retry_for=0.2).submit("x")
    finally:
        sentinel.kill()
        sentinel.wait()
        server.stop()


def test_a_unix_socket_is_used_by_both_clients(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    server = RedisServer(unixsocket=str(socket))
    try:
        with Client(f"unix://{socket}", queue="tiny") as client:
            job = client.submit("x")

        async def look() -> str:
            async with AsyncClient(f"unix://{socket}", queue="tiny") as client:
                return (await client.status(job.id)).value

        assert asyncio.run(look()) == "queued"
    finally:
        server.stop()
