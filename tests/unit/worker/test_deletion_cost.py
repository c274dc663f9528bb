"""The pod's deletion cost: order of the levels, and what goes over the wire."""

import json
import shutil
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.worker.deletion_cost import (
    ANNOTATION,
    CannotPatch,
    DeletionCost,
    PodApi,
    cost_of,
)
from headrace.worker.source import WorkerState

TLS = Path(__file__).parents[2] / "data" / "tls"
"""A key and its own certificate for 127.0.0.1, for tests alone."""


def test_a_loading_pod_outlasts_a_busy_one_and_a_busy_one_an_idle_one() -> None:
    costs = [
        cost_of(WorkerState.DRAINING, 64),
        cost_of(WorkerState.READY, 0),
        cost_of(WorkerState.READY, 1),
        cost_of(WorkerState.READY, 64),
        cost_of(WorkerState.LOADING, 0),
    ]
    assert costs == sorted(set(costs))
    assert cost_of(WorkerState.READY, 33) == cost_of(WorkerState.READY, 64), "coarse: few patches"


class Api:
    """An API server's one verb over TLS, as the real one answers: a pod, or a Status."""

    def __init__(self) -> None:
        self.patches: list[tuple[str, dict[str, str], Any]] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.patches.append((self.path, headers, body))
                answer: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", **body}
                if outer.status != 200:
                    answer = {"apiVersion": "v1", "kind": "Status", "code": outer.status}
                text = json.dumps(answer).encode()
                self.send_response(outer.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def costs(self) -> list[str]:
        return [body["metadata"]["annotations"][ANNOTATION] for _, _, body in self.patches]


def wait_for(count: int, api: Api) -> None:
    end = time.monotonic() + 60
    while len(api.patches) < count and time.monotonic() < end:
        time.sleep(0.01)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """What a pod finds in its environment points to it."""
    api = Api()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server.server_address[1]))
    monkeypatch.setenv("POD_NAME", "pod-1")
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    yield api
    api.server.shutdown()
    api.server.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A service account's folder as the kubelet mounts it."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "namespace").write_text("ns")
    shutil.copy(TLS / "cert.pem", tmp_path / "ca.crt")
    return tmp_path


def test_a_change_of_level_is_patched_as_the_pods_own_account(api: Api, account: Path) -> None:
    level = [0]
    keeper = DeletionCost(
        PodApi.from_environment(account), lambda: level[0], interval=0.05, poll=0.01
    )
    keeper.start()
    wait_for(1, api)
    time.sleep(0.2)
    assert api.costs == ["0"], "an unchanged level is told once"
    level[0] = 8
    wait_for(2, api)
    keeper.stop()
    path, headers, body = api.patches[-1]
    assert api.costs == ["0", "8"]
    assert path == "/api/v1/namespaces/ns/pods/pod-1"
    assert headers["authorization"].lower() == "bearer secret"
    # Both leave other annotations as they are; a JSON patch or an update would not.
    assert headers["content-type"] in {
        "application/strategic-merge-patch+json",
        "application/merge-patch+json",
    }
    assert body == {"metadata": {"annotations": {ANNOTATION: "8"}}}


def test_a_refusal_is_logged_once_and_tried_again(
    api: Api, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.status = 403
    keeper = DeletionCost(PodApi.from_environment(account), lambda: 4, interval=0.02, poll=0.01)
    with caplog.at_level("WARNING", logger="headrace"):
        keeper.start()
        wait_for(3, api)
        api.status = 200
        told = len(api.patches) + 1
        wait_for(told, api)
        time.sleep(0.3)
    keeper.stop()
    assert len(api.patches) <= told + 1
    assert [record.getMessage() for record in caplog.records] == [
        "cannot set the pod's deletion cost: the API server answered 403 Forbidden"
    ]


def test_a_server_with_another_certificate_is_told_nothing(api: Api, account: Path) -> None:
    shutil.copy(TLS / "other.pem", account / "ca.crt")
    with pytest.raises(CannotPatch, match="certificate verify failed"):
        PodApi.from_environment(account).patch(1)
    assert api.patches == []


def test_what_is_missing_is_named(
    api: Api, account: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (account / "token").unlink()
    with pytest.raises(CannotPatch, match="token file does not exist"):
        PodApi.from_environment(account)
    monkeypatch.delenv("POD_NAME")
    with pytest.raises(CannotPatch, match="POD_NAME"):
        PodApi.from_environment(account)
    monkeypatch.setenv("POD_NAME", "pod-1")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(CannotPatch, match="Service host/port is not set"):
        PodApi.from_environment(account)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(CannotPatch, match=r"pip install 'headrace\[kubernetes\]'"):
        PodApi.from_environment(account)
