"""What the scheduler hands to the runner for one step: plain data that can be sent to other ranks.

The runner keeps a persistent row for each sequence (its tokens, block table, sampling settings).
`removed` drops rows, `added` creates them, in this order, and `rows` says what to compute; tokens
that a step samples are appended to the rows by the runner itself, so the next step can be launched
before the host has read them. After a step that raised, its rows are removed and added anew, and
its removals repeated: removing a row that isn't there does nothing.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from headrace.engine.errors import Failure
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that enters (or re-enters after preemption): all its tokens so far."""

    seq_id: int
    token_ids: Seq[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    sample_index: int
    eos_token_ids: tuple[int, ...]
    """Ids that must not be sampled before `params.min_tokens` outputs (EOS and stop ids)."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """Compute tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens) of a row.

    `new_block_ids` are appended to the row's block table before. `samples`: the chunk reaches the
    last known token, so the logits of its last position are sampled.
    """

    seq_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: Seq[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows whose first `num_shared_blocks` blocks are the same physical blocks, all computed."""

    seq_ids: tuple[int, ...]
    num_shared_blocks: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    step: int
    added: Seq[NewRow]
    removed: Seq[int]
    rows: Seq[ScheduledRow]
    prefix_groups: Seq[PrefixGroup] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's result: for each sampled row, one token or more (speculation), in row order.

    `failures`: rows whose logits were not finite; they have no tokens.
    """

    token_ids: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)


class StepHandle(Protocol):
    """A step that has been launched; `result` waits for its tokens."""

    def result(self) -> SampledTokens: ...


class Runner(Protocol):
    """Executes scheduled batches in order; the device half's one door."""

    def execute(self, batch: ScheduledBatch) -> StepHandle: ...
