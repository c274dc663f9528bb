"""After a step raised: find the job that makes the engine raise, so that it fails alone.

All jobs that were in the batch are suspects. They are run again from their last token in halves,
one group at a time; a group that gets on is cleared, one that raises again is halved, and a group
of one fails. That is log2(batch) repeated steps for one bad job, and out of memory becomes a
smaller batch by the same rule. Nothing here knows an engine: it only says what to run next.
"""

from collections import deque

from headrace.worker.inflight import InFlight


class Recovery:
    """`groups` wait; `current` is running again and not yet cleared."""

    def __init__(self) -> None:
        self._groups: deque[list[InFlight]] = deque()
        self._current: list[InFlight] = []
        self._marks: dict[str, int] = {}

    @property
    def active(self) -> bool:
        return bool(self._groups or self._current)

    @property
    def waiting(self) -> list[InFlight]:
        """Suspects that are in no batch now."""
        return [flight for group in self._groups for flight in group]

    def split(self, running: list[InFlight]) -> InFlight | None:
        """A step raised while `running` were in the batch; the culprit when only one is left.

        While a group is on probation it alone is suspected: the others had got on without it.
        """
        suspects = [f for f in self._current if f in running] or running
        self._current = []
        if len(suspects) == 1:
            return suspects[0]
        middle = len(suspects) // 2
        self._groups.extendleft((suspects[middle:], suspects[:middle]))
        return None

    def next_group(self) -> list[InFlight]:
        """The group to add to the batch now; empty while one is still on probation."""
        if self._current or not self._groups:
            return []
        self._current = self._groups.popleft()
        self._marks = {f.job.execution_id: f.num_output_tokens for f in self._current}
        return self._current

    def observe(self, ended: set[str]) -> None:
        """Clear those that ended (by execution id) or have got a token since they were added."""
        self._current = [
            flight
            for flight in self._current
            if flight.job.execution_id not in ended
            and not flight.given_up
            and flight.num_output_tokens <= self._marks[flight.job.execution_id]
        ]

    def forget(self, flight: InFlight) -> None:
        """It was cancelled or put back."""
        self._current = [f for f in self._current if f is not flight]
        groups = ([f for f in group if f is not flight] for group in self._groups)
        self._groups = deque(group for group in groups if group)
