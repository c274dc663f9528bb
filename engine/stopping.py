"""Decides where a sequence ends, and what of its text is final.

Ends are, in this order for each token: EOS or a stop token id (the text ends before the token), a
stop string (the text ends before the match, wherever the match lies across tokens), the limit of
output tokens. Before `min_tokens` outputs only the limit ends a sequence, and stop strings that lie
wholly in that part are text. Text that may be the beginning of a stop string is held back until it
is known not to be. Nothing here knows the scheduler.
"""

from collections.abc import Sequence as Seq

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.sequence import FinishReason, Sequence


class StopStrings:
    """Finds the first stop string to be complete, however its text is cut into pieces.

    Feed pieces with `push`; `text` is what is certain to stay.
    """

    __slots__ = ("_ignored", "_longest", "_stops", "_tail", "text")

    def __init__(self, stops: Seq[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._tail = ""
        self._ignored = 0
        """Characters of the tail that are older than `min_tokens`."""
        self.text = ""

    def push(self, piece: str, ignore: bool = False) -> str | None:
        """The stop string that is now complete, or None. `ignore`: none that ends here counts.

        Of several in one piece, the one that ends first counts, and of those that end together the
        longest: what a reader of single characters would have seen.
        """
        if not self._stops:
            self.text += piece
            return None
        text = self._tail + piece
        first = None if ignore else self._first(text)
        if first is not None:
            begin, stop = first
            self.text += text[:begin]
            self._tail = ""
            return stop
        keep = self._possible_start(text)
        self.text += text[:keep]
        self._tail = text[keep:]
        self._ignored = len(self._tail) if ignore else max(self._ignored - keep, 0)
        return None

    def finish(self) -> None:
        """No more text: what was held back stays."""
        self.text += self._tail
        self._tail = ""

    def _first(self, text: str) -> tuple[int, str] | None:
        found = []
        for stop in self._stops:
            begin = text.find(stop, max(self._ignored - len(stop) + 1, 0))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        if not found:
            return None
        _, begin, stop = min(found)
        return begin, stop

    def _possible_start(self, text: str) -> int:
        """Where the longest end of `text` begins that a stop string begins with."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[begin:]
            if any(stop.startswith(end) for stop in self._stops):
                return begin
        return len(text)


class StopChecker:
    """One sequence's end. Keeps `seq.text` up to date with the text that is final.

    `eos_token_ids` are the model's; `special_stops` maps ids of special tokens to the stop strings
    that name them: their text never appears, so they stop as ids.
    """

    __slots__ = ("_detokenizer", "_ends", "_num_checked", "_special_stops", "_strings", "seq")

    def __init__(
        self,
        seq: Sequence,
        detokenizer: Detokenizer,
        eos_token_ids: Seq[int],
        special_stops: dict[int, str],
    ) -> None:
        self.seq = seq
        self._detokenizer = detokenizer
        self._strings = StopStrings(seq.params.stop)
        self._special_stops = special_stops
        self._ends: dict[int, int | str | None] = {}
        if not seq.params.ignore_eos:
            self._ends.update(dict.fromkeys(eos_token_ids))
        self._ends.update(special_stops)
        self._ends.update({token: token for token in seq.params.stop_token_ids})
        self._num_checked = 0

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Ids that would end the sequence: not to be sampled before `min_tokens` outputs."""
        return tuple(self._ends)

    def check(self) -> bool:
        """Look at the outputs not looked at before; whether the sequence ends, and if so where.

        Sets `finish_reason`, `stop_reason` and the text; outputs after the end are dropped.
        """
        seq = self.seq
        outputs = seq.output_token_ids
        min_tokens = seq.params.min_tokens
        while self._num_checked < len(outputs):
            token = outputs[self._num_checked]
            self._num_checked += 1
            early = self._num_checked < min_tokens
            if token in self._ends and not early:
                return self._end(FinishReason.STOP, self._ends[token])
            stop = self._strings.push(self._detokenizer.push(token), ignore=early)
            if stop is not None:
                return self._end(FinishReason.STOP, stop, matched=True)
            if self._num_checked >= seq.max_output_tokens:
                return self._end(FinishReason.LENGTH, None)
        seq.text = self._strings.text
        return False

    def close(self) -> None:
        """The sequence ends for another reason: what was held back becomes its text."""
        self._strings.push(self._detokenizer.finish(), ignore=True)
        self._strings.finish()
        self.seq.text = self._strings.text

    def _end(
        self, reason: FinishReason, stop_reason: int | str | None, matched: bool = False
    ) -> bool:
        seq = self.seq
        del seq.output_token_ids[self._num_checked :]
        del seq.logprobs[self._num_checked :]
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        if matched:
            seq.text = self._strings.text
        else:
            self.close()
        return True
