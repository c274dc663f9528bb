"""A model hub on this machine: the HTTP calls that huggingface_hub makes to fetch a snapshot."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    server: "_Hub"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        repo, folder = self.server.repo, self.server.folder
        self.server.requests.append(path)
        if path.startswith(f"api/models/{repo}/revision/"):
            files = [{"rfilename": name} for name, _ in _files(folder)]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": files}
            self._send(200, json.dumps(info).encode(), body, {"Content-Type": "application/json"})
            return
        if path.startswith(f"api/models/{repo}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                for name, data in _files(folder)
            ]
            self._send(200, json.dumps(tree).encode(), body, {"Content-Type": "application/json"})
            return
        for prefix in (f"{repo}/resolve/{COMMIT}/", f"{repo}/resolve/main/"):
            file = folder / path.removeprefix(prefix)
            if path.startswith(prefix) and file.is_file():
                data = file.read_bytes()
                tag = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT}
                self._send(200, data, body, tag)
                return
        code = "EntryNotFound" if path.startswith(f"{repo}/") else "RepoNotFound"
        self._send(404, b"not found", body, {"X-Error-Code": code})

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


class _Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, repo: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo, self.folder = repo, folder
        self.requests: list[str] = []


@contextmanager
def serve_hub(repo: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `folder` as the model `repo`; yields the endpoint and the paths asked for so far."""
    hub = _Hub(repo, folder)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{hub.server_port}", hub.requests
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def _files(folder: Path) -> list[tuple[str, bytes]]:
    """Path inside the repository and content of each file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths]


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
