"""Guesses how long answers get, from those that ended: what admission reserves memory by.

Reserving `max_tokens` for everyone would leave most of the pool empty, since most answers end long
before. Each preemption shows that the guess was too low, so it doubles for all, up to what is
certain; each answer that ends takes a little of that caution back. That bounds how often the pool
can run full in a row. Knows lengths only.
"""

from headrace.engine.sequence import Sequence

FIRST_GUESS = 128
WEIGHT = 1 / 16
RELIEF = 0.95


class LengthPredictor:
    """An exponential moving average of the output lengths of sequences that ended by themselves."""

    def __init__(self) -> None:
        self.average = float(FIRST_GUESS)
        self.caution = 1.0
        self._seen = 0

    def expected_output(self, seq: Sequence) -> int:
        """Output tokens that the sequence will have in the end, at most `max_output_tokens`."""
        limit = seq.max_output_tokens
        if seq.params.ignore_eos and not seq.params.stop and not seq.params.stop_token_ids:
            return limit
        generated = len(seq.output_token_ids)
        rest = max(self.average - generated, self.average / 4, 1.0)
        return min(limit, max(generated + int(rest * self.caution), seq.params.min_tokens))

    def ended(self, seq: Sequence) -> None:
        """The sequence ended with its answer."""
        self._seen += 1
        weight = max(WEIGHT, 1 / self._seen)
        self.average += weight * (len(seq.output_token_ids) - self.average)
        self.caution = max(1.0, self.caution * RELIEF)

    def preempted(self) -> None:
        self.caution = min(self.caution * 2.0, 1e6)
