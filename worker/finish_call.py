"""Writes what FINISH is told: each outcome as a line of facts and two stretches of bytes.

The layout is on top of `lua/finish.lua`. Nothing here sends anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from headrace.producer import codec
from headrace.producer.blobs import THRESHOLD, BlobStore, reference
from headrace.worker.lease_settings import LeaseSettings, backoff
from headrace.worker.source import ClaimedJob, FinishCode, Outcome, OutcomeKind

_KINDS: Final = {
    OutcomeKind.SUCCEEDED: 1,
    OutcomeKind.FAILED: 2,
    OutcomeKind.EXPIRED: 3,
    OutcomeKind.RETRY: 4,
}

CODES: Final = {
    0: FinishCode.FENCED,
    1: FinishCode.COMMITTED,
    2: FinishCode.OURS_EARLIER,
    3: FinishCode.GONE,
    4: FinishCode.RETRIED,
    5: FinishCode.DEAD,
}


@dataclass(frozen=True, slots=True)
class FinishWriter:
    """`blobs`: where large results go; None: into Redis like the others."""

    blobs: BlobStore | None
    settings: LeaseSettings

    def arguments(self, outcomes: Sequence[Outcome]) -> tuple[str, bytes]:
        """Lines and bytes of some outcomes."""
        lines: list[str] = []
        blobs: list[bytes] = []
        for outcome in outcomes:
            self._add_outcome(outcome, lines, blobs)
        return "\n".join(lines), b"".join(blobs)

    def _add_outcome(self, outcome: Outcome, lines: list[str], blobs: list[bytes]) -> None:
        job = outcome.job
        result = codec.stream_value(self._light(job, outcome.result))
        delay, extra = 0.0, b""
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            failure = _failure(outcome.result)
            error = codec.stream_error(f"{failure['code']}: {failure['message']}")
            extra = orjson.dumps({"error": error.decode(), "event": failure})
            if outcome.kind is OutcomeKind.RETRY:
                delay = backoff(self.settings, job.attempts + 1)
        lines.append(
            f"{job.queue} {job.job_id} {job.execution_id} {_KINDS[outcome.kind]} "
            f"{outcome.prompt_tokens} {outcome.output_tokens} {delay:.3f} "
            f"{len(result)} {len(extra)}"
        )
        blobs += (result, extra)

    def _light(self, job: ClaimedJob, result: bytes) -> bytes:
        """The result, or a reference when it is large and there is a blob store."""
        if self.blobs is None or len(result) <= THRESHOLD:
            return result
        return reference(self.blobs.put(job.job_id, result), len(result))


def _failure(result: bytes) -> dict[str, str]:
    """Code and message of an encoded result's failure."""
    failure = orjson.loads(result).get("failure") or {}
    return {"code": failure.get("code", "failed"), "message": failure.get("message", "")}
