"""A toy language model that really reads its KV cache: what the host half is tested against.

The next token is a hash of all tokens so far, read slot by slot through the block table. A wrong
block, a missing token, a slot overwritten by somebody else: each gives another answer than
`oracle`, which needs no cache. `ToyRunner` also checks what it is told: rows it knows, tables that
are long enough, writes that no other live row can see, shared prefixes that are really shared.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from headrace.engine.batch import NewRow, SampledTokens, ScheduledBatch
from headrace.engine.engine import Engine, EngineLimits
from headrace.engine.errors import Failure
from headrace.engine.kv.block_manager import BlockManager
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.scheduler import Scheduler, SchedulerLimits
from headrace.engine.sequence import Sequence
from headrace.engine.stats import StepOutput

EOS = 257
VOCAB = 260
SPECIAL = {"<bos>": 256, "<eos>": EOS, "<end>": 258, "<pad>": 259}


class ToyTokenizer:
    """Ids 0 to 255 are bytes; the rest are special tokens without text."""

    vocab_size = VOCAB
    special_token_ids = SPECIAL

    def text_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.text_bytes, ids)).decode("utf-8", errors="replace")


NextToken = Callable[[list[int], SamplingParams, int, int], int]


def hash_token(tokens: list[int], params: SamplingParams, seed: int, sample_index: int) -> int:
    """The toy model. `params` and `seed` count only where they would for a real one."""
    noise = b"" if params.greedy else f"{params.seed or seed}/{sample_index}".encode()
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    return int.from_bytes(blake2b(data + noise, digest_size=8).digest(), "little") % VOCAB


def sample(
    model: NextToken,
    tokens: list[int],
    num_prompt: int,
    params: SamplingParams,
    seed: int,
    sample_index: int,
    forbidden: Iterable[int],
) -> int:
    token = model(tokens, params, seed, sample_index)
    if len(tokens) - num_prompt < params.min_tokens:
        while token in set(forbidden):
            token = (token + 1) % VOCAB
    return token


def oracle(
    seq: Sequence, model: NextToken = hash_token, eos: tuple[int, ...] = (EOS,), room: int = 10**9
) -> list[int]:
    """The output tokens that a sequence must get, without a cache, a batch or a scheduler.

    Stop strings are not looked at.
    """
    params = seq.params
    outputs: list[int] = []
    limit = min(room, params.max_tokens if params.max_tokens is not None else room)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    while len(outputs) < limit:
        tokens = seq.prompt_token_ids + outputs
        size = seq.num_prompt_tokens
        token = sample(model, tokens, size, params, seq.seed, seq.sample_index, ends)
        outputs.append(token)
        if token in ends and len(outputs) >= params.min_tokens:
            break
    return outputs


class Violation(BaseException):
    """The runner was told something impossible. No Exception: the engine must not catch it and take
    it for a fault of the device."""


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


@dataclass
class _Row:
    new: NewRow
    tokens: list[int]
    table: list[int] = field(default_factory=list)


class _Handle:
    def __init__(self, runner: "ToyRunner", batch: ScheduledBatch) -> None:
        self._runner = runner
        self.batch = batch
        self.tokens: SampledTokens | None = None

    def result(self) -> SampledTokens:
        self._runner.compute_up_to(self)
        assert self.tokens is not None
        return self.tokens


class ToyRunner:
    """Executes batches in order, but only when their tokens are asked for, as a device would.

    `fault(batch)` may raise, as a device does, in the middle of a step, and `refuse(batch)` when it
    is launched; `nan(seq_id, tokens)` names
    rows whose logits are not finite.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        model: NextToken = hash_token,
        fault: Callable[[ScheduledBatch], None] | None = None,
        nan: Callable[[int, list[int]], bool] | None = None,
        refuse: Callable[[ScheduledBatch], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self.model = model
        self.fault = fault
        self.nan = nan
        self.refuse = refuse
        self.slots: dict[int, list[int | None]] = {
            block: [None] * block_size for block in range(num_blocks)
        }
        self.rows: dict[int, _Row] = {}
        self.batches: list[ScheduledBatch] = []
        self.num_computed = 0
        self._pending: list[_Handle] = []

    def execute(self, batch: ScheduledBatch) -> _Handle:
        if self.refuse is not None:
            self.refuse(batch)
        handle = _Handle(self, batch)
        self._check_new_blocks(batch)
        self._pending.append(handle)
        self.batches.append(batch)
        return handle

    def compute_up_to(self, handle: _Handle) -> None:
        while handle.tokens is None:
            first = self._pending.pop(0)
            try:
                first.tokens = self._compute(first.batch)
            except Exception:
                self._pending.clear()
                raise

    def _check_new_blocks(self, batch: ScheduledBatch) -> None:
        """A block handed out as new must not be one that a step in flight still uses, unless it
        is shared, which is to say that its content is there already."""
        used: set[int] = set()
        for handle in self._pending:
            entering = {new.seq_id for new in handle.batch.added}
            for row in handle.batch.rows:
                used.update(row.new_block_ids)
                if row.seq_id in self.rows and row.seq_id not in entering:
                    used.update(self.rows[row.seq_id].table)
        added = {new.seq_id: new for new in batch.added}
        for row in batch.rows:
            new = added.get(row.seq_id)
            first = 0 if new is not None else self._table_length(row.seq_id)
            for index, block in enumerate(row.new_block_ids, first):
                start = index * self.block_size
                whole = new is not None and self.slots[block] == list(
                    new.token_ids[start : start + self.block_size]
                )
                if start + self.block_size > row.num_computed_tokens and not whole:
                    require(block not in used, f"block {block} is still used by a step in flight")

    def _table_length(self, seq_id: int) -> int:
        """With the blocks that steps in flight append."""
        length = len(self.rows[seq_id].table) if seq_id in self.rows else 0
        for handle in self._pending:
            if any(new.seq_id == seq_id for new in handle.batch.added):
                length = 0
            for row in handle.batch.rows:
                length += len(row.new_block_ids) if row.seq_id == seq_id else 0
        return length

    def _compute(self, batch: ScheduledBatch) -> SampledTokens:
        for seq_id in batch.removed:
            self.rows.pop(seq_id, None)
        for new in batch.added:
            require(new.seq_id not in self.rows, "a row was added twice")
            self.rows[new.seq_id] = _Row(new, list(new.token_ids))
        if self.fault is not None:
            self.fault(batch)
        try:
            return self._compute_rows(batch)
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error

    def _compute_rows(self, batch: ScheduledBatch) -> SampledTokens:
        before = self._written() if batch.prefix_groups else set()
        require(
            len({row.seq_id for row in batch.rows}) == len(batch.rows), "a sequence has two rows"
        )
        for scheduled in batch.rows:
            row = self.rows[scheduled.seq_id]
            row.table.extend(scheduled.new_block_ids)
            require(len(set(row.table)) == len(row.table), "a block stands twice in a table")
            require(all(block in self.slots for block in row.table), "a block beyond the pool")
        for scheduled in batch.rows:
            row = self.rows[scheduled.seq_id]
            for position in range(scheduled.num_computed_tokens):
                token = self._read(row, position)
                require(token == row.tokens[position], "what counts as computed is something else")
        for scheduled in batch.rows:
            start, count = scheduled.num_computed_tokens, scheduled.num_scheduled_tokens
            self._write(scheduled.seq_id, start, count)
        self._check_groups(batch, before)
        tokens: dict[int, list[int]] = {}
        failures: dict[int, Failure] = {}
        for scheduled in batch.rows:
            row = self.rows[scheduled.seq_id]
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            require(
                scheduled.samples == (end == len(row.tokens)), "samples must mean the last token"
            )
            read = [self._read(row, position) for position in range(end)]
            if not scheduled.samples:
                continue
            if self.nan is not None and self.nan(scheduled.seq_id, row.tokens):
                failures[scheduled.seq_id] = Failure("numerical_error", "logits are not finite")
                row.tokens.append(0)
                continue
            new = row.new
            token = sample(
                self.model,
                read,
                new.num_prompt_tokens,
                new.params,
                new.seed,
                new.sample_index,
                new.eos_token_ids,
            )
            row.tokens.append(token)
            tokens[scheduled.seq_id] = [token]
        return SampledTokens(tokens, {}, failures)

    def _written(self) -> set[tuple[int, int]]:
        return {
            (block, slot)
            for block, slots in self.slots.items()
            for slot, token in enumerate(slots)
            if token is not None
        }

    def _write(self, seq_id: int, start: int, count: int) -> None:
        row = self.rows[seq_id]
        require(count > 0, "a row without tokens")
        self.num_computed += count
        for position in range(start, start + count):
            block = row.table[position // self.block_size]
            slot = position % self.block_size
            token = row.tokens[position]
            if self.slots[block][slot] != token:
                for other_id, other in self.rows.items():
                    if other_id != seq_id and block in other.table:
                        raise Violation(f"{seq_id} overwrites block {block} of {other_id}")
            self.slots[block][slot] = token

    def _read(self, row: _Row, position: int) -> int:
        token = self.slots[row.table[position // self.block_size]][position % self.block_size]
        require(token is not None, "a slot is read that nobody has written")
        return token

    def _check_groups(self, batch: ScheduledBatch, before: set[tuple[int, int]]) -> None:
        starts = {row.seq_id: row.num_computed_tokens for row in batch.rows}
        seen: set[int] = set()
        for group in batch.prefix_groups:
            require(
                len(group.seq_ids) > 1 and group.num_shared_blocks > 0, "a group without company"
            )
            require(not seen.intersection(group.seq_ids), "a row in two groups")
            seen.update(group.seq_ids)
            tables = [self.rows[seq_id].table for seq_id in group.seq_ids]
            shared = tables[0][: group.num_shared_blocks]
            require(len(shared) == group.num_shared_blocks, "a group beyond a table")
            require(
                all(table[: len(shared)] == shared for table in tables),
                "a group that does not share",
            )
            for seq_id in group.seq_ids:
                require(
                    len(shared) * self.block_size <= starts[seq_id],
                    "a group ends after what is computed now begins",
                )
            for block in shared:
                require(
                    all((block, slot) in before for slot in range(self.block_size)),
                    "a group's block is not computed",
                )


def toy_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int | None = None,
    max_prefix_delay: int = 8,
    expected_output: float | None = None,
    prefix_caching: bool = True,
    deduplicate: bool = False,
    steps_in_flight: int = 0,
    eos: tuple[int, ...] = (EOS,),
    **runner: object,
) -> Engine:
    """An engine over a ToyRunner (its `runner` attribute). `expected_output`: what the predictor
    believes at first; a small one makes the scheduler admit too much, so that it must preempt."""
    capacity = num_blocks * block_size
    limits = EngineLimits(
        max_model_len=min(max_model_len or capacity, capacity),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=VOCAB,
    )
    scheduler = Scheduler(
        SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_prefix_delay),
        BlockManager(num_blocks, block_size, prefix_caching),
    )
    if expected_output is not None:
        scheduler.predictor.average = expected_output
    return Engine(
        scheduler,
        ToyRunner(num_blocks, block_size, **runner),  # type: ignore[arg-type]
        ToyTokenizer(),
        limits,
        eos_token_ids=eos,
        deduplicate=deduplicate,
        steps_in_flight=steps_in_flight,
    )


def greedy(prompt: Iterable[int], max_tokens: int | None = 8, **params: object) -> Sequence:
    settings: dict[str, object] = {"temperature": 0.0, "max_tokens": max_tokens, **params}
    return Sequence("r", list(prompt), SamplingParams(**settings))  # type: ignore[arg-type]


def run(engine: Engine, sequences: Iterable[Sequence], max_steps: int = 10_000) -> list[Sequence]:
    """Add all, step until nothing is left, checking the books after every step."""
    for seq in sequences:
        engine.add(seq)
    return drain(engine, max_steps)


def step(engine: Engine) -> StepOutput:
    """One step, then the books are checked. A Violation fails the test as an assertion does."""
    try:
        output = engine.step()
    except Violation as violation:
        raise AssertionError(str(violation)) from violation
    engine.check_integrity()
    return output


def drain(engine: Engine, max_steps: int = 10_000) -> list[Sequence]:
    ended: list[Sequence] = []
    for _ in range(max_steps):
        if not engine.has_unfinished:
            engine.check_integrity()
            return ended
        ended.extend(step(engine).finished)
    raise AssertionError(f"not done after {max_steps} steps")
