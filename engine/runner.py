"""Executes scheduled batches on one device: weights, KV pool and rows live here.

The device half's one door. Knows no queue, no text and no scheduling policy.
"""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine import fingerprint
from headrace.engine.batch import NewRow, SampledTokens, ScheduledBatch, ScheduledRow, StepHandle
from headrace.engine.config import EngineConfig, with_float_type
from headrace.engine.errors import EngineError
from headrace.engine.fingerprint import Fingerprint
from headrace.engine.input_batch import InputBatch, StepInputs
from headrace.engine.kv.cache import KVCache, allocate
from headrace.engine.layers.backend import Backend
from headrace.engine.layers.choose import choose_backend
from headrace.engine.loading.checkpoint import Checkpoint
from headrace.engine.loading.source import open_checkpoint, resolve_model
from headrace.engine.machine import (
    available_threads,
    choose_cuda_dtype,
    choose_device,
    choose_dtype,
)
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.decoder import Decoder, load_decoder
from headrace.engine.quant.kv import resolved
from headrace.engine.quant.method import AnyMethod
from headrace.engine.sampler import Sampled, Sampler
from headrace.engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What runs, in words, so that nobody takes a slow path without knowing."""

    device: str
    attention: str
    matmul: str
    graphs: str

    def __str__(self) -> str:
        return (
            f"{self.device}; attention: {self.attention}; matmul: {self.matmul};"
            f" CUDA graphs: {self.graphs}"
        )


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose tokens are there already: on a CPU, launching is computing."""

    tokens: SampledTokens

    def result(self) -> SampledTokens:
        return self.tokens


