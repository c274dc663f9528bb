"""Decides which tokens are computed in the next step.

One rule and no phases: every sequence has `num_computed_tokens` chasing `num_tokens`, and a step
hands out one budget of tokens: first one token for each sequence that decodes, then chunks of
prompts that are under way, then newcomers. A prefix-cache hit, a chunk of a long prompt and the
return of a preempted sequence are the same line.

A newcomer is admitted when the pool has room for all its tokens so far and for what it and the
running ones are expected to write. If the guess was wrong, the last admitted goes back to the front
of the queue and is computed again later, mostly from the prefix cache. The first admitted is never
preempted and alone always fits, so there is progress whatever happens.

Sequences that share a prefix with one that is computing it now are held back, for a bounded number
of steps, until they can take it from the cache.

One step may be in flight: `schedule` may be called again before `update`. Token ids only; nothing
here knows text, stop conditions or torch.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from headrace.engine.batch import NewRow, SampledTokens, ScheduledBatch, ScheduledRow
from headrace.engine.block_forecast import BlockForecast
from headrace.engine.errors import EngineError, Failure
from headrace.engine.kv.block_manager import BlockManager, tokens_between
from headrace.engine.kv.prefix_cache import PrefixMatch
from headrace.engine.length_predictor import LengthPredictor
from headrace.engine.prefix_groups import PrefixGrouper
from headrace.engine.prefixes_in_flight import PrefixesInFlight
from headrace.engine.sequence import Sequence, SequenceStatus
from headrace.engine.step_plan import Entry, StepPlan
from headrace.engine.waiting import Waiter, WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_batched_tokens` is the budget of a step, `max_prefix_delay` the most steps that a
    sequence is held back for a prefix in flight; 0 switches that off."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_prefix_delay: int = 64

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}): a step must have a token for every running sequence"
            )


@dataclass(slots=True)
class ScheduleCounts:
    """What scheduling did since the counts were last taken."""

    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0


@dataclass(frozen=True, slots=True)
class Updated:
    """What a step did: sequences that got tokens with how many, and those whose logits failed."""

    progressed: list[tuple[Sequence, int]]
    failed: list[tuple[Sequence, Failure]]
    num_prompt_tokens: int
    num_output_tokens: int


class Scheduler:
    """Waiting and running sequences over one BlockManager.

    `token_limit` may be lowered below the configured budget for a while (memory is short).
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        group_prefixes: bool = True,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.token_limit = limits.max_num_batched_tokens
        self.predictor = LengthPredictor()
        self.counts = ScheduleCounts()
        self._forecast = BlockForecast(blocks, self.predictor)
        self._prefixes = PrefixesInFlight()
        self._grouper = (
            PrefixGrouper(blocks.block_size, blocks.block_ids) if group_prefixes else None
        )
        self._entries: dict[int, Entry] = {}
        self._running: dict[int, Entry] = {}
        self._waiting = WaitingQueue(blocks.block_size)
        self._removed: list[int] = []
        self._step = 0
        self._in_flight: set[int] = set()
        self._turn = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running) or bool(self._waiting)

    def running_ids(self) -> list[int]:
        return list(self._running)

    def add(self, seq: Sequence, forbidden: tuple[int, ...] = ()) -> None:
        """Queue a sequence whose `seq_id` and `max_output_tokens` are set.

        `forbidden`: ids that must not be sampled before `params.min_tokens` outputs. The caller has
        checked that prompt and output fit the pool when the sequence has it alone.
        """
        entry = Entry(seq, forbidden)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        entry.keys = self.blocks.keys_of(seq)
        self._entries[seq.seq_id] = entry
        expected = self.predictor.expected_output(seq)
        self._waiting.add(Waiter(seq.seq_id, entry.keys, seq.num_tokens, expected))

    def schedule(
        self, only: AbstractSet[int] | None = None, admit: bool = True
    ) -> ScheduledBatch | None:
        """The next step; None when nothing can be computed now.

        `only`: of the running sequences just these; `admit`: newcomers too.
        """
        plan = StepPlan(self._step + 1, self.token_limit)
        prefills = self._schedule_decodes(plan, only)
        for entry in prefills:
            if plan.budget == 0:
                break
            if entry.seq.seq_id in self._running:
                self._plan_row(plan, entry, self._todo(entry))
        if admit and not plan.preempted:
            self._admit(plan)
        self._waiting.end_step()
        if not plan.rows:
            return None
        self._step = plan.step
        self._in_flight.add(plan.step)
        removed, self._removed = self._removed, []
        groups = self._grouper.groups(plan.rows) if self._grouper is not None else []
        return ScheduledBatch(plan.step, plan.added, removed, plan.rows, groups)

    def update(self, batch: ScheduledBatch, sampled: SampledTokens) -> Updated:
        """Take in a step's result: appends its tokens, commits computed blocks to the cache."""
        progressed: list[tuple[Sequence, int]] = []
        failed: list[tuple[Sequence, Failure]] = []
        num_prompt_tokens = 0
        num_output_tokens = 0
        size = self.blocks.block_size
        for row in batch.rows:
            seq_id = row.seq_id
            entry = self._entries.get(seq_id)
            if entry is None:
                continue
            seq = entry.seq
            entry.in_flight -= 1
            if row.samples:
                entry.num_pending -= 1
            start = row.num_computed_tokens
            computed = start + row.num_scheduled_tokens
            if start < seq.num_prompt_tokens:
                num_prompt_tokens += min(computed, seq.num_prompt_tokens) - start
            failure = sampled.failures.get(seq_id)
            if failure is not None:
                failed.append((seq, failure))
                continue
            if computed // size > start // size and self.blocks.has_table(seq_id):
                self._prefixes.withdraw(entry, self.blocks.commit(seq, computed))
            if row.samples:
                tokens = sampled.token_ids[seq_id]
                seq.output_token_ids.extend(tokens)
                num_output_tokens += len(tokens)
                progressed.append((seq, len(tokens)))
        self._step_done(batch.step)
        return Updated(progressed, failed, num_prompt_tokens, num_output_tokens)

    def roll_back(self, batch: ScheduledBatch) -> None:
        """The step failed: as if it had not been scheduled. Of several, the last one first.

        What the runner did of it is unknown, so the rows are taken out of the runner and added
        anew with their whole tables; it must ignore the removal of a row that it doesn't have.
        """
        self._removed.extend(batch.removed)
        for row in batch.rows:
            entry = self._entries.get(row.seq_id)
            if entry is None:
                continue
            entry.in_flight -= 1
            if row.samples:
                entry.num_pending -= 1
            if row.seq_id in self._running:
                entry.seq.num_computed_tokens = row.num_computed_tokens
                self._drop_row(entry)
        if self._grouper is not None:
            self._grouper.forget()
        self._step_done(batch.step)

    def finish(self, seq: Sequence, answered: bool = True, discard: bool = False) -> None:
        """The sequence has ended, wherever it was. `answered`: its length teaches the predictor;
        `discard`: its KV must not be used again."""
        entry = self._entries.pop(seq.seq_id)
        if seq.seq_id in self._waiting:
            self._unpin(self._waiting.remove(seq.seq_id))
        else:
            self._leave(entry, discard)
        seq.status = SequenceStatus.FINISHED
        if answered:
            self.predictor.ended(seq)

    def withdraw_prefix(self, seq_id: int) -> None:
        """Nobody is to wait for what this sequence computes: it may not get there."""
        entry = self._running.get(seq_id)
        if entry is not None:
            self._prefixes.withdraw(entry)

    def take_counts(self) -> ScheduleCounts:
        counts, self.counts = self.counts, ScheduleCounts()
        return counts

    def check_integrity(self) -> None:
        """Raise EngineError if the books do not balance. O(everything): for tests and when idle."""
        self.blocks.check_integrity()
        for seq_id in self._entries:
            if (seq_id in self._running) == (seq_id in self._waiting):
                raise EngineError(f"sequence {seq_id} must be either running or waiting")
            if (seq_id in self._running) != self.blocks.has_table(seq_id):
                raise EngineError(f"sequence {seq_id} must have blocks exactly when it runs")
        if len(self._running) + len(self._waiting) != len(self._entries):
            raise EngineError("a sequence runs or waits that is not known")
        self._forecast.check(self._running.values())
        self._prefixes.check(self._running.values())

    # --- one step ---------------------------------------------------------------------------

    def _todo(self, entry: Entry) -> int:
        seq = entry.seq
        return seq.num_tokens + entry.num_pending - seq.num_computed_tokens

    def _schedule_decodes(self, plan: StepPlan, only: AbstractSet[int] | None) -> list[Entry]:
        """A row for each sequence that has one token to compute; returns those with more."""
        prefills = []
        entries = list(self._running.values())
        if self._turn:
            turn = self._turn % max(len(entries), 1)
            entries = entries[turn:] + entries[:turn]
        for position, entry in enumerate(entries):
            seq = entry.seq
            if only is not None and seq.seq_id not in only:
                continue
            num_outputs = len(seq.output_token_ids) + entry.num_pending
            todo = len(seq.prompt_token_ids) + num_outputs - seq.num_computed_tokens
            if todo > 1:
                prefills.append(entry)
                continue
            ends = num_outputs >= seq.max_output_tokens
            if todo == 0 or ends or seq.seq_id not in self._running:
                continue
            if plan.budget == 0:
                self._turn += position
                return []
            if self._grow(plan, entry):
                self._plan_row(plan, entry, 1)
        self._turn = 0
        return prefills

    def _grow(self, plan: StepPlan, entry: Entry) -> bool:
        """Room for one more token, if need be by preempting; False: not in this step."""
        seq_id = entry.seq.seq_id
        wanted = entry.seq.num_computed_tokens + 1
        before = len(self.blocks.block_ids(seq_id))
        if before * self.blocks.block_size >= wanted:
            return True
        while not self.blocks.grow(seq_id, wanted):
            if self.blocks.unpin_all():
                continue
            if self.blocks.num_retired:
                return False
            victim = next(
                e for e in reversed(self._running.values()) if e.seq.seq_id not in plan.planned
            )
            if victim is entry and not plan.planned and len(self._running) == 1:
                raise EngineError(
                    f"sequence {seq_id} needs more than the pool's {self.blocks.num_blocks} blocks"
                )
            self._preempt(plan, victim)
            if victim is entry:
                return False
        self._forecast.grew(entry, before + 1)
        return True

    def _preempt(self, plan: StepPlan, entry: Entry) -> None:
        seq = entry.seq
        self._leave(entry)
        seq.status = SequenceStatus.PREEMPTED
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self._waiting.put_front(Waiter(seq.seq_id, entry.keys, seq.num_tokens, 0))
        self.predictor.preempted()
        for other in self._running.values():
            self._forecast.predict(other)
        self.counts.preemptions += 1
        plan.preempted = True

    def _leave(self, entry: Entry, discard: bool = False) -> None:
        """Out of the running ones: gives back blocks and row."""
        seq_id = entry.seq.seq_id
        del self._running[seq_id]
        self._prefixes.withdraw(entry)
        self._forecast.leave(entry)
        after = entry.last_step if entry.in_flight else None
        self.blocks.close(seq_id, after_step=after, discard=discard)
        self._drop_row(entry)

    def _drop_row(self, entry: Entry) -> None:
        if entry.in_runner:
            self._removed.append(entry.seq.seq_id)
        entry.in_runner = False
        entry.num_sent_blocks = 0

    def _plan_row(self, plan: StepPlan, entry: Entry, todo: int) -> None:
        """Compute up to `todo` tokens of the sequence in this step. A chunk that is cut off ends
        with a full block, so that nothing of it is beyond the cache."""
        seq = entry.seq
        start = seq.num_computed_tokens
        count = todo
        if todo > plan.budget:
            count = plan.budget
            aligned = (start + count) // self.blocks.block_size * self.blocks.block_size
            if aligned > start:
                count = aligned - start
        if not entry.in_runner:
            entry.in_runner = True
            plan.added.append(
                NewRow(
                    seq.seq_id,
                    tokens_between(seq, 0, seq.num_tokens),
                    seq.num_prompt_tokens,
                    seq.params,
                    seq.seed,
                    seq.sample_index,
                    entry.forbidden,
                )
            )
        table = self.blocks.block_ids(seq.seq_id)
        sent = entry.num_sent_blocks
        fresh = tuple(table[sent:]) if len(table) > sent else ()
        entry.num_sent_blocks = len(table)
        samples = count == todo
        plan.rows.append(ScheduledRow(seq.seq_id, start, count, fresh, samples))
        plan.planned.add(seq.seq_id)
        plan.budget -= count
        seq.num_computed_tokens = start + count
        entry.in_flight += 1
        entry.last_step = plan.step
        if samples:
            entry.num_pending += 1

    def _step_done(self, step: int) -> None:
        """Blocks kept for a step are free once no step up to that one is in flight: a later one may
        have ended before, by not being launched at all."""
        self._in_flight.discard(step)
        self.blocks.step_done(min(self._in_flight, default=self._step + 1) - 1)

    # --- newcomers --------------------------------------------------------------------------

    def _admit(self, plan: StepPlan) -> None:
        while plan.budget > 0 and len(self._running) < self.limits.max_num_seqs:
            waiter = self._waiting.first()
            if waiter is None:
                return
            entry = self._entries[waiter.seq_id]
            seq = entry.seq
            if entry.num_pending:
                return
            if len(entry.keys) < seq.num_tokens // self.blocks.block_size:
                entry.keys = self.blocks.keys_of(seq)
            match = self.blocks.match(seq, entry.keys)
            if self._hold_back(plan, waiter, entry, match):
                continue
            if not self._fits(entry, match):
                return
            num_cached = self.blocks.open(seq, match, seq.num_tokens)
            if num_cached is None:
                return
            self._enter(entry, waiter, match, num_cached)
            self._plan_row(plan, entry, self._todo(entry))

    def _hold_back(self, plan: StepPlan, waiter: Waiter, entry: Entry, match: PrefixMatch) -> bool:
        """Whether another sequence is computing the very block that this one needs first."""
        index = len(match.blocks)
        if index >= len(entry.keys) or entry.keys[index] not in self._prefixes:
            return False
        return self._waiting.hold(waiter, index, plan.step, self.limits.max_prefix_delay)

    def _fits(self, entry: Entry, match: PrefixMatch) -> bool:
        """Room for its tokens so far, and for what all are expected to write from now on."""
        cost = self.blocks.cost(match, entry.seq.num_tokens)
        predicted = self._forecast.blocks_in_the_end(entry.seq)
        growth = max(predicted - self.blocks.blocks_for(entry.seq.num_tokens), 0)
        growth += self._forecast.growth
        if cost + growth <= self.blocks.num_free:
            return True
        if self._running:
            return False
        self.blocks.unpin_all()
        return self.blocks.cost(match, entry.seq.num_tokens) <= self.blocks.num_free

    def _enter(self, entry: Entry, waiter: Waiter, match: PrefixMatch, num_cached: int) -> None:
        seq = entry.seq
        node = waiter.node
        if node is not None and node.pin is None and 0 < node.depth <= len(match.blocks):
            node.pin = self.blocks.pin(match.blocks[: node.depth])
        self._unpin(self._waiting.take(seq.seq_id))
        self._running[seq.seq_id] = entry
        if seq.status is SequenceStatus.WAITING:
            seq.num_cached_tokens = min(num_cached, seq.num_prompt_tokens)
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = num_cached
        self.counts.cache_queries += seq.num_tokens
        self.counts.cache_hits += num_cached
        self._forecast.enter(entry)
        self._prefixes.announce(entry, self.blocks.num_committed(seq.seq_id))

    def _unpin(self, handles: list[int]) -> None:
        for handle in handles:
            self.blocks.unpin(handle)
