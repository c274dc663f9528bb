"""From logits to tokens: every row with its own settings, all in one batch.

Order for a row: logit_bias, penalties, min_tokens, the optional bitmask, temperature; then top_k,
top_p and min_p each set a threshold on the scaled logit and tokens at or above all three are kept
(ties are kept too); then one uniform number, a pure function of (seed, sample index, position),
picks from the kept tokens' distribution in the order of their ids. Nothing is sorted or drawn over
the whole vocabulary unless a row's kept set is wider than the candidates that are looked at first.
Knows no model and no scheduler.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headrace.engine.errors import Failure
from headrace.engine.input_batch import InputBatch
from headrace.engine.random_bits import uniforms
from headrace.engine.sequence import TokenLogprobs

NUM_CANDIDATES = 128
_CHUNK = 64  # ids whose maximum is taken first; the best candidates lie in the best chunks

NON_FINITE = Failure(
    "non_finite_logits",
    "the model's logits are not finite numbers for this sequence; if the model runs in float16,"
    " try dtype bfloat16 or float32",
)
NOTHING_ALLOWED = Failure(
    "no_token_allowed", "logit_bias, min_tokens or a grammar forbid every token at this position"
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_ids` [rows] (meaningless where `failures` names the row), `failures` by row index,
    `logprobs` by row index for the rows that asked."""

    token_ids: NDArray[np.int64]
    failures: dict[int, Failure] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Samples rows of an InputBatch. Holds one work array for penalties, nothing else.

    `one_by_one`: rows that are drawn or want log-probabilities are looked at alone (deterministic
    mode), since torch may sum a row in another order when others are beside it.
    """

    def __init__(self, rows: InputBatch, one_by_one: bool = False) -> None:
        self._rows = rows
        self._one_by_one = one_by_one
        self._counts = torch.zeros(0, 0)

    def sample(
        self, logits: Tensor, slots: NDArray[np.int64], bitmask: Tensor | None = None
    ) -> Sampled:
        """One token for each row of logits float32 [rows, vocab], which may be overwritten.

        `slots`: the rows' slots in the InputBatch. `bitmask` int32 [rows, ceil(vocab / 32)]: bit
        i % 32 of word i / 32 says whether id i is allowed.
        """
        if not self._one_by_one or len(slots) < 2 or not self._sums(slots).any():
            return self._sample(logits, slots, bitmask)
        result = Sampled(np.empty(len(slots), dtype=np.int64))
        apart = self._sums(slots)
        for rows in (np.flatnonzero(~apart), *np.flatnonzero(apart)[:, None]):
            if not len(rows):
                continue
            index = torch.from_numpy(rows)
            mask = None if bitmask is None else bitmask[index]
            part = self._sample(logits[index], slots[rows], mask)
            result.token_ids[rows] = part.token_ids
            result.failures.update({int(rows[i]): why for i, why in part.failures.items()})
            result.logprobs.update({int(rows[i]): found for i, found in part.logprobs.items()})
        return result

    def _sums(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Rows for which something is summed over the vocabulary; the others only compare."""
        settings = self._rows.sampling
        sums: NDArray[np.bool_] = (settings.temperature[slots] > 0) | (
            settings.logprobs[slots] >= 0
        )
        return sums

    def _sample(self, logits: Tensor, slots: NDArray[np.int64], bitmask: Tensor | None) -> Sampled:
        rows, settings = self._rows, self._rows.sampling
        vocab = logits.shape[1]
        peaks = _chunk_maxima(logits)
        failures = dict.fromkeys(_rows_where(~peaks.amax(1).isfinite()), NON_FINITE)

        wants = settings.logprobs[slots]
        with_logprobs = np.flatnonzero(wants >= 0)
        changed = self._changes(slots, bitmask)
        raw = logits
        if changed:
            if len(with_logprobs):
                logits = logits.clone()
            self._apply_changes(logits, slots, bitmask)
            peaks = _chunk_maxima(logits)
            for row in _rows_where(peaks.amax(1) == -torch.inf):
                failures.setdefault(row, NOTHING_ALLOWED)

        tokens = _argmax(logits, peaks).numpy().copy()
        random = settings.temperature[slots] > 0
        if failures:
            random[list(failures)] = False
        drawn = np.flatnonzero(random)
        if len(drawn):
            drawn_slots = slots[drawn]
            noise = uniforms(
                settings.seed[drawn_slots],
                settings.sample_index[drawn_slots],
                rows.num_tokens[drawn_slots].astype(np.uint64),
            )
            every = len(drawn) == len(slots)
            tokens[drawn] = _draw(
                logits if every else logits[torch.from_numpy(drawn)],
                peaks if every else peaks[torch.from_numpy(drawn)],
                Filters(
                    settings.temperature[drawn_slots],
                    np.minimum(settings.top_k[drawn_slots], vocab),
                    settings.top_p[drawn_slots],
                    settings.min_p[drawn_slots],
                ),
                noise,
            )
        logprobs = {}
        if len(with_logprobs):
            logprobs = _logprobs(raw, with_logprobs, wants[with_logprobs], tokens)
            for row in failures:
                logprobs.pop(row, None)
        return Sampled(tokens, failures, logprobs)

    def _changes(self, slots: NDArray[np.int64], bitmask: Tensor | None) -> bool:
        settings = self._rows.sampling
        return bool(
            bitmask is not None
            or settings.biased[slots].any()
            or settings.penalized[slots].any()
            or self._too_short(slots).any()
        )

    def _too_short(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        rows = self._rows
        outputs = rows.num_tokens[slots] - rows.num_prompt_tokens[slots]
        short: NDArray[np.bool_] = outputs < rows.sampling.min_tokens[slots]
        return short

    def _apply_changes(
        self, logits: Tensor, slots: NDArray[np.int64], bitmask: Tensor | None
    ) -> None:
        settings = self._rows.sampling
        vocab = logits.shape[1]
        for row in np.flatnonzero(settings.biased[slots]):
            ids, values = settings.bias[slots[row]]
            logits[row].index_add_(0, torch.from_numpy(ids), torch.from_numpy(values))
        penalized = np.flatnonzero(settings.penalized[slots])
        if len(penalized):
            self._penalize(logits, penalized, slots[penalized])
        for row in np.flatnonzero(self._too_short(slots)):
            banned = settings.banned[slots[row]]
            logits[row].index_fill_(0, torch.from_numpy(banned[banned < vocab]), -torch.inf)
        if bitmask is not None:
            logits.masked_fill_(~unpacked(bitmask, vocab), -torch.inf)

    def _penalize(self, logits: Tensor, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Touch only the ids that occur. A row's ids may repeat: each copy computes the same value
        from the same count, so it does not matter which one is written last."""
        state, settings = self._rows, self._rows.sampling
        history = state.history(slots)
        columns = np.arange(history.shape[1])
        used = columns < state.num_tokens[slots, None]
        output = used & (columns >= state.num_prompt_tokens[slots, None])
        ids = torch.from_numpy(np.where(used, history, history[:, :1]))
        if self._counts.shape[0] < len(rows) or self._counts.shape[1] != logits.shape[1]:
            self._counts = torch.zeros(len(rows), logits.shape[1])
        counts = self._counts[: len(rows)]
        counts.scatter_add_(1, ids, torch.from_numpy(output.astype(np.float32)))
        occurrences = counts.gather(1, ids)
        counts.scatter_(1, ids, 0.0)

        def column(values: NDArray[np.float32]) -> Tensor:
            return torch.from_numpy(values[slots])[:, None]

        index = torch.from_numpy(rows)
        part = logits[index]
        values = part.gather(1, ids)
        repetition = column(settings.repetition_penalty)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= column(settings.frequency_penalty) * occurrences
        values -= column(settings.presence_penalty) * (occurrences > 0)
        logits[index] = part.scatter_(1, ids, values)


@dataclass(frozen=True, slots=True)
class Filters:
    """Per-row settings of rows that are drawn: temperature > 0, the others off at 0, 1 and 0."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]

    def at(self, rows: NDArray[np.int64]) -> "Filters":
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def _draw(
    logits: Tensor, peaks: Tensor, filters: Filters, noise: NDArray[np.float64]
) -> NDArray[np.int64]:
    """One id for each row: from the candidates where they hold the whole kept set, else from the
    whole vocabulary."""
    filtered = (filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0)
    tokens = np.empty(len(noise), dtype=np.int64)
    done = np.zeros(len(noise), dtype=np.bool_)
    rows = np.flatnonzero(filtered)
    if len(rows):
        every = len(rows) == len(noise)
        index = torch.from_numpy(rows)
        picked, enough = _draw_from_candidates(
            logits if every else logits[index],
            peaks if every else peaks[index],
            filters.at(rows),
            noise[rows],
        )
        tokens[rows] = picked
        done[rows] = enough
    rest = np.flatnonzero(~done)
    if len(rest):
        every = len(rest) == len(noise)
        part = logits if every else logits[torch.from_numpy(rest)]
        tokens[rest] = _draw_from_all(part, filters.at(rest), noise[rest])
    return tokens


def _draw_from_candidates(
    logits: Tensor, peaks: Tensor, filters: Filters, noise: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Ids, and for which rows they hold: those whose threshold lies above the last candidate."""
    values, ids = _top(logits, peaks, NUM_CANDIDATES)
    temperature = torch.from_numpy(filters.temperature)[:, None]
    scaled = ((values - values[:, :1]) / temperature).double()
    weights = scaled.exp()
    if bool(((filters.top_p < 1) & (filters.top_k == 0)).any()):
        total = ((logits - values[:, :1]) / temperature).exp_().sum(1, keepdim=True).double()
    else:
        total = weights.sum(1, keepdim=True)
    threshold = _threshold(scaled, weights, total, filters)
    kept = scaled >= threshold
    complete = ids.shape[1] == logits.shape[1]
    enough = torch.from_numpy(np.full(len(noise), complete)) | ~kept[:, -1]
    order = ids.argsort(1)
    picked = _pick((weights * kept).gather(1, order), torch.from_numpy(noise))
    return ids.gather(1, order).gather(1, picked[:, None])[:, 0].numpy(), enough.numpy()


def _draw_from_all(
    logits: Tensor, filters: Filters, noise: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The same draw over the whole vocabulary: sorts only rows that have a filter."""
    temperature = torch.from_numpy(filters.temperature)[:, None]
    scaled = (logits - logits.amax(1, keepdim=True)) / temperature
    filtered = np.flatnonzero((filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0))
    if len(filtered):
        index = torch.from_numpy(filtered)
        part = scaled[index]
        values = part.sort(1, descending=True).values.double()
        weights = values.exp()
        limit = _threshold(values, weights, weights.sum(1, keepdim=True), filters.at(filtered))
        scaled[index] = part.masked_fill(part.double() < limit, -torch.inf)
    weights = _chunked(scaled.exp_(), 0.0)
    sums = weights.sum(2).double()
    uniform = torch.from_numpy(noise)
    chunk = _pick(sums, uniform)
    before = sums.cumsum(1).gather(1, chunk[:, None])[:, 0] - sums.gather(1, chunk[:, None])[:, 0]
    inside = weights[torch.arange(len(noise)), chunk].double()
    remaining = (uniform * sums.sum(1) - before) / inside.sum(1)
    token = _pick(inside, remaining.clamp(0, 1))
    return (chunk * _CHUNK + token).numpy()


def _threshold(scaled: Tensor, weights: Tensor, total: Tensor, filters: Filters) -> Tensor:
    """Lowest scaled logit [rows, 1] that a row keeps, from its values in descending order.

    `scaled` float64 [rows, n] relative to the best, `weights` their exponentials, `total` the
    weight of all that top_p looks at where top_k is off.
    """
    lowest = torch.full_like(total, -torch.inf)
    top_k = torch.from_numpy(filters.top_k)[:, None]
    last = scaled.shape[1] - 1
    kth = scaled.gather(1, (top_k - 1).clamp(0, last))
    threshold = torch.where(top_k > 0, kth, lowest)
    inside = scaled >= threshold
    total = torch.where(top_k > 0, (weights * inside).sum(1, keepdim=True), total)
    top_p = torch.from_numpy(filters.top_p.astype(np.float64))[:, None]
    before = (weights * inside).cumsum(1) - weights
    num_kept = ((before < top_p * total) & inside).sum(1, keepdim=True).clamp(min=1)
    nucleus = scaled.gather(1, num_kept - 1)
    threshold = torch.where(top_p < 1, torch.maximum(threshold, nucleus), threshold)
    min_p = torch.from_numpy(filters.min_p.astype(np.float64))[:, None]
    return torch.maximum(threshold, min_p.log())


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [rows] of the first entry at which the running sum exceeds uniform times the total;
    an entry of weight 0 is never picked."""
    running = weights.cumsum(1)
    target = (uniform * running[:, -1])[:, None]
    beyond = running > target
    first = beyond.int().argmax(1)
    heaviest = weights.argmax(1)  # rounding put the target at the very end
    return torch.where(beyond.any(1), first, heaviest)


def _top(logits: Tensor, peaks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, descending, and their ids.

    All of them lie in the `count` chunks with the largest maxima.
    """
    num_chunks = peaks.shape[1]
    if num_chunks <= count:
        found = logits.topk(min(count, logits.shape[1]), dim=1)
        return found.values, found.indices
    chunks = peaks.topk(count, dim=1, sorted=False).indices
    gathered = _chunked(logits, -torch.inf)[torch.arange(len(logits))[:, None], chunks]
    found = gathered.flatten(1).topk(count, dim=1)
    ids = chunks.gather(1, found.indices // _CHUNK) * _CHUNK + found.indices % _CHUNK
    return found.values, ids


def _argmax(logits: Tensor, peaks: Tensor) -> Tensor:
    """Id of the largest logit of each row; of several the lowest."""
    chunk = peaks.argmax(1)
    inside = _chunked(logits, -torch.inf)[torch.arange(len(logits)), chunk]
    return chunk * _CHUNK + inside.argmax(1)


def _chunk_maxima(logits: Tensor) -> Tensor:
    """[rows, chunks]; a NaN anywhere shows."""
    return _chunked(logits, -torch.inf).amax(2)


def _chunked(values: Tensor, fill: float) -> Tensor:
    """[rows, vocab] as [rows, chunks, _CHUNK], a view where the vocabulary divides."""
    rest = -values.shape[1] % _CHUNK
    if rest:
        values = functional.pad(values, (0, rest), value=fill)
    return values.view(len(values), -1, _CHUNK)


def _logprobs(
    raw: Tensor, rows: NDArray[np.int64], wanted: NDArray[np.int64], tokens: NDArray[np.int64]
) -> dict[int, TokenLogprobs]:
    """Natural-log probabilities of the model's own distribution, for the rows that asked."""
    part = raw[torch.from_numpy(rows)]
    normalizer = part.logsumexp(1, keepdim=True)
    count = min(int(wanted.max()), part.shape[1])
    best_values, best_ids = _top(part, _chunk_maxima(part), max(count, 1))
    best = (best_values - normalizer).tolist()
    ids = best_ids.tolist()
    chosen = torch.from_numpy(tokens[rows])[:, None]
    sampled = (part.gather(1, chosen) - normalizer)[:, 0].tolist()
    return {
        int(row): TokenLogprobs(
            int(tokens[row]),
            sampled[index],
            tuple(zip(ids[index][:width], best[index][:width], strict=True)),
        )
        for index, (row, width) in enumerate(zip(rows, wanted, strict=True))
    }


def unpacked(bitmask: Tensor, vocab: int) -> Tensor:
    """int32 [rows, words] as bool [rows, vocab], lowest bit first."""
    bits = (bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten(1)[:, :vocab].bool()


def _rows_where(flags: Tensor) -> Seq[int]:
    return flags.nonzero()[:, 0].tolist()