class ModelRunner:
    """One loaded model with its KV pool.

    `num_blocks`: ids 0 to num_blocks - 1 are the scheduler's; `vocab_size`: ids that can be
    sampled; `fingerprint`: of weights, types, code and machine, so equal ones compute alike.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        decoder: Decoder,
        backend: Backend,
        cache: KVCache,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.load_seconds = decoder.load_seconds
        self.num_blocks = cache.num_blocks
        self.block_size = cache.block_size
        self.max_model_len = max_model_len
        self.vocab_size = decoder.vocab_size
        self.model_name = config.served_model_name or default_model_name(config.model)
        self.default_sampling: dict[str, Any] = dict(checkpoint.default_sampling)
        self.eos_token_ids = tuple(
            token for token in checkpoint.eos_token_ids if token < decoder.vocab_size
        )
        self.dtype = str(dtype).removeprefix("torch.")
        self.quantization = decoder.quantization
        self.backend_name = backend.name
        self.steps_in_flight = 0
        self.kv_cache_bytes = cache.bytes_per_block * (cache.num_blocks + 1)
        self.kv_bytes_per_token = cache.bytes_per_block // cache.block_size
        self.weight_memory = decoder.weight_memory()
        self.fingerprint = Fingerprint(
            *(checkpoint.fingerprint, self.dtype, self.quantization, config.kv_cache_dtype),
            *(backend.name, fingerprint.cpu(torch.get_num_threads()), config.deterministic),
        )
        self._decoder = decoder
        self._backend = backend
        self._cache = cache
        self._device = device
        self._rows = InputBatch(
            config.max_num_seqs, max_model_len, cache.block_size, cache.dummy_block
        )
        self._sampler = Sampler(self._rows, one_by_one=config.deterministic)

    @property
    def info(self) -> RunnerInfo:
        names = {"cpu": "compiled CPU kernels", "torch": "plain torch (slow)"}
        return RunnerInfo(
            device=str(self._device),
            attention=names.get(self.backend_name, self.backend_name),
            matmul="torch" if self.quantization == "none" else self.quantization,
            graphs="none (no CUDA device)",
        )

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepHandle:
        """Compute the batch's tokens, store their keys and values, sample the rows that ask for it
        and append what was sampled to their rows."""
        self._rows.update(batch)
        if not batch.rows:
            return FinishedStep(SampledTokens({}))
        inputs = self._rows.step_inputs(batch)
        hidden = self._hidden(inputs, inputs.output_rows)
        if not len(inputs.output_rows):
            return FinishedStep(SampledTokens({}))
        sampled = self._sampler.sample(self._decoder.logits(hidden).cpu(), inputs.sampled_slots)
        return FinishedStep(self._appended(inputs, sampled))

    def logits(self, token_ids: Seq[int], chunk: int = 512) -> Tensor:
        """Float32 logits [len(token_ids), vocab_size] after each token, for evaluation.

        Runs through the same rows, chunks and KV pool as serving; takes the first blocks of the
        pool, so no sequence may be running.
        """
        return torch.cat([piece.cpu() for piece in self.logits_in_chunks(token_ids, chunk)])

    def logits_in_chunks(
        self, token_ids: Seq[int], chunk: int = 512, first: int = 0
    ) -> Iterator[Tensor]:
        """The same from position `first` on, at most `chunk` rows at a time."""
        if len(self._rows):
            raise EngineError("logits needs an idle runner")
        if not 0 < len(token_ids) <= min(self.max_model_len, self.num_blocks * self.block_size):
            raise EngineError(f"{len(token_ids)} tokens do not fit into the model or the KV pool")
        seq_id = -1
        added: Seq[NewRow] = (
            NewRow(seq_id, token_ids, len(token_ids), SamplingParams(), 0, 0, ()),
        )
        try:
            for start in range(0, len(token_ids), chunk):
                end = min(start + chunk, len(token_ids))
                blocks = range(-(-start // self.block_size), -(-end // self.block_size))
                row = ScheduledRow(seq_id, start, end - start, blocks, samples=False)
                batch = ScheduledBatch(0, added, (), (row,))
                added = ()
                with torch.inference_mode():
                    self._rows.update(batch)
                    inputs = self._rows.step_inputs(batch)
                    if end > first:
                        wanted = np.arange(max(first - start, 0), end - start)
                        logits = self._decoder.logits(self._hidden(inputs, wanted))
                    else:  # only keys and values are needed; the least that a step can be asked for
                        self._hidden(inputs, np.arange(1))
                if end > first:
                    yield logits
        finally:
            self._rows.update(ScheduledBatch(0, (), (seq_id,), ()))

    def warm_up(self) -> None:
        """Run a short prompt and two decode steps, so that the first request pays for no kernel
        that is compiled or loaded on first use. Uses block 0; call it before any sequence."""
        self._warm_up_with(SamplingParams(temperature=1.0, top_p=0.9, logprobs=1))

    def _warm_up_with(self, params: SamplingParams) -> None:
        seq_id = -1
        prompt = [index % self.vocab_size for index in range(min(self.block_size, 16) - 3)]
        row = NewRow(seq_id, prompt, len(prompt), params, 0, 0, ())
        steps: Seq[tuple[int, int, Seq[int]]] = (
            (0, len(prompt), (0,)),
            (len(prompt), 1, ()),
            (len(prompt) + 1, 1, ()),
        )
        for index, (computed, scheduled, blocks) in enumerate(steps):
            rows = (ScheduledRow(seq_id, computed, scheduled, blocks, samples=True),)
            self.execute(ScheduledBatch(index, (row,) if index == 0 else (), (), rows)).result()
        self.execute(ScheduledBatch(len(steps), (), (seq_id,), ()))

    def _hidden(self, inputs: StepInputs, output_rows: NDArray[np.int64]) -> Tensor:
        return self._decoder.hidden(
            torch.from_numpy(inputs.token_ids).to(self._device),
            self._cache.layers,
            self._backend.prepare(inputs.attention),
            torch.from_numpy(output_rows).to(self._device),
        )

    def _appended(self, inputs: StepInputs, sampled: Sampled) -> SampledTokens:
        """Append the tokens to their rows; rows that failed get none."""
        seq_ids, slots, tokens = inputs.sampled_seq_ids, inputs.sampled_slots, sampled.token_ids
        good = list(range(len(seq_ids)))
        if sampled.failures:
            good = [index for index in good if index not in sampled.failures]
        self._rows.append(slots[good], tokens[good])
        values = tokens.tolist()
        return SampledTokens(
            {seq_ids[index]: [values[index]] for index in good},
            {seq_ids[index]: [found] for index, found in sampled.logprobs.items()},
            {seq_ids[index]: failure for index, failure in sampled.failures.items()},
        )


def load_runner(config: EngineConfig) -> ModelRunner:
    """Load `config.model`, measure memory, allocate the KV pool.

    CheckpointError: the model's files; EngineError: a setting that this machine cannot serve.
    """
    return build_runner(config, open_checkpoint(resolve_model(config.model)))


def build_runner(config: EngineConfig, checkpoint: Checkpoint) -> ModelRunner:
    """A runner for a checkpoint that is open already, `loading.random_weights` makes one without
    files; `config.model` only names it. Errors as in `load_runner`."""
    config = with_float_type(config)
    device = choose_device(config.device)
    if config.tensor_parallel_size != 1:
        raise EngineError("tensor_parallel_size above 1 is not supported")
    on_cuda = device.type == "cuda"
    torch.set_num_threads(config.num_threads or available_threads())
    model = checkpoint.config
    if on_cuda:
        torch.cuda.set_device(device)
        capability = torch.cuda.get_device_capability(device)
        dtype = choose_cuda_dtype(config.dtype, model.dtype, capability)
    else:
        dtype = choose_dtype(config.dtype, model.dtype)
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len < 2:
        raise EngineError("max_model_len 1 has no room for a prompt and an answer; give 2 or more")
    if max_model_len > _longest(model):
        raise EngineError(
            f"max_model_len {max_model_len} is beyond the {_longest(model)} positions that the"
            " model supports"
        )
    weight_dtype = dtype
    with torch.inference_mode():
        backend = choose_backend(config, model, max_model_len, dtype, device)
        if config.deterministic and backend.name == "torch":
            raise EngineError(
                "deterministic=True runs on compiled kernels only (on a CPU: numba, and heads and"
                " blocks of multiples of 16); here it would be plain torch"
            )
        # The CPU's kernels compute in float32; 16-bit weights stay 16 bits wide in the matmuls.
        dtype = backend.dtype
        on_kernels = backend.name == "triton"
        plain = _batch_invariant() if config.deterministic and on_kernels else None
        decoder = load_decoder(
            *(checkpoint, backend, dtype, device, config.quantization, weight_dtype, plain),
            fixed_rows=config.deterministic and not on_kernels,
        )
    if on_kernels:
        from headrace.engine.accelerator import CudaAccelerator, HostAccelerator
        from headrace.engine.device_loading import device_runner

        if config.deterministic and decoder.quantization != "none":
            raise EngineError(
                f"deterministic=True is not supported with {decoder.quantization} layers on this"
                " device; quantization='float' runs them as floats"
            )
        accelerator = CudaAccelerator(device) if on_cuda else HostAccelerator()
        triton: Any = backend
        return device_runner(config, checkpoint, decoder, triton, max_model_len, accelerator)
    kv_type = resolved(config.kv_cache_dtype, decoder.quantization, backend.name)
    config = replace(config, kv_cache_dtype=kv_type)
    with torch.inference_mode():
        cache = allocate(config, model, backend, dtype, device)
    max_model_len = cache.longest(config, max_model_len)
    runner = ModelRunner(
        config, checkpoint, decoder, backend, cache, max_model_len, weight_dtype, device
    )
    logger.info("%s", runner.info)
    return runner


def _batch_invariant() -> AnyMethod:
    from headrace.engine.quant.batch_invariant import BatchInvariant

    return BatchInvariant()


def default_model_name(model: str) -> str:
    """Last part of the path, without `.gguf`, lower-case."""
    name = Path(model).name
    return (name[:-5] if name.lower().endswith(".gguf") else name).lower()


def _longest(model: ModelConfig) -> int:
    """Positions that the rope table may be asked for."""
    if model.rope.rope_type == "dynamic":
        return int(model.max_position_embeddings * model.rope.factor)
    return model.max_position_embeddings
