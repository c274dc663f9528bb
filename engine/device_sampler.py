"""From logits to tokens on the device: the settings of all rows go there with the step's inputs.

The rules are those of `headrace.engine.sampler`: logit_bias, penalties, min_tokens, the optional
bitmask; then temperature, top_k, top_p, min_p, and one number for each row that is a pure function
of (seed, sample index, position). What penalties count is kept on the device, so that no token need
come back to the host before the next one is drawn. Knows no model and no scheduler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.batch import NewRow
from headrace.engine.errors import Failure
from headrace.engine.input_batch import InputBatch
from headrace.engine.sampler import NON_FINITE, NOTHING_ALLOWED
from headrace.engine.sequence import TokenLogprobs
from headrace.engine.step_buffers import Array, Fields, StepOutputs
from headrace.kernels.logprobs import token_logprobs
from headrace.kernels.penalties import count_tokens, penalize
from headrace.kernels.sampling import NON_FINITE as STATUS_NON_FINITE
from headrace.kernels.sampling import OK, sample


@dataclass(frozen=True, slots=True)
class SamplingStep:
    """What the host knows of a step's sampling. `count` rows; `filtered`: one of those that draw
    has top_k, top_p or min_p; `changed` [count]: rows whose logits are not the model's own;
    `asking`: rows that want logprobs, `wanted` how many each; `num_counts`: rows of counts that
    penalties need by now. `arrays` go to the device."""

    count: int
    filtered: bool
    changed: NDArray[np.bool_]
    asking: NDArray[np.int64]
    wanted: NDArray[np.int64]
    num_counts: int
    arrays: dict[str, Array]


def sampling_fields(rows: int) -> Fields:
    """The fixed fields of a step's inputs that sampling reads."""
    return {
        "sampled_slots": (np.int64, rows),
        "temperature": (np.float32, rows),
        "top_k": (np.int64, rows),
        "top_p": (np.float32, rows),
        "min_p": (np.float32, rows),
        "seed": (np.int64, rows),
        "sample_index": (np.int64, rows),
        "sampled_position": (np.int64, rows),
    }


