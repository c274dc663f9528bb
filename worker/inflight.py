"""A claimed job with the sequences that answer it: what the loop's parts hand to each other."""

from dataclasses import dataclass, field

from headrace.engine.sequence import FinishReason, Sequence, SequenceStatus
from headrace.producer import schemas
from headrace.worker.source import ClaimedJob
from headrace.worker.tags import tags


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

    def tags(self, **more: object) -> dict[str, object]:
        """What a log line says of it."""
        return tags(self.job, self.request, **more)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sequence.output_token_ids) for sequence in self.sequences)

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def failed(self) -> bool:
        return any(s.finish_reason is FinishReason.FAILED for s in self.sequences)

    @property
    def unbegun(self) -> bool:
        """Nothing has been computed for it yet."""
        return all(
            sequence.status is SequenceStatus.WAITING and not sequence.num_computed_tokens
            for sequence in self.sequences
        )

    def begin_again(self) -> None:
        """Fresh sequences that go on where these were taken out of an engine; ended ones stay."""
        self.sequences = [_reborn(sequence) for sequence in self.sequences]


def _reborn(sequence: Sequence) -> Sequence:
    if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        return sequence
    return Sequence(
        request_id=sequence.request_id,
        prompt_token_ids=sequence.prompt_token_ids,
        params=sequence.params,
        seed=sequence.seed,
        sample_index=sequence.sample_index,
        salt=sequence.salt,
        output_token_ids=list(sequence.output_token_ids),
        logprobs=list(sequence.logprobs)[: len(sequence.output_token_ids)],
    )
