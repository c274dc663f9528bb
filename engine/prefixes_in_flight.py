"""Which blocks of prefixes are being computed just now, so that nobody computes one twice.

A sequence that enters announces the blocks it is going to compute, and withdraws each when it is
computed, or when it will not be. Block keys only; who waits for one is the scheduler's affair.
"""

from collections import Counter
from collections.abc import Iterable

from headrace.engine.errors import EngineError
from headrace.engine.step_plan import Entry


class PrefixesInFlight:
    """Keys of announced blocks, each with how many sequences compute it."""

    def __init__(self) -> None:
        self._announced: Counter[bytes] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._announced

    def announce(self, entry: Entry, num_committed: int) -> None:
        """Others may wait for what it is going to compute: all but its first blocks, which are in
        the cache already."""
        entry.announced_from = num_committed
        entry.announced_to = max(len(entry.keys), num_committed)
        self._announced.update(entry.keys[num_committed:])

    def withdraw(self, entry: Entry, end: int | None = None) -> None:
        """Its first `end` blocks (None: all) are computed, or will not be computed by it."""
        end = entry.announced_to if end is None else min(end, entry.announced_to)
        for key in entry.keys[entry.announced_from : end]:
            self._announced[key] -= 1
            if not self._announced[key]:
                del self._announced[key]
        entry.announced_from = max(end, entry.announced_from)

    def check(self, running: Iterable[Entry]) -> None:
        """Raise EngineError unless just the running sequences' blocks are announced."""
        announced = Counter(
            key
            for entry in running
            for key in entry.keys[entry.announced_from : entry.announced_to]
        )
        if announced != self._announced:
            raise EngineError("the prefixes in flight are not those of the running sequences")