class DeviceSampler:
    """`plan` runs on the host when a step is launched, `sample` on the device, in order."""

    def __init__(self, rows: InputBatch, vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._device = device
        self._num_counts = 0
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def plan(
        self, slots: NDArray[np.int64], fresh: Sequence[NewRow], host: Mapping[str, Array]
    ) -> SamplingStep:
        """Write the fixed fields of the rows in `slots`. `fresh`: rows that are new in this step,
        whether they are sampled or not."""
        rows, settings = self._rows, self._rows.sampling
        count = len(slots)
        arrays = self._fresh_counts(fresh)
        temperature = settings.temperature[slots]
        host["sampled_slots"][:count] = slots
        host["temperature"][:count] = temperature
        host["top_k"][:count] = settings.top_k[slots]
        host["top_p"][:count] = settings.top_p[slots]
        host["min_p"][:count] = settings.min_p[slots]
        host["seed"][:count] = settings.seed[slots].view(np.int64)
        host["sample_index"][:count] = settings.sample_index[slots].view(np.int64)
        host["sampled_position"][:count] = rows.num_tokens[slots]
        filters = (settings.top_k[slots] > 0) | (settings.top_p[slots] < 1)
        filters |= settings.min_p[slots] > 0

        biased = settings.biased[slots]
        if biased.any():
            found = [settings.bias[slot] for slot in slots[biased]]
            arrays["bias_rows"] = _repeated(np.flatnonzero(biased), [ids for ids, _ in found])
            arrays["bias_ids"] = np.concatenate([ids for ids, _ in found])
            arrays["bias_values"] = np.concatenate([values for _, values in found])
        penalized = settings.penalized[slots]
        if penalized.any():
            theirs = slots[penalized]
            arrays["penalty_rows"] = np.flatnonzero(penalized)
            arrays["penalty_slots"] = theirs
            arrays["repetition"] = settings.repetition_penalty[theirs]
            arrays["frequency"] = settings.frequency_penalty[theirs]
            arrays["presence"] = settings.presence_penalty[theirs]
        outputs = rows.num_tokens[slots] - rows.num_prompt_tokens[slots]
        short = outputs < settings.min_tokens[slots]
        if short.any():
            banned = [
                ids[ids < self._vocab_size]
                for ids in map(settings.banned.__getitem__, slots[short])
            ]
            arrays["banned_rows"] = _repeated(np.flatnonzero(short), banned)
            arrays["banned_ids"] = np.concatenate(banned)
        wants = settings.logprobs[slots]
        asking = np.flatnonzero(wants >= 0)
        if len(asking):
            arrays["asking"] = asking
        return SamplingStep(
            count=count,
            filtered=bool((filters & (temperature > 0)).any()),
            changed=biased | penalized | short,
            asking=asking,
            wanted=wants[asking],
            num_counts=self._num_counts,
            arrays=arrays,
        )

    def update_counts(self, step: SamplingStep, arrays: Mapping[str, Tensor]) -> None:
        """On the device: what rows that are new and penalized have said so far."""
        if step.num_counts > len(self._counts):
            grown = torch.zeros(
                (step.num_counts, self._vocab_size), dtype=torch.int32, device=self._device
            )
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        if "cleared" in arrays:
            self._counts.index_fill_(0, arrays["cleared"], 0)
            count_tokens(self._counts, arrays["prompt_slots"], arrays["prompt_tokens"], prompt=True)
            count_tokens(self._counts, arrays["output_slots"], arrays["output_tokens"])

    def sample(
        self,
        logits: Tensor,
        step: SamplingStep,
        fields: Mapping[str, Tensor],
        arrays: Mapping[str, Tensor],
        outputs: StepOutputs,
        bitmask: Tensor | None = None,
    ) -> Tensor:
        """On the device: tokens int64 [rows], of logits [rows, at least vocab_size] in any float
        type; they, and what else the host wants to know, are also on their way to `outputs`."""
        count, vocab_size = step.count, self._vocab_size
        raw = logits
        if step.changed.any():
            logits = logits[:, :vocab_size].to(torch.float32, copy=True)
            self._change(logits, arrays)
        tokens, status = sample(
            logits,
            vocab_size=vocab_size,
            temperature=fields["temperature"][:count],
            top_k=fields["top_k"][:count],
            top_p=fields["top_p"][:count],
            min_p=fields["min_p"][:count],
            seed=fields["seed"][:count],
            sample_index=fields["sample_index"][:count],
            position=fields["sampled_position"][:count],
            bitmask=bitmask,
            filtered=step.filtered,
        )
        if "penalty_rows" in arrays:
            picked = tokens.index_select(0, arrays["penalty_rows"])
            count_tokens(self._counts, arrays["penalty_slots"], picked)
        outputs.tokens[:count].copy_(tokens, non_blocking=True)
        outputs.status[:count].copy_(status, non_blocking=True)
        if "asking" in arrays:
            self._logprobs(raw, tokens, step, arrays["asking"], outputs)
        return tokens

    def read(
        self, step: SamplingStep, outputs: StepOutputs
    ) -> tuple[list[int], dict[int, Failure], dict[int, TokenLogprobs]]:
        """On the host, when the step is done: tokens, and by row failures and logprobs."""
        tokens: list[int] = outputs.tokens[: step.count].tolist()
        status = outputs.status[: step.count].numpy()
        failures = {}
        for row in np.flatnonzero(status != OK).tolist():
            # A row of -inf that nobody has changed is the model's doing.
            wrong = status[row] == STATUS_NON_FINITE or not step.changed[row]
            failures[row] = NON_FINITE if wrong else NOTHING_ALLOWED
        logprobs = {}
        for index, (row, width) in enumerate(
            zip(step.asking.tolist(), step.wanted.tolist(), strict=True)
        ):
            if row in failures:
                continue
            ids = outputs.top_ids[index, :width].tolist()
            values = outputs.top_logprobs[index, :width].tolist()
            logprobs[row] = TokenLogprobs(
                tokens[row], float(outputs.logprobs[index]), tuple(zip(ids, values, strict=True))
            )
        return tokens, failures, logprobs

    def _change(self, logits: Tensor, arrays: Mapping[str, Tensor]) -> None:
        if "bias_rows" in arrays:
            at = (arrays["bias_rows"], arrays["bias_ids"])
            logits.index_put_(at, logits[at] + arrays["bias_values"])
        if "penalty_rows" in arrays:
            penalize(
                logits,
                arrays["penalty_rows"],
                self._counts,
                arrays["penalty_slots"],
                arrays["repetition"],
                arrays["frequency"],
                arrays["presence"],
            )
        if "banned_rows" in arrays:
            rows = arrays["banned_rows"]
            never = torch.full((len(rows),), -torch.inf, device=self._device)
            logits.index_put_((rows, arrays["banned_ids"]), never)

    def _logprobs(
        self,
        raw: Tensor,
        tokens: Tensor,
        step: SamplingStep,
        asking: Tensor,
        outputs: StepOutputs,
    ) -> None:
        num_top = min(int(step.wanted.max()), self._vocab_size)
        sampled, ids, values = token_logprobs(
            raw,
            asking,
            tokens.index_select(0, asking),
            vocab_size=self._vocab_size,
            num_top=num_top,
        )
        count = len(step.asking)
        outputs.logprobs[:count].copy_(sampled, non_blocking=True)
        if num_top:
            # Whole rows: a copy into a part of each would wait for the device.
            width = outputs.top_ids.shape[1]
            wide_ids = ids.new_zeros((count, width))
            wide_values = values.new_zeros((count, width))
            wide_ids[:, :num_top] = ids
            wide_values[:, :num_top] = values
            outputs.top_ids[:count].copy_(wide_ids, non_blocking=True)
            outputs.top_logprobs[:count].copy_(wide_values, non_blocking=True)

    def _fresh_counts(self, fresh: Sequence[NewRow]) -> dict[str, Array]:
        """The tokens of new rows with penalties, to be counted."""
        penalized = [row for row in fresh if row.params.penalized]
        if not penalized:
            return {}
        slots = np.array([self._rows.slot_of(row.seq_id) for row in penalized], dtype=np.int64)
        self._num_counts = max(self._num_counts, 1 << int(slots.max()).bit_length())
        prompts = [
            np.asarray(row.token_ids[: row.num_prompt_tokens], np.int64) for row in penalized
        ]
        outputs = [
            np.asarray(row.token_ids[row.num_prompt_tokens :], np.int64) for row in penalized
        ]
        return {
            "cleared": slots,
            "prompt_slots": _repeated(slots, prompts),
            "prompt_tokens": np.concatenate(prompts),
            "output_slots": _repeated(slots, outputs),
            "output_tokens": np.concatenate(outputs),
        }


def _repeated(values: NDArray[np.int64], parts: Sequence[Array]) -> NDArray[np.int64]:
    """Each value as often as its part is long."""
    return np.repeat(values, [len(part) for part in parts])
