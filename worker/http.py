"""A small HTTP server in a thread: GET only, a table of paths, loopback unless told otherwise.

Used by the worker (/metrics, /healthz, /readyz) and by the exporter (/metrics, /queues/NAME). It
knows neither: a route is a function that returns status, content type and body.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

log = logging.getLogger(__name__)

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

Answer = tuple[int, str, bytes]
Route = Callable[[str], Answer]
"""Gets what follows the route's path, unquoted; returns status, content type, body."""


def metrics_route(registry: CollectorRegistry) -> Route:
    return lambda _: (200, CONTENT_TYPE_LATEST, generate_latest(registry))


def check_route(problem: Callable[[], str | None]) -> Route:
    """200 `ok`, or 503 with what is wrong."""

    def answer(_: str) -> Answer:
        wrong = problem()
        return (503, TEXT, f"{wrong}\n".encode()) if wrong else (200, TEXT, b"ok\n")

    return answer


class HttpServer:
    """Serves `routes` (path -> Route; one that ends in / takes everything below it).

    `port` 0 picks a free one; `address` says which. Raises OSError when the port is taken.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        exact = {path: route for path, route in routes.items() if not path.endswith("/")}
        below = {path: route for path, route in routes.items() if path.endswith("/")}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10
            server_version = "headrace"
            sys_version = ""

            def do_GET(self) -> None:
                self._answer(send_body=True)

            def do_HEAD(self) -> None:
                self._answer(send_body=False)

            def _answer(self, *, send_body: bool) -> None:
                path = unquote(urlsplit(self.path).path)
                try:
                    status, kind, body = _route(exact, below, path)
                except Exception:
                    log.exception("answering %s failed", path)
                    status, kind, body = 500, TEXT, b"internal error\n"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if send_body:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Server((host, port), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="http", daemon=True
        )

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _route(exact: Mapping[str, Route], below: Mapping[str, Route], path: str) -> Answer:
    if path in exact:
        return exact[path]("")
    for prefix, route in below.items():
        if path.startswith(prefix):
            return route(path[len(prefix) :])
    known = ", ".join([*exact, *(prefix + "NAME" for prefix in below)])
    return 404, TEXT, f"nothing at {path}; there is {known}\n".encode()
