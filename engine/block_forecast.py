"""How many blocks the running sequences hold, and how many they will hold in the end.

The guess is the length predictor's; admission leaves room for it. Counts only: which blocks those
are is the block manager's affair.
"""

from collections.abc import Iterable

from headrace.engine.errors import EngineError
from headrace.engine.kv.block_manager import BlockManager
from headrace.engine.length_predictor import LengthPredictor
from headrace.engine.sequence import Sequence
from headrace.engine.step_plan import Entry


class BlockForecast:
    """Sums over the running sequences, kept as they enter, grow and leave."""

    def __init__(self, blocks: BlockManager, predictor: LengthPredictor) -> None:
        self._blocks = blocks
        self._predictor = predictor
        self._held = 0
        self._predicted = 0

    @property
    def growth(self) -> int:
        """Blocks that the running ones are expected to take from now on."""
        return self._predicted - self._held

    def blocks_in_the_end(self, seq: Sequence) -> int:
        return self._blocks.blocks_for(
            seq.num_prompt_tokens + max(self._predictor.expected_output(seq), 1) - 1
        )

    def enter(self, entry: Entry) -> None:
        """It runs from now on, with the blocks that it has."""
        self._held += len(self._blocks.block_ids(entry.seq.seq_id))
        self.predict(entry)

    def grew(self, entry: Entry, held: int) -> None:
        """It got one more block and has `held` now."""
        self._held += 1
        if held > entry.predicted_blocks:
            entry.predicted_blocks += 1
            self._predicted += 1

    def leave(self, entry: Entry) -> None:
        """It gives back its blocks, which it still has."""
        self._held -= len(self._blocks.block_ids(entry.seq.seq_id))
        self._predicted -= entry.predicted_blocks
        entry.predicted_blocks = 0

    def predict(self, entry: Entry) -> None:
        """Guess anew: the predictor has learnt."""
        held = len(self._blocks.block_ids(entry.seq.seq_id))
        predicted = max(self.blocks_in_the_end(entry.seq), held)
        self._predicted += predicted - entry.predicted_blocks
        entry.predicted_blocks = predicted

    def check(self, running: Iterable[Entry]) -> None:
        """Raise EngineError unless the sums are those of the running sequences."""
        entries = list(running)
        held = sum(len(self._blocks.block_ids(entry.seq.seq_id)) for entry in entries)
        predicted = sum(entry.predicted_blocks for entry in entries)
        if (held, predicted) != (self._held, self._predicted):
            raise EngineError(
                f"{held} blocks held and {predicted} predicted, but "
                f"{self._held} and {self._predicted} counted"
            )
