"""What the scheduler knows of one unfinished sequence, and of a step that it is putting together.

Two records; nothing here decides anything.
"""

from headrace.engine.batch import NewRow, ScheduledRow
from headrace.engine.sequence import Sequence


class Entry:
    """What the scheduler knows of one unfinished sequence beside the sequence itself."""

    __slots__ = (
        "announced_from",
        "announced_to",
        "forbidden",
        "in_flight",
        "in_runner",
        "keys",
        "last_step",
        "num_pending",
        "num_sent_blocks",
        "predicted_blocks",
        "seq",
    )

    def __init__(self, seq: Sequence, forbidden: tuple[int, ...]) -> None:
        self.seq = seq
        self.forbidden = forbidden
        self.keys: list[bytes] = []
        self.in_flight = 0
        """Steps that are launched and not yet updated in which it has a row."""
        self.last_step = 0
        self.num_pending = 0
        """Tokens that steps in flight sample; their ids are not known here yet."""
        self.in_runner = False
        self.num_sent_blocks = 0
        self.announced_from = 0
        self.announced_to = 0
        """Its keys between the two stand in the table of prefixes in flight."""
        self.predicted_blocks = 0


class StepPlan:
    """A step being put together: its rows so far, and the tokens left of its budget."""

    __slots__ = ("added", "budget", "planned", "preempted", "rows", "step")

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.rows: list[ScheduledRow] = []
        self.added: list[NewRow] = []
        self.planned: set[int] = set()
        self.preempted = False
