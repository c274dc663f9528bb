"""What the queue is told of a job that ended here: its result, encoded, and how it ended.

Whatever goes wrong in making a result becomes that job's failure and no other's. Nothing here knows
the queue, or which jobs are under way.
"""

import logging

from headrace.engine.errors import Failure
from headrace.producer import codec, schemas, trace_context
from headrace.worker import wire_result
from headrace.worker.inflight import InFlight
from headrace.worker.serving_engine import JobEngine
from headrace.worker.source import Outcome, OutcomeKind
from headrace.worker.tracing import NoTracing, Tracing

log = logging.getLogger(__name__)


class Outcomes:
    """`model`: the served name, `digest`: of what computes; both as results carry them."""

    def __init__(
        self, engine: JobEngine, model: str, digest: str = "", tracing: Tracing | None = None
    ) -> None:
        self._engine = engine
        self._model = model
        self._digest = digest
        self._tracing = tracing or NoTracing()

    def ended(self, flight: InFlight) -> Outcome:
        """All sequences of the job have ended."""
        failed = next((s.failure for s in flight.sequences if s.failure is not None), None)
        if failed is not None:
            kind = OutcomeKind.RETRY if failed.retryable else OutcomeKind.FAILED
            return self.failed(flight, failed, kind)
        try:
            result = wire_result.to_result(
                flight.request,
                flight.job,
                flight.sequences,
                self._engine,
                model=self._model,
                claimed_at=flight.claimed_at,
                resumed_from_tokens=flight.resumed_tokens,
                digest=self._digest,
            )
            encoded = codec.encode_result(result)
        except Exception as error:
            log.exception("a result could not be made", extra=flight.tags())
            message = f"the result could not be made: {type(error).__name__}"
            return self.failed(flight, Failure("internal_error", message), OutcomeKind.FAILED)
        usage = result.usage
        self._tracing.answered(flight, result)
        if trace_context.carried(flight.request.metadata) is not None:
            log.info(
                "answered: %d prompt and %d output tokens",
                usage.prompt_tokens,
                usage.completion_tokens,
                extra=flight.tags(),
            )
        return Outcome(
            flight.job, OutcomeKind.SUCCEEDED, encoded, usage.prompt_tokens, usage.completion_tokens
        )

    def failed(self, flight: InFlight, failure: Failure, kind: OutcomeKind) -> Outcome:
        """The job ends with `failure`; for RETRY the queue decides whether it gets another try."""
        flight.given_up = True
        log.info("failed: %s", failure.code, extra=flight.tags(code=failure.code))
        self._tracing.failed(flight, failure)
        result: schemas.Result = wire_result.failed_result(
            failure, flight.job, flight.request, model=self._model
        )
        return Outcome(
            flight.job,
            kind,
            codec.encode_result(result),
            flight.sequences[0].num_prompt_tokens,
            flight.num_output_tokens,
        )
