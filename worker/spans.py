"""Spans of traced jobs, and the histograms of OpenTelemetry's GenAI conventions, over OTLP/HTTP.

A job whose metadata has a `traceparent` gives two spans under the caller's: its wait in the queue,
and its time in this worker. A job without one gives none, so that a file of a million lines is not
a million traces. Names: https://opentelemetry.io/docs/specs/semconv/gen-ai/. Where things are sent,
how often and as what, OpenTelemetry's own variables say. Prompts and answers are never part of it.
"""

import logging
import os
import threading
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.engine.errors import Failure
from headrace.producer import schemas, trace_context
from headrace.worker.inflight import InFlight
from headrace.worker.source import ClaimedJob

log = logging.getLogger(__name__)

PROVIDER: Final = "headrace"
_REQUEST: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
_DURATIONS: Final = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKENS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_INT64: Final = 1 << 63


class _RequestTimes:
    """The histograms of requests' times in the engine."""

    def __init__(self, meter: Meter) -> None:
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="From a request's arrival in the engine to its last token.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="From a request's arrival in the engine to its first token.",
            explicit_bucket_boundaries_advisory=_FIRST_TOKENS,
        )

    def record(
        self,
        labels: dict[str, Any],
        arrived: float,
        first: float,
        ended: float,
        failure: Failure | None,
    ) -> None:
        """Moments on one clock, in seconds; `first` 0: there was no token."""
        if first:
            self._first_token.record(max(0.0, first - arrived), labels)
        if failure is not None:
            labels = {**labels, "error.type": failure.code}
        self._duration.record(max(0.0, ended - arrived), labels)


class Spans:
    """`tracing.Tracing` by OpenTelemetry. `model`: the served name; `worker`: this worker's."""

    def __init__(self, model: str, worker: str, *, traces: bool, metrics: bool) -> None:
        attributes: dict[str, Any] = {"service.instance.id": worker}
        if "OTEL_SERVICE_NAME" not in os.environ:
            attributes["service.name"] = "headrace-worker"
        resource = Resource.create(attributes)
        self._model = model
        self._propagator = TraceContextTextMapPropagator()
        self._traces: TracerProvider | None = None
        self._meters: MeterProvider | None = None
        if traces:
            self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            self._tracer = self._traces.get_tracer("headrace")
        self._times: _RequestTimes | None = None
        if metrics:
            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
            self._meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
            self._times = _RequestTimes(self._meters.get_meter("headrace"))

    def answered(self, flight: InFlight, result: schemas.Result) -> None:
        usage = result.usage
        answer: dict[str, Any] = {
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [one.finish_reason for one in result.choices],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "headrace.cached_tokens": usage.cached_tokens,
        }
        if usage.resumed_from_tokens:
            answer["headrace.resumed_from_tokens"] = usage.resumed_from_tokens
        self._flown(flight, answer, None)

    def failed(self, flight: InFlight, failure: Failure) -> None:
        self._flown(flight, {}, failure)

    def refused(
        self, job: ClaimedJob, request: schemas.Request, claimed_at: float, failure: Failure
    ) -> None:
        self._span(job, request, claimed_at, 0.0, 0.0, {}, failure)

    def stop(self, timeout: float) -> None:
        """In a thread of its own: a collector that does not answer must not hold up the drain."""

        def send() -> None:
            for provider in (self._traces, self._meters):
                if provider is not None:
                    provider.shutdown()

        thread = threading.Thread(target=send, name="traces", daemon=True)
        thread.start()
        thread.join(timeout)

    def _flown(self, flight: InFlight, answer: dict[str, Any], failure: Failure | None) -> None:
        sequences = flight.sequences
        arrived = min((s.arrival_time for s in sequences if s.arrival_time), default=0.0)
        first = min((s.first_token_time for s in sequences if s.first_token_time), default=0.0)
        ended = max((s.finish_time for s in sequences), default=0.0)
        if self._times is not None and arrived and ended:
            self._times.record(self._common(flight.request), arrived, first, ended, failure)
        self._span(flight.job, flight.request, flight.claimed_at, first, ended, answer, failure)

    def _common(self, request: schemas.Request) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": "chat" if request.messages is not None else "text_completion",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
        }

    def _span(
        self,
        job: ClaimedJob,
        request: schemas.Request,
        claimed_at: float,
        first: float,
        ended: float,
        answer: dict[str, Any],
        failure: Failure | None,
    ) -> None:
        metadata = request.metadata
        if self._traces is None or trace_context.carried(metadata) is None:
            return
        carrier = {
            name: value
            for name in (trace_context.TRACEPARENT, trace_context.TRACESTATE)
            if metadata is not None and isinstance(value := metadata.get(name), str)
        }
        parent = self._propagator.extract(carrier)
        where = {
            "messaging.system": "redis",
            "messaging.destination.name": job.queue,
            "messaging.message.id": job.job_id,
        }
        if job.fence <= 1 and 0.0 < job.enqueued_at <= claimed_at:
            wait = self._tracer.start_span(
                f"wait {job.queue}",
                parent,
                kind=SpanKind.INTERNAL,
                attributes=where,
                start_time=_nanoseconds(job.enqueued_at),
            )
            wait.end(_nanoseconds(claimed_at))
        asked = {
            theirs: value
            for ours, theirs in _REQUEST.items()
            if (value := getattr(request, ours)) is not None and abs(value) < _INT64
        }
        common = self._common(request)
        span = self._tracer.start_span(
            f"{common['gen_ai.operation.name']} {self._model}",
            parent,
            kind=SpanKind.CONSUMER,
            attributes={**common, **asked, **where, **answer, "headrace.delivery": job.fence},
            start_time=_nanoseconds(claimed_at),
        )
        if first:
            span.add_event("first token", timestamp=_nanoseconds(first))
        if failure is not None:
            span.set_attribute("error.type", failure.code)
            span.set_status(Status(StatusCode.ERROR, failure.code))
        span.end(_nanoseconds(ended) if ended >= claimed_at else None)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
