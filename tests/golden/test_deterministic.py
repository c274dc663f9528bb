"""Deterministic mode: one distinct answer, to the bit of every logit, whatever else is going on.

The same requests run alone, together, in chunks, behind a shared prefix that is computed once, out
of a pool so tight that sequences are preempted, and cut in half and resumed. What is compared is
the bytes of all logits that a token was chosen from, and of its log-probabilities.
"""

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import EngineError
from headrace.engine.loading.source import resolve_model
from headrace.engine.sampler import Sampled
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence

BLOCK = 16
SCHEMES = (None, "int8-dynamic")

Bits = list[tuple[int, bytes]]
"""Of one sequence: each token with the bytes of its logits."""


class Watched:
    """An engine whose logits are kept: for each request, what each of its tokens came from."""

    def __init__(self, model: Path, quantization: str | None, **settings: Any) -> None:
        settings = {"deterministic": True, "num_threads": 1, **settings}
        self.engine = Engine.load(
            EngineConfig(
                str(model),
                dtype="float32",
                quantization=quantization,
                deduplicate=False,
                **settings,
            )
        )
        self.hits = self.preemptions = self.most_tokens = self.groups = 0
        self._bits: dict[int, Bits] = defaultdict(list)
        runner: Any = self.engine.runner
        self._rows = runner._rows
        self._sample = runner._sampler.sample
        runner._sampler.sample = self._keep
        self._prefixes = self._rows._prefixes
        self._rows._prefixes = self._count

    def _keep(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> Sampled:
        bits = [row.numpy().tobytes() for row in logits]
        sampled: Sampled = self._sample(logits, slots)
        owners = {slot: seq_id for seq_id, slot in self._rows._slots.items()}
        for slot, token, row in zip(slots.tolist(), sampled.token_ids.tolist(), bits, strict=True):
            self._bits[owners[slot]].append((token, row))
        return sampled

    def _count(self, groups: Any, rows: Any) -> Any:
        found = self._prefixes(groups, rows)
        self.groups += len(found)
        return found

    def run(self, waves: Seq[Seq[Sequence]]) -> list[tuple[Bits, list[Any]]]:
        """Each wave at once, the next when it has ended; bits and log-probabilities of each."""
        self._bits.clear()
        for wave in waves:
            for seq in wave:
                self.engine.add(seq)
            while self.engine.has_unfinished:
                stats = self.engine.step().stats
                self.hits += stats.prefix_cache_hits
                self.preemptions += stats.num_preemptions
                self.most_tokens = max(self.most_tokens, stats.num_scheduled_tokens)
        sequences = [seq for wave in waves for seq in wave]
        assert [seq.failure for seq in sequences] == [None] * len(sequences)
        for seq in sequences:
            tokens = [token for token, _ in self._bits[seq.seq_id]]
            assert seq.output_token_ids[len(seq.output_token_ids) - len(tokens) :] == tokens
        return [(self._bits[seq.seq_id], seq.logprobs) for seq in sequences]


def prompts(vocab: int) -> list[list[int]]:
    """Ten of 3 to 190 tokens. Six share 119: seven whole blocks, which end inside a chunk of 64
    keys, so that a prefix which is not cut there would be summed in another order."""
    head = [(11 * index + 5) % vocab for index in range(119)]
    tails = [[(index * 7 + k * 13) % vocab for k in range(9 * index + 2)] for index in range(6)]
    own = [[(index * 31 + k * k) % vocab for k in range(3 + 62 * index)] for index in range(4)]
    return [head + tail for tail in tails] + own


def sequences(
    texts: Seq[Seq[int]], tokens: int, salts: bool = False, done: Seq[Seq[int]] = ()
) -> list[Sequence]:
    """Greedy and drawn ones in turn. `salts`: nobody finds another's prefix; `done`: outputs that
    an earlier worker has generated."""
    made = []
    for index, text in enumerate(texts):
        params = SamplingParams(tokens, temperature=0.8 * (index % 2), ignore_eos=True)
        if index % 3 == 0:
            params = replace(params, logprobs=3)
        if index % 4 == 1:
            params = replace(params, top_p=0.9)
        seq = Sequence(str(index), list(text), params, seed=index)
        seq.salt = f"{index}".encode() if salts else b""
        if done:
            seq.output_token_ids = list(done[index])
        made.append(seq)
    return made


def distinct(*runs: list[tuple[Bits, list[Any]]]) -> list[int]:
    """How many different answers each request got."""
    found = []
    for answers in zip(*runs, strict=True):
        keys = {(repr(bits), repr(logprobs)) for bits, logprobs in answers}
        found.append(len(keys))
    return found


def pool(config: dict[str, Any], blocks: int, quantization: str | None) -> int:
    """Bytes; beside int8 activations keys and values are int8 too, with a scale a head."""
    head_dim = config["head_dim"]
    head = head_dim + 4 if quantization == "int8-dynamic" else 4 * head_dim
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    return int((blocks + 1) * BLOCK * token)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("llama", None), ("llama", "int8-dynamic"), ("mistral", None), ("qwen3", "int4-g64")],
)
def test_an_answer_has_the_same_bits_in_every_batch(
    family: str, quantization: str | None, tmp_path: Path
) -> None:
    """Mistral: a window of 24, so that tiles begin at other keys than 0."""
    model = tiny.write_checkpoint(tmp_path / "model", family, seed=1)
    texts, tokens = prompts(256), 12
    config = tiny.tiny_config(family)
    roomy = pool(config, 400, None)
    plain = Watched(
        *(model, quantization),
        kv_cache_memory_bytes=roomy,
        enable_prefix_caching=False,
        enable_shared_prefix_attention=False,
    )
    alone = plain.run([[seq] for seq in sequences(texts, tokens)])
    mixed = plain.run([sequences(texts, tokens)])
    chunked = Watched(
        *(model, quantization),
        max_num_seqs=7,
        max_num_batched_tokens=33,
        kv_cache_memory_bytes=roomy,
        enable_prefix_caching=False,
    )
    chunks = chunked.run([sequences(texts, tokens)[::-1]])[::-1]
    assert chunked.most_tokens <= 33
    shared = Watched(model, quantization, kv_cache_memory_bytes=roomy)
    behind = shared.run([sequences(texts, tokens)])
    again = shared.run([sequences(texts, tokens)])
    assert shared.hits > 5 * 112
    assert shared.groups > 0
    tight = Watched(
        model,
        quantization,
        kv_cache_memory_bytes=pool(config, 16, quantization),
        max_num_batched_tokens=256,
    )
    scheduler: Any = tight.engine._scheduler
    scheduler.predictor.average = 1.0
    wanted = sequences(texts, tokens)
    for seq in wanted:  # answers that may end early are admitted on a guess
        seq.params = replace(seq.params, stop=("\x01never\x02",))
    squeezed = tight.run([wanted])
    assert tight.preemptions > 0
    assert distinct(alone, mixed, chunks, behind, again, squeezed) == [1] * len(texts)
    for bits, _ in alone:
        assert len(bits) == tokens


