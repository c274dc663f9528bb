"""The pod's deletion cost: order of the levels, and what goes over the wire."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.worker.deletion_cost import ANNOTATION, DeletionCost, PodApi, cost_of
from headrace.worker.source import WorkerState


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
    """An API server's one verb, on a socket."""

    def __init__(self) -> None:
        self.patches: list[tuple[str, dict[str, str], Any]] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.patches.append((self.path, dict(self.headers), json.loads(body)))
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def costs(self) -> list[str]:
        return [body["metadata"]["annotations"][ANNOTATION] for _, _, body in self.patches]


def wait_for(count: int, api: Api) -> None:
    end = time.monotonic() + 20
    while len(api.patches) < count and time.monotonic() < end:
        time.sleep(0.01)


def test_a_change_of_level_is_patched_as_the_pods_own_account(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    api = Api()
    level = [0]
    keeper = DeletionCost(
        PodApi(api.url, "ns", "pod-1", tmp_path), lambda: level[0], interval=0.05, poll=0.01
    )
    keeper.start()
    wait_for(1, api)
    time.sleep(0.2)
    assert api.costs == ["0"], "an unchanged level is told once"
    level[0] = 8
    wait_for(2, api)
    keeper.stop()
    path, headers, _ = api.patches[-1]
    assert api.costs == ["0", "8"]
    assert path == "/api/v1/namespaces/ns/pods/pod-1"
    assert headers["Authorization"] == "Bearer secret"
    assert headers["Content-Type"] == "application/merge-patch+json"


def test_a_refusal_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text("secret")
    api = Api()
    api.status = 403
    keeper = DeletionCost(
        PodApi(api.url, "ns", "pod-1", tmp_path), lambda: 4, interval=0.02, poll=0.01
    )
    with caplog.at_level("WARNING", logger="headrace"):
        keeper.start()
        wait_for(3, api)
        api.status = 200
        told = len(api.patches) + 1
        wait_for(told, api)
        time.sleep(0.3)
    keeper.stop()
    assert len(api.patches) <= told + 1
    assert len(caplog.records) == 1


def test_outside_a_pod_there_is_nothing_to_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert PodApi.from_environment() is None
