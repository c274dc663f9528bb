"""An OpenTelemetry collector for tests: takes OTLP over HTTP, keeps spans and histograms."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def attributes(pairs: Any) -> dict[str, Any]:
    """OTLP's list of keys and typed values as a mapping."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


class Collector:
    """`spans` in the order of arrival; `histograms`: name to the last data points; `services`:
    the attributes of each resource that sent something."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.histograms: dict[str, list[Any]] = {}
        self.services: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.services.append(attributes(sent.resource.attributes))
                for scope in sent.scope_spans:
                    self.spans.extend(scope.spans)
        else:
            assert path == "/v1/metrics", path
            for sent in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in sent.scope_metrics:
                    for metric in scope.metrics:
                        self.histograms[metric.name] = list(metric.histogram.data_points)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
