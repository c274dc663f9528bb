"""A claimed job with the sequences that answer it: what the loop's parts hand to each other."""

from dataclasses import dataclass, field

from headrace.engine.sequence import FinishReason, Sequence
from headrace.producer import schemas
from headrace.worker.source import ClaimedJob


@dataclass(slots=True, eq=False)
class InFlight:
    """`claimed_at` is Unix seconds. `resumed_tokens`: output tokens taken over from a checkpoint;
    `saved_tokens`: output tokens that the last checkpoint holds."""

    job: ClaimedJob
    request: schemas.Request
    sequences: list[Sequence]
    claimed_at: float
    resumed_tokens: int = 0
    saved_tokens: int = 0
    given_up: bool = field(default=False)
    """Ended without a result of ours: cancelled, taken away, or put back."""

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sequence.output_token_ids) for sequence in self.sequences)

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def failed(self) -> bool:
        return any(s.finish_reason is FinishReason.FAILED for s in self.sequences)
