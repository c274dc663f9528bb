"""When traces are sent: OpenTelemetry's own variables decide, and nothing is imported before."""

import logging
import sys

import pytest

from headrace.worker import tracing
from headrace.worker.tracing import NoTracing, Wanted, wanted

ALL, TRACES, METRICS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Wanted(False, False)),
        ({"OTEL_SERVICE_NAME": "x"}, Wanted(False, False)),
        ({ALL: ""}, Wanted(False, False)),
        ({ALL: "http://c:4318"}, Wanted(True, True)),
        ({TRACES: "http://c:4318/v1/traces"}, Wanted(True, False)),
        ({METRICS: "http://c:4318/v1/metrics"}, Wanted(False, True)),
        ({ALL: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, Wanted(False, True)),
        ({ALL: "http://c:4318", "OTEL_METRICS_EXPORTER": "none"}, Wanted(True, False)),
        ({ALL: "http://c:4318", "OTEL_SDK_DISABLED": "True"}, Wanted(False, False)),
    ],
)
def test_opentelemetrys_variables_decide(environment: dict[str, str], expected: Wanted) -> None:
    assert wanted(environment) == expected


def test_a_missing_package_is_said_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some clusters set the endpoint for every pod."""
    monkeypatch.delitem(sys.modules, "headrace.worker.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with caplog.at_level(logging.WARNING):
        found = tracing.from_environment({ALL: "http://c:4318"}, "tiny", "w")
    assert isinstance(found, NoTracing)
    assert "pip install 'headrace[traces]'" in caplog.text