@pytest.mark.parametrize("quantization", SCHEMES)
def test_what_is_resumed_half_way_goes_on_with_the_same_bits(
    quantization: str | None, tmp_path: Path
) -> None:
    """The second worker computes the answer so far in one chunk, with others in the batch."""
    model = tiny.write_checkpoint(tmp_path / "model", seed=2)
    texts, tokens = prompts(256), 40
    first = Watched(model, quantization, kv_cache_memory_bytes=64 << 20)
    whole = first.run([[seq] for seq in sequences(texts, tokens, salts=True)])
    done = [[token for token, _ in bits[: 5 + 3 * i]] for i, (bits, _) in enumerate(whole)]
    second = Watched(
        model, quantization, kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=300
    )
    halves = sequences(texts, tokens, done=done)
    rest = second.run([halves])
    for (bits, _), (later, _), kept in zip(whole, rest, done, strict=True):
        assert later == bits[len(kept) :]


def test_without_the_mode_bits_depend_on_the_batch(tmp_path: Path) -> None:
    """So the comparison above sees what it is for: a prefix of seven blocks ends inside a chunk of
    keys, and what was summed before is rescaled after other groups of keys. For that scores must
    differ by more than a factor of 2**8: the queries are 40 times as large as usual."""
    model = tiny.write_checkpoint(tmp_path / "model", seed=1)
    (path,) = model.glob("*.safetensors")
    weights = load_file(path)
    steep = [name for name in weights if name.endswith("q_proj.weight")]
    weights.update((name, 40 * weights[name]) for name in steep)
    save_file(weights, path, metadata={"format": "pt"})
    texts = prompts(256)
    found = []
    for deterministic in (False, True):
        watched = Watched(model, None, kv_cache_memory_bytes=64 << 20, deterministic=deterministic)
        alone = watched.run([[seq] for seq in sequences(texts, 12, salts=True)])
        behind = watched.run([sequences(texts, 12)])
        found.append(max(distinct(alone, behind)))
    assert steep
    assert found == [2, 1]


@pytest.mark.parametrize("quantization", SCHEMES)
def test_smollm2_answers_with_the_same_bits_alone_and_in_a_crowd(quantization: str | None) -> None:
    """One engine, two threads: alone with a prefix cache that finds nothing, then all at once in
    chunks of 160 tokens behind a prefix of 112."""
    model = resolve_model("smollm2-135m-instruct")
    texts = [text for text in prompts(40000) if len(text) < 140]
    watched = Watched(
        *(model, quantization),
        num_threads=2,
        kv_cache_memory_bytes=128 << 20,
        max_num_seqs=16,
        max_num_batched_tokens=160,
    )
    alone = watched.run([[seq] for seq in sequences(texts, 4, salts=True)])
    watched.hits = 0
    crowd = watched.run([sequences(texts, 4)])
    assert watched.hits > 0
    assert watched.groups > 0
    assert distinct(alone, crowd) == [1] * len(texts)


def test_a_backend_that_cannot_hold_the_promise_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.write_checkpoint(tmp_path / "model")
    monkeypatch.setenv("HEADRACE_BACKEND", "torch")
    with pytest.raises(EngineError, match="deterministic=True runs on compiled kernels"):
        Engine.load(EngineConfig(str(model), deterministic=True))
    Engine.load(EngineConfig(str(model), kv_cache_memory_bytes=1 << 20))
