"""The simulated queue: which jobs wait, what is outstanding in tokens, and what is due when.

It keeps the counters that the exporter publishes, in the same way: tokens of a job count in full
until it is settled, and deadlines are kept in buckets. It knows no worker and no clock.
"""

import heapq
import math
from array import array
from collections.abc import Sequence

from headrace.worker.autoscale.outcome import Scenario
from headrace.worker.autoscale.required import Due


class Backlog:
    """Jobs are numbered as in the trace. Of each, `work_s`: worker seconds of its next attempt,
    `queued_at`: since when it waits, or last waited."""

    def __init__(self, scenario: Scenario) -> None:
        self._trace = trace = scenario.trace
        self._rate = rate = scenario.machine.rate
        self._checkpoint = scenario.machine.checkpoint
        self._by_deadline = scenario.deadline_order
        self.work_s = array("d", map(rate.work_s, trace.prompt_tokens, trace.output_tokens))
        self.full_work_s = array("d", self.work_s)
        self.queued_at = array("d", trace.arrival)
        self.done_tokens = array("q", bytes(8 * len(trace)))
        self._due = array("d", trace.deadline)
        free = [job for job, deadline in enumerate(trace.deadline) if deadline == math.inf]
        patience_s = scenario.acceptable_wait_s + (scenario.long_job_s() if free else 0.0)
        for job in free:
            self._due[job] = trace.arrival[job] + patience_s
        patience_s = max(
            (d - at for d, at in zip(self._due, trace.arrival, strict=True)), default=0
        )
        # A bucket counts as its start: early by at most 1 % of the longest patience.
        self._bucket_s = min(600.0, max(5.0, patience_s / 100.0))
        self._buckets: dict[int, list[float]] = {}
        self._queue: list[tuple[float, int]] = []
        self._settled = bytearray(len(trace))
        self.running = 0
        self.prompt_tokens = 0
        self.output_tokens = 0

    @property
    def pending(self) -> int:
        return len(self._queue)

    @property
    def empty(self) -> bool:
        return not self._queue and not self.running

    def due(self, now: float) -> Sequence[Due]:
        width = self._bucket_s
        return [
            Due(bucket * width - now, work, int(jobs))
            for bucket, (work, jobs) in self._buckets.items()
        ]

    def _bucket(self, job: int) -> int:
        return int(self._due[job] / self._bucket_s)

    def arrive(self, job: int) -> None:
        self.prompt_tokens += self._trace.prompt_tokens[job]
        self.output_tokens += self._trace.output_tokens[job]
        entry = self._buckets.setdefault(self._bucket(job), [0.0, 0.0])
        entry[0] += self.full_work_s[job]
        entry[1] += 1
        self._enqueue(job)

    def _enqueue(self, job: int) -> None:
        # A job put back keeps its key, so it comes before all that arrived after it.
        heapq.heappush(self._queue, (self._due[job] if self._by_deadline else float(job), job))

    def claim(self) -> int:
        """The next job; the caller runs it or settles it."""
        self.running += 1
        return heapq.heappop(self._queue)[1]

    def settle(self, job: int) -> None:
        """A claimed job is over: finished or expired."""
        self.running -= 1
        self._settled[job] = 1
        self.prompt_tokens -= self._trace.prompt_tokens[job]
        self.output_tokens -= self._trace.output_tokens[job]
        bucket = self._bucket(job)
        entry = self._buckets[bucket]
        entry[0] -= self.full_work_s[job]
        entry[1] -= 1
        if entry[1] < 0.5:
            del self._buckets[bucket]

    def put_back(self, job: int, now: float, kept_s: float) -> int:
        """A claimed job was interrupted with `kept_s` of its work in a checkpoint.

        Returns the output tokens kept; the next attempt reads them and the prompt once more.
        """
        trace, rate, done = self._trace, self._rate, self.done_tokens
        gained = 0
        if self._checkpoint:
            prefill_s = (trace.prompt_tokens[job] + done[job]) / rate.prefill_tokens_per_s
            decoded = int(max(0.0, kept_s - prefill_s) * rate.decode_tokens_per_s)
            gained = min(decoded, trace.output_tokens[job] - done[job] - 1)
        done[job] += gained
        self.work_s[job] = rate.work_s(
            trace.prompt_tokens[job] + done[job], trace.output_tokens[job] - done[job]
        )
        self.running -= 1
        self.queued_at[job] = now
        self._enqueue(job)
        return gained

    def unsettled(self) -> list[int]:
        return [job for job, settled in enumerate(self._settled) if not settled]

    def waiting(self) -> list[int]:
        return [job for _, job in self._queue]
