"""Persistent rows: what the runner remembers of each sequence between steps, and a step's inputs.

A row holds tokens, block table and sampling settings in arrays, so that a step's inputs come out of
a few array operations, whatever the number of sequences. Knows no model: numpy in, numpy out.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.batch import NewRow, PrefixGroup, ScheduledBatch, ScheduledRow
from headrace.engine.errors import EngineError
from headrace.engine.layers.backend import AttentionMetadata, SharedPrefix
from headrace.engine.sampling_params import SamplingParams

_INITIAL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`output_rows`: flat index of the token whose hidden state is sampled, for each sampled row;
    `sampled_slots` and `sampled_seq_ids` beside it. `row_slots`: of all rows; `new_blocks`: for
    rows that got some, the slot, the place of the first in its table, and their ids."""

    token_ids: NDArray[np.int64]
    attention: AttentionMetadata
    output_rows: NDArray[np.int64]
    sampled_slots: NDArray[np.int64]
    sampled_seq_ids: list[int]
    row_slots: NDArray[np.int64]
    new_blocks: list[tuple[int, int, Seq[int]]]


@dataclass(slots=True)
class SamplingRows:
    """Sampling settings, one array entry a slot; names as in SamplingParams."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    repetition_penalty: NDArray[np.float32]
    presence_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float32]
    seed: NDArray[np.uint64]
    sample_index: NDArray[np.uint64]
    min_tokens: NDArray[np.int64]
    logprobs: NDArray[np.int64]
    """-1: none."""
    penalized: NDArray[np.bool_]
    biased: NDArray[np.bool_]
    bias: list[tuple[NDArray[np.int64], NDArray[np.float32]]]
    banned: list[NDArray[np.int64]]

    @classmethod
    def empty(cls, size: int) -> "SamplingRows":
        nothing = np.zeros(0, dtype=np.int64)
        return cls(
            temperature=np.zeros(size, dtype=np.float32),
            top_k=np.zeros(size, dtype=np.int64),
            top_p=np.ones(size, dtype=np.float32),
            min_p=np.zeros(size, dtype=np.float32),
            repetition_penalty=np.ones(size, dtype=np.float32),
            presence_penalty=np.zeros(size, dtype=np.float32),
            frequency_penalty=np.zeros(size, dtype=np.float32),
            seed=np.zeros(size, dtype=np.uint64),
            sample_index=np.zeros(size, dtype=np.uint64),
            min_tokens=np.zeros(size, dtype=np.int64),
            logprobs=np.full(size, -1, dtype=np.int64),
            penalized=np.zeros(size, dtype=np.bool_),
            biased=np.zeros(size, dtype=np.bool_),
            bias=[(nothing, np.zeros(0, dtype=np.float32))] * size,
            banned=[nothing] * size,
        )

    def set(self, slot: int, params: SamplingParams, row: NewRow) -> None:
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.seed[slot] = row.seed & (2**64 - 1)
        self.sample_index[slot] = row.sample_index
        self.min_tokens[slot] = params.min_tokens
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.penalized[slot] = params.penalized
        self.biased[slot] = bool(params.logit_bias)
        self.bias[slot] = (
            np.fromiter(params.logit_bias.keys(), dtype=np.int64),
            np.fromiter(params.logit_bias.values(), dtype=np.float32),
        )
        self.banned[slot] = np.asarray(row.eos_token_ids, dtype=np.int64)


class InputBatch:
    """Rows of at most `max_num_seqs` sequences; arrays grow with the longest one."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, dummy_block: int
    ) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._dummy_block = dummy_block
        self._slots: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        width = min(_INITIAL_TOKENS, max_model_len)
        self._tokens = np.zeros((max_num_seqs, width), dtype=np.int64)
        self._tables = np.full((max_num_seqs, self._num_blocks(width)), dummy_block, dtype=np.int32)
        self._table_lens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.sampling = SamplingRows.empty(max_num_seqs)

    def __len__(self) -> int:
        return len(self._slots)

    def update(self, batch: ScheduledBatch) -> None:
        """Drop the batch's removed rows (unknown ones are none), then create its new ones."""
        for seq_id in batch.removed:
            slot = self._slots.pop(seq_id, None)
            if slot is not None:
                self._free.append(slot)
        for row in batch.added:
            if row.seq_id in self._slots:
                raise EngineError(f"sequence {row.seq_id} already has a row")
            if not self._free:
                raise EngineError("more rows than max_num_seqs")
            slot = self._free.pop()
            self._slots[row.seq_id] = slot
            count = len(row.token_ids)
            self._grow(count + 1)
            self._tokens[slot, :count] = row.token_ids
            self.num_tokens[slot] = count
            self.num_prompt_tokens[slot] = row.num_prompt_tokens
            self._tables[slot] = self._dummy_block
            self._table_lens[slot] = 0
            self.sampling.set(slot, row.params, row)

    def slot_of(self, seq_id: int) -> int:
        return self._slots[seq_id]

    def step_inputs(self, batch: ScheduledBatch, with_tables: bool = True) -> StepInputs:
        """Flatten the batch's rows; block ids they bring are appended to the block tables.
        `with_tables` False leaves the metadata without block tables."""
        rows = batch.rows
        count = len(rows)
        slots_of = self._slots
        slots = np.fromiter((slots_of[row.seq_id] for row in rows), np.int64, count)
        computed = np.fromiter((row.num_computed_tokens for row in rows), np.int64, count)
        lengths = np.fromiter((row.num_scheduled_tokens for row in rows), np.int64, count)
        samples = np.fromiter((row.samples for row in rows), np.bool_, count)
        context = computed + lengths
        self._grow(int(context.max()) + 1)
        new_blocks: list[tuple[int, int, Seq[int]]] = []
        for slot, row in zip(slots, rows, strict=True):
            if row.new_block_ids:
                new_blocks.append((int(slot), int(self._table_lens[slot]), row.new_block_ids))
                self._append_blocks(int(slot), row.new_block_ids)

        starts = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        row_of = np.repeat(np.arange(count), lengths)
        positions = np.arange(starts[-1]) - starts[row_of] + computed[row_of]
        token_slots = slots[row_of]
        blocks = self._tables[token_slots, positions // self._block_size]
        sampled = np.flatnonzero(samples)
        attention = AttentionMetadata(
            block_size=self._block_size,
            positions=positions,
            slots=blocks.astype(np.int64) * self._block_size + positions % self._block_size,
            query_starts=starts.astype(np.int32),
            context_lens=context.astype(np.int32),
            block_tables=self._tables[
                slots if with_tables else slots[:0], : self._num_blocks(int(context.max()))
            ],
            prefixes=self._prefixes(batch.prefix_groups, rows),
        )
        return StepInputs(
            token_ids=self._tokens[token_slots, positions],
            attention=attention,
            output_rows=starts[1:][sampled] - 1,
            sampled_slots=slots[sampled],
            sampled_seq_ids=[row.seq_id for row in rows if row.samples],
            row_slots=slots,
            new_blocks=new_blocks,
        )

    def append(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """One sampled token to each of the rows."""
        if not len(slots):
            return
        self._grow(int(self.num_tokens[slots].max()) + 1)
        self._tokens[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def advance(self, slots: NDArray[np.int64]) -> None:
        """One token to each of the rows whose id only the device knows."""
        self.num_tokens[slots] += 1

    def history(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids of the rows, [rows, longest]; entries beyond a row's tokens mean nothing."""
        return self._tokens[slots, : int(self.num_tokens[slots].max())]

    def _append_blocks(self, slot: int, block_ids: Seq[int]) -> None:
        start = int(self._table_lens[slot])
        end = start + len(block_ids)
        if end > self._tables.shape[1]:
            self._grow(end * self._block_size)
        self._tables[slot, start:end] = block_ids
        self._table_lens[slot] = end

    def _prefixes(self, groups: Seq[PrefixGroup], rows: Seq[ScheduledRow]) -> list[SharedPrefix]:
        """The groups as row indices; a sequence that is not in this step has no part in it."""
        if not groups:
            return []
        row_of = {row.seq_id: index for index, row in enumerate(rows)}
        prefixes = []
        for group in groups:
            members = sorted(row_of[seq_id] for seq_id in group.seq_ids if seq_id in row_of)
            if len(members) > 1 and group.num_shared_blocks > 0:
                prefixes.append(
                    SharedPrefix(np.array(members, dtype=np.int64), group.num_shared_blocks)
                )
        return prefixes

    def _grow(self, tokens: int) -> None:
        """Make room for rows of `tokens` tokens, doubling, up to the model's length."""
        if tokens > self._tokens.shape[1]:
            width = max(tokens, min(2 * self._tokens.shape[1], self._max_model_len + 1))
            wider = np.zeros((len(self._tokens), width), dtype=np.int64)
            wider[:, : self._tokens.shape[1]] = self._tokens
            self._tokens = wider
        blocks = self._num_blocks(tokens)
        if blocks > self._tables.shape[1]:
            width = max(blocks, self._num_blocks(self._tokens.shape[1]))
            tables = np.full((len(self._tables), width), self._dummy_block, dtype=np.int32)
            tables[:, : self._tables.shape[1]] = self._tables
            self._tables = tables

    def _num_blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
