"""The jobs under way, and whose each sequence in the engine is.

The loop's thread alone changes it; other threads may count and list. Nothing here knows how a job
ends.
"""

from collections.abc import Iterator

from headrace.worker.inflight import InFlight
from headrace.worker.serving_engine import ServingEngine
from headrace.worker.source import ClaimedJob


class Flights:
    """A job is under way from `enter` to `leave`; its sequences are in the engine in between, all
    of them or none."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._jobs: dict[str, InFlight] = {}
        self._by_seq: dict[int, InFlight] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[InFlight]:
        """Those of this moment: jobs may enter and leave meanwhile."""
        return iter(list(self._jobs.values()))

    def __contains__(self, flight: InFlight) -> bool:
        return flight.job.execution_id in self._jobs

    @property
    def num_sequences(self) -> int:
        """Sequences in the engine."""
        return len(self._by_seq)

    def find(self, job: ClaimedJob) -> InFlight | None:
        return self._jobs.get(job.execution_id)

    def whose(self, seq_id: int) -> InFlight | None:
        return self._by_seq.get(seq_id)

    def in_engine(self) -> list[InFlight]:
        """Jobs with a sequence in the engine, each once."""
        return list(dict.fromkeys(self._by_seq.values()))

    def enter(self, flight: InFlight) -> None:
        self._jobs[flight.job.execution_id] = flight

    def leave(self, flight: InFlight) -> None:
        """It has ended, or is no longer ours."""
        self._jobs.pop(flight.job.execution_id, None)

    def begin(self, flight: InFlight) -> None:
        """Give its open sequences to the engine, which may raise half-way; then `abort`."""
        for sequence in flight.unfinished:
            self._engine.add(sequence)
            self._by_seq[sequence.seq_id] = flight

    def ended(self, seq_id: int) -> InFlight | None:
        """A sequence has left the engine by itself: whose it was."""
        return self._by_seq.pop(seq_id, None)

    def abort(self, flight: InFlight) -> None:
        """Take a job's sequences out of the engine."""
        for sequence in flight.sequences:
            if self._by_seq.pop(sequence.seq_id, None) is not None:
                self._engine.abort(sequence.seq_id)
