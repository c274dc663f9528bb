"""Whether traces are wanted, by OpenTelemetry's own environment variables.

Wanted: OTEL_EXPORTER_OTLP_ENDPOINT, or the one of traces or metrics alone, is set, and neither
OTEL_SDK_DISABLED=true nor OTEL_TRACES_EXPORTER=none (OTEL_METRICS_EXPORTER=none) says otherwise.
OpenTelemetry is imported only then.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.engine.errors import Failure
from headrace.producer import schemas
from headrace.worker.inflight import InFlight
from headrace.worker.source import ClaimedJob

log = logging.getLogger(__name__)


class Tracing(Protocol):
    """Where the ends of jobs are reported (`spans.Spans`). Thread-safe; never raises."""

    def answered(self, flight: InFlight, result: schemas.Result) -> None: ...
    def failed(self, flight: InFlight, failure: Failure) -> None: ...
    def refused(
        self, job: ClaimedJob, request: schemas.Request, claimed_at: float, failure: Failure
    ) -> None:
        """A job that ended before the engine had it."""
        ...

    def stop(self, timeout: float) -> None:
        """Send what there is; not waiting for more than `timeout` seconds."""
        ...


class NoTracing:
    """Nobody wants to know."""

    def answered(self, flight: InFlight, result: schemas.Result) -> None:
        pass

    def failed(self, flight: InFlight, failure: Failure) -> None:
        pass

    def refused(
        self, job: ClaimedJob, request: schemas.Request, claimed_at: float, failure: Failure
    ) -> None:
        pass

    def stop(self, timeout: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of the two is to be sent."""

    traces: bool
    metrics: bool


def wanted(environment: Mapping[str, str]) -> Wanted:
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Wanted(False, False)

    def one(name: str) -> bool:
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
        exporter = environment.get(f"OTEL_{name}_EXPORTER", "otlp").strip()
        return exporter != "none" and any(environment.get(endpoint) for endpoint in endpoints)

    return Wanted(one("TRACES"), one("METRICS"))


def from_environment(environment: Mapping[str, str], model: str, worker: str) -> Tracing:
    """Spans and histograms if they are wanted. A missing package is said and costs no more: such
    variables are often set for every pod of a cluster."""
    what = wanted(environment)
    if not (what.traces or what.metrics):
        return NoTracing()
    try:
        from headrace.worker.spans import Spans
    except ModuleNotFoundError as error:
        log.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but the package %s is missing, so no traces are "
            "sent: pip install 'headrace[traces]'",
            error.name,
        )
        return NoTracing()
    return Spans(model, worker, traces=what.traces, metrics=what.metrics)
