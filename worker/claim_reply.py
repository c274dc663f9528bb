"""Reads what CLAIM replied: the jobs that are ours now, and those that cannot be read.

The layout of the reply is on top of `lua/claim.lua`. Nothing here sends anything.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from headrace.producer import codec
from headrace.producer.blobs import BlobStore, digest_in
from headrace.producer.errors import PayloadError
from headrace.worker.source import ClaimedJob, Outcome, OutcomeKind

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimReader:
    """`blobs`: where payloads lie that are only referred to; None: those are refused."""

    blobs: BlobStore | None
    max_payload_bytes: int

    def read(self, lines: bytes = b"", blob: bytes = b"") -> tuple[list[ClaimedJob], list[Outcome]]:
        """Claimed jobs, and the ends of those that cannot be read. Both kinds are leased."""
        jobs: list[ClaimedJob] = []
        refused: list[Outcome] = []
        for facts, data, checkpoint in _rows(lines, blob):
            job, problem = self._job(facts, data, checkpoint)
            if problem is None:
                jobs.append(job)
            else:
                refused.append(_refusal(job, problem))
        return jobs, refused

    def _job(
        self, facts: list[str], data: bytes, checkpoint: bytes
    ) -> tuple[ClaimedJob, PayloadError | None]:
        job_id, execution_id, name, fence, attempts, crashes, enqueued_at, deadline, refusal = facts
        problem: PayloadError | None = None
        payload = b""
        try:
            if refusal != "-":
                raise PayloadError("unsupported_job", f"RQ's {refusal} is not supported")
            payload = codec.unpack(data, self.max_payload_bytes)
            if (digest := digest_in(payload)) is not None:
                payload = self._read_blob(job_id, digest)
        except PayloadError as error:
            problem = error
        job = ClaimedJob(
            job_id=job_id,
            execution_id=execution_id,
            queue=name,
            payload=payload,
            fence=int(fence),
            attempts=int(attempts),
            crashes=int(crashes),
            enqueued_at=_seconds(enqueued_at),
            deadline=float(deadline) if deadline != "-" else None,
            checkpoint=checkpoint or None,
        )
        return job, problem

    def _read_blob(self, job_id: str, digest: str) -> bytes:
        if self.blobs is None:
            raise PayloadError(
                "blob_missing", "the payload lies in a blob store, and this worker has none"
            )
        try:
            return self.blobs.get(job_id, digest)
        except OSError as error:
            raise PayloadError("blob_unavailable", f"the blob store fails: {error}") from error


def _rows(lines: bytes, blob: bytes) -> Iterator[tuple[list[str], bytes, bytes]]:
    """Facts, data and checkpoint of each job in a claim's reply."""
    at = 0
    for line in lines.decode().splitlines():
        *facts, data_bytes, checkpoint_bytes = line.split(" ")
        middle = at + int(data_bytes)
        end = middle + int(checkpoint_bytes)
        yield facts, blob[at:middle], blob[middle:end]
        at = end


def _refusal(job: ClaimedJob, problem: PayloadError) -> Outcome:
    """A job that cannot be read fails, or waits for a blob store that does not answer now."""
    log.info("refused: %s", problem, extra={"job_id": job.job_id})
    retry = problem.code == "blob_unavailable"
    result = codec.failed(job.job_id, problem.code, str(problem), retryable=retry)
    kind = OutcomeKind.RETRY if retry else OutcomeKind.FAILED
    return Outcome(job, kind, codec.encode_result(result))


@lru_cache(maxsize=1024)
def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
