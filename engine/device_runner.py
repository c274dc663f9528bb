"""Executes batches on a device that computes while the host goes on.

A step is launched and its tokens are read when they are asked for; the next step may be launched
before. So what a step needs of the one before stays on the device: the last token of each row, the
block tables, the counts of penalties. The host knows how many tokens a row has, not which. Decodes
replay a captured graph; a step with a prompt in it is launched kernel by kernel.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.accelerator import Accelerator, Mark
from headrace.engine.batch import NewRow, SampledTokens, ScheduledBatch, StepHandle
from headrace.engine.config import EngineConfig
from headrace.engine.device_sampler import DeviceSampler, SamplingStep, sampling_fields
from headrace.engine.graphs import CUDAGraphRunner, GraphReport, graph_sizes
from headrace.engine.input_batch import StepInputs
from headrace.engine.kv.cache import KVCache
from headrace.engine.layers.backend import AttentionMetadata, SharedPrefix
from headrace.engine.layers.prompt_attention import (
    NEVER,
    PromptLengths,
    StepRows,
    divide,
)
from headrace.engine.layers.triton_backend import TritonBackend, TritonPlan, prefix_arrays
from headrace.engine.loading.checkpoint import Checkpoint
from headrace.engine.models.decoder import Decoder
from headrace.engine.runner import FinishedStep, ModelRunner, RunnerInfo
from headrace.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from headrace.engine.step_buffers import Array, OutputBuffer, Stage, StepBuffer, StepOutputs
from headrace.kernels.shared_prefix_attention import PrefixGroups

logger = logging.getLogger(__name__)

GRAPH_GROUPS = 16
"""Groups with a shared prefix that a captured graph has room for; the ones that save most stay."""

_TABLE_STEP = 16  # widths of block tables: few, so that few variants of a kernel are compiled


@dataclass(frozen=True, slots=True)
class _Launch:
    """A step as the device will see it. `size`: rows with padding; `graph`: replay the captured
    one; `decode`: every row has one token, the last one; `attention`: whose kernel takes which row;
    `longest`: tokens of the longest row."""

    stage: Stage
    arrays: dict[str, Tensor]
    sampling: SamplingStep
    outputs: StepOutputs
    rows: int
    size: int
    graph: bool
    decode: bool
    num_groups: int
    num_members: int
    attention: StepRows
    longest: int
    longest_prefix: int


class DeviceStep:
    """A step that was launched; `result` waits for the device, once."""

    def __init__(
        self, mark: Mark, launch: _Launch, sampler: DeviceSampler, seq_ids: list[int]
    ) -> None:
        self._mark = mark
        self._launch = launch
        self._sampler = sampler
        self._seq_ids = seq_ids
        self._found: SampledTokens | None = None

    def result(self) -> SampledTokens:
        if self._found is None:
            self._mark.wait()
            launch, ids = self._launch, self._seq_ids
            tokens, failures, logprobs = self._sampler.read(launch.sampling, launch.outputs)
            self._found = SampledTokens(
                {ids[row]: [token] for row, token in enumerate(tokens) if row not in failures},
                {ids[row]: [found] for row, found in logprobs.items()},
                {ids[row]: failure for row, failure in failures.items()},
            )
        return self._found


class DeviceRunner(ModelRunner):
    """A ModelRunner whose steps are computed by a TritonBackend on an Accelerator."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        decoder: Decoder,
        backend: TritonBackend,
        cache: KVCache,
        max_model_len: int,
        dtype: torch.dtype,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(
            config, checkpoint, decoder, backend, cache, max_model_len, dtype, accelerator.device
        )
        self.steps_in_flight = 1 if config.async_scheduling else 0
        described = accelerator.description.replace(" ", "_")
        self.fingerprint = replace(
            self.fingerprint, backend=f"{backend.name}-{described}", processor=described
        )
        rows, device = config.max_num_seqs, accelerator.device
        self._accelerator = accelerator
        self._max_rows = rows
        self._deterministic = config.deterministic
        self._shared_tokens = backend.shared_tokens
        self._prompt_lengths = backend.prompt_lengths
        self._fresh: list[NewRow] = []
        # One row more than sequences: padding reads and writes that one and the dummy block.
        width = -(-max_model_len // cache.block_size)
        width = -(-width // _TABLE_STEP) * _TABLE_STEP
        self._tables = torch.full(
            (rows + 1, width), cache.dummy_block, dtype=torch.int32, device=device
        )
        self._last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._buffer = StepBuffer(
            accelerator,
            {
                "slots": (np.int64, rows),
                "positions": (np.int64, rows),
                "kv_slots": (np.int64, rows),
                "context_lens": (np.int32, rows),
                "query_starts": (np.int32, rows + 1),
                "group_offsets": (np.int32, rows // 2 + GRAPH_GROUPS + 1),
                "group_members": (np.int32, rows),
                "prefix_lens": (np.int32, rows),
                **sampling_fields(rows),
            },
        )
        self._outputs = OutputBuffer(accelerator, rows, MAX_LOGPROBS)
        self._device_sampler = DeviceSampler(self._rows, decoder.vocab_size, device)
        self._graphs: CUDAGraphRunner | None = None
        self._graph_report = GraphReport(reason="enforce_eager")
        if not config.enforce_eager:
            self._capture(config)

    @property
    def info(self) -> RunnerInfo:
        attention = "Triton paged attention"
        if self._deterministic:
            attention += ", fixed splits"
        elif self._shared_tokens < NEVER:
            attention += f", shared prefixes read once from {self._shared_tokens} tokens a row on"
        if self._prompt_lengths != PromptLengths():
            attention += f", {self._prompt_lengths}"
        matmul = "batch-invariant Triton" if self._deterministic else "cuBLAS"
        if self._accelerator.device.type == "cpu":
            matmul = "batch-invariant Triton" if self._deterministic else "torch on the CPU"
        if self.quantization != "none":
            matmul = f"{self.quantization} layers, {matmul} elsewhere"
        return RunnerInfo(
            device=self._accelerator.description,
            attention=attention,
            matmul=matmul,
            graphs=str(self._graph_report),
        )

    def execute(self, batch: ScheduledBatch) -> StepHandle:
        """Launch the batch; nothing here waits for the device."""
        self._rows.update(batch)
        gone = set(batch.removed)
        self._fresh = [row for row in self._fresh if row.seq_id not in gone]
        self._fresh.extend(batch.added)
        if not batch.rows:
            return FinishedStep(SampledTokens({}))
        inputs = self._rows.step_inputs(batch, with_tables=False)
        launch = self._prepare(inputs)
        self._accelerator.submit(lambda: self._compute(launch))
        mark = self._accelerator.mark()
        launch.stage.sent(mark)
        self._fresh = []
        self._rows.advance(inputs.sampled_slots)
        return DeviceStep(mark, launch, self._device_sampler, inputs.sampled_seq_ids)

    def warm_up(self) -> None:
        """As ModelRunner's; and once each kernel that only some requests' sampling needs."""
        super().warm_up()
        several = SamplingParams(
            temperature=1.0,
            top_k=5,
            min_tokens=2,
            logprobs=2,
            repetition_penalty=1.1,
            logit_bias={0: 1.0},
        )
        for params in (SamplingParams(temperature=0.0), several):
            self._warm_up_with(params)

    # --- the host's part ----------------------------------------------------------------------

    def _prepare(self, inputs: StepInputs) -> _Launch:
        attention = inputs.attention
        count, num_sampled = len(inputs.row_slots), len(inputs.sampled_slots)
        num_tokens = len(inputs.token_ids)
        decode = count == num_tokens == num_sampled
        graph_size = self._graphs.size_for(count) if decode and self._graphs is not None else None
        size = graph_size or count
        rows = divide(attention.query_starts, attention.context_lens, self._prompt_lengths)
        stage = self._buffer.begin()
        host = stage.host
        host["slots"][:count] = inputs.row_slots
        host["query_starts"][: count + 1] = attention.query_starts
        host["context_lens"][:count] = rows.context_lens
        arrays = self._row_arrays(inputs)
        if decode:
            host["positions"][:count] = attention.positions
            host["kv_slots"][:count] = attention.slots
            self._pad(host, count, size)
        else:
            arrays.update(self._prompt_arrays(inputs))
        groups = self._write_groups(host, attention, size, limit=graph_size is not None)
        sampling = self._device_sampler.plan(inputs.sampled_slots, self._fresh, host)
        arrays.update(sampling.arrays)
        return _Launch(
            stage=stage,
            arrays=stage.pack(arrays),
            sampling=sampling,
            outputs=self._outputs.begin(),
            rows=count,
            size=size,
            graph=graph_size is not None,
            decode=decode,
            num_groups=groups[0],
            num_members=groups[1],
            attention=rows,
            longest=int(attention.context_lens.max()),
            longest_prefix=groups[2],
        )

    def _row_arrays(self, inputs: StepInputs) -> dict[str, Array]:
        """Changes of what the device remembers of rows: blocks that were appended to tables, and
        the last token of new rows."""
        arrays: dict[str, Array] = {}
        if inputs.new_blocks:
            lengths = [len(blocks) for _, _, blocks in inputs.new_blocks]
            slots = [slot for slot, _, _ in inputs.new_blocks]
            arrays["table_rows"] = np.repeat(np.array(slots, dtype=np.int64), lengths)
            arrays["table_columns"] = np.concatenate(
                [np.arange(start, start + len(ids)) for _, start, ids in inputs.new_blocks]
            )
            arrays["table_blocks"] = np.concatenate(
                [np.asarray(ids, dtype=np.int32) for _, _, ids in inputs.new_blocks]
            )
        if self._fresh:
            arrays["fresh_slots"] = np.array(
                [self._rows.slot_of(row.seq_id) for row in self._fresh], dtype=np.int64
            )
            arrays["fresh_tokens"] = np.array(
                [row.token_ids[-1] for row in self._fresh], dtype=np.int64
            )
        return arrays

    def _prompt_arrays(self, inputs: StepInputs) -> dict[str, Array]:
        """A step's tokens, one by one; those of rows that decode are filled in on the device."""
        starts = inputs.attention.query_starts
        single = np.flatnonzero(np.diff(starts) == 1)
        single = single[np.isin(starts[1:][single] - 1, inputs.output_rows)]
        return {
            "token_ids": inputs.token_ids,
            "token_positions": inputs.attention.positions,
            "token_slots": inputs.attention.slots,
            "output_rows": inputs.output_rows,
            "decode_tokens": starts[single].astype(np.int64),
            "decode_slots": inputs.row_slots[single],
        }

    def _pad(self, host: dict[str, Array], count: int, size: int) -> None:
        """Rows `count` to `size`: one token each, no context, into the dummy block."""
        host["slots"][count:size] = self._max_rows
        host["positions"][count:size] = 0
        host["kv_slots"][count:size] = self._cache.dummy_block * self.block_size
        host["context_lens"][count:size] = 0
        host["query_starts"][count + 1 : size + 1] = np.arange(count + 1, size + 1)

    def _write_groups(
        self, host: dict[str, Array], attention: AttentionMetadata, size: int, limit: bool
    ) -> tuple[int, int, int]:
        """(groups, members, longest prefix) of the step; a graph has room for few groups."""
        prefixes = [] if self._deterministic else attention.prefixes
        if limit:
            prefixes = most_saving(prefixes, GRAPH_GROUPS)
        count = len(attention.context_lens)
        found = prefix_arrays(prefixes, count, self.block_size, self._shared_tokens)
        if found is None:
            return 0, 0, 0
        offsets, members, lens, longest = found
        host["group_offsets"][: len(offsets)] = offsets
        host["group_offsets"][len(offsets) :] = offsets[-1]
        host["group_members"][: len(members)] = members
        host["group_members"][len(members) : size] = 0
        host["prefix_lens"][:count] = lens
        host["prefix_lens"][count:size] = 0
        return len(offsets) - 1, len(members), longest

    # --- the device's part --------------------------------------------------------------------

    @torch.inference_mode()
    def _compute(self, launch: _Launch) -> None:
        arrays, fields = launch.arrays, self._buffer.device
        launch.stage.send()
        if "table_rows" in arrays:
            at = (arrays["table_rows"], arrays["table_columns"])
            self._tables.index_put_(at, arrays["table_blocks"])
        if "fresh_slots" in arrays:
            self._last_tokens.index_copy_(0, arrays["fresh_slots"], arrays["fresh_tokens"])
        self._device_sampler.update_counts(launch.sampling, arrays)
        if launch.graph and self._graphs is not None:
            hidden = self._graphs.replay(launch.size, launch.num_groups > 0)[: launch.rows]
        elif launch.decode:
            groups = self._groups(launch)
            hidden = self._decode(launch.rows, launch.longest, groups)
        else:
            hidden = self._mixed(launch)
        if not launch.sampling.count:
            return
        logits = self._decoder.raw_logits(hidden)
        tokens = self._device_sampler.sample(
            logits, launch.sampling, fields, arrays, launch.outputs
        )
        self._last_tokens.index_copy_(0, fields["sampled_slots"][: launch.sampling.count], tokens)

    def _decode(self, rows: int, longest: int, groups: PrefixGroups | None) -> Tensor:
        """Hidden states of rows with one token each, from the fixed fields."""
        fields = self._buffer.device
        slots = fields["slots"][:rows]
        plan = TritonPlan(
            positions=fields["positions"][:rows],
            slots=fields["kv_slots"][:rows],
            query_starts=fields["query_starts"][: rows + 1],
            context_lens=fields["context_lens"][:rows],
            block_tables=self._tables_of(slots, longest),
            max_query_len=1,
            max_context_len=longest,
            groups=groups,
        )
        token_ids = self._last_tokens.index_select(0, slots)
        return self._decoder.hidden(token_ids, self._cache.layers, plan, slice(None))

    def _mixed(self, launch: _Launch) -> Tensor:
        """Hidden states of the sampled rows of a step with prompts in it."""
        fields, arrays = self._buffer.device, launch.arrays
        decoding = self._last_tokens.index_select(0, arrays["decode_slots"])
        token_ids = arrays["token_ids"].index_copy_(0, arrays["decode_tokens"], decoding)
        plan = TritonPlan(
            positions=arrays["token_positions"],
            slots=arrays["token_slots"],
            query_starts=fields["query_starts"][: launch.rows + 1],
            context_lens=fields["context_lens"][: launch.rows],
            block_tables=self._tables_of(fields["slots"][: launch.rows], launch.longest),
            max_query_len=launch.attention.longest_query,
            max_context_len=launch.attention.longest,
            groups=self._groups(launch),
            prompts=launch.attention.prompts,
        )
        return self._decoder.hidden(token_ids, self._cache.layers, plan, arrays["output_rows"])

    def _tables_of(self, slots: Tensor, longest: int) -> Tensor:
        width = -(-longest // self.block_size)
        width = min(-(-width // _TABLE_STEP) * _TABLE_STEP, self._tables.shape[1])
        return self._tables[:, :width].index_select(0, slots)

    def _groups(self, launch: _Launch) -> PrefixGroups | None:
        if not launch.num_groups:
            return None
        fields = self._buffer.device
        return PrefixGroups(
            fields["group_offsets"][: launch.num_groups + 1],
            fields["group_members"][: launch.num_members],
            fields["prefix_lens"][: launch.rows],
            launch.longest_prefix,
        )

    # --- graphs -------------------------------------------------------------------------------

    def _capture(self, config: EngineConfig) -> None:
        graphs = CUDAGraphRunner(
            self._accelerator,
            graph_sizes(self._max_rows),
            self._captured_decode,
            shared=config.enable_shared_prefix_attention
            and not config.deterministic
            and self._shared_tokens < NEVER,
        )
        host = self._buffer.begin()
        self._pad(host.host, 0, self._max_rows)
        host.host["query_starts"][0] = 0
        host.host["group_offsets"][:] = 0
        host.host["prefix_lens"][:] = 0
        self._accelerator.submit(host.send)
        host.sent(self._accelerator.mark())
        self._graph_report = graphs.capture()
        self._graphs = graphs

    @torch.inference_mode()
    def _captured_decode(self, rows: int, shared: bool) -> Tensor:
        """What a graph of `rows` rows records: bounds that hold for every replay."""
        groups = None
        if shared:
            fields = self._buffer.device
            groups = PrefixGroups(
                fields["group_offsets"][: GRAPH_GROUPS + 1],
                fields["group_members"][:rows],
                fields["prefix_lens"][:rows],
                self.max_model_len,
            )
        return self._decode(rows, self.max_model_len, groups)


def most_saving(prefixes: Seq[SharedPrefix], limit: int) -> list[SharedPrefix]:
    """At most `limit` of the groups: those that spare the most reads of blocks."""
    saved = [(len(prefix.rows) - 1) * prefix.num_blocks for prefix in prefixes]
    best: NDArray[np.intp] = np.argsort(-np.array(saved), kind="stable")[:limit]
    return [prefixes[index] for index in sorted(best.tolist())]
