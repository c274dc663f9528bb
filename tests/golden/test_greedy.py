"""Greedy tokens equal Transformers', through the whole engine, whatever the engine does meanwhile.

Four switches, each pair of settings in at least one run: large or small batch, prompts whole or in
chunks, prefix cache (with shared-prefix attention) on or off, a roomy or a tight KV pool (tight:
sequences are preempted and recomputed). Each run asserts that what it is about really happened.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from oracle import OracleAnswer, check_against, greedy_answers, load_oracle

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.loading.source import resolve_model
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values:FutureWarning")

BLOCK = 16
TOKENS = 24


@dataclass(frozen=True)
class Run:
    batch: bool
    chunks: bool
    prefixes: bool
    tight: bool

    def __str__(self) -> str:
        names = {"batch": self.batch, "chunks": self.chunks}
        names |= {"prefixes": self.prefixes, "tight": self.tight}
        return "+".join(name for name, on in names.items() if on) or "plain"


PAIRWISE = (
    Run(False, False, False, False),
    Run(True, True, True, False),
    Run(True, True, False, True),
    Run(True, False, True, True),
    Run(False, True, True, True),
)


def answers(
    model: Path, run: Run, prompts: list[list[int]], block_bytes: int, tight_blocks: int = 0
) -> list[list[int]]:
    longest = max(map(len, prompts)) + TOKENS
    # Tight: little more room than the longest sequence takes, while several run.
    blocks = tight_blocks or -(-longest // BLOCK) + 1
    if not run.tight:
        blocks = 40 * len(prompts)
    engine = Engine.load(
        EngineConfig(
            str(model),
            dtype="float32",
            max_num_seqs=32 if run.batch else 4,
            max_num_batched_tokens=32 if run.chunks else 4096,
            enable_prefix_caching=run.prefixes,
            kv_cache_memory_bytes=(blocks + 1) * block_bytes,
            deduplicate=False,
            num_threads=1,
        )
    )
    params = SamplingParams(TOKENS, temperature=0, ignore_eos=True)
    if run.tight:
        # Answers that may end early are admitted on a guess; a low one makes the pool run full.
        params = replace(params, stop=("\x01never\x02",))
        engine._scheduler.predictor.average = 1.0
    sequences = [Sequence(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    for seq in sequences:
        engine.add(seq)
    hits = preemptions = most_running = most_tokens = 0
    while engine.has_unfinished:
        stats = engine.step().stats
        hits += stats.prefix_cache_hits
        preemptions += stats.num_preemptions
        most_running = max(most_running, stats.num_running)
        most_tokens = max(most_tokens, stats.num_scheduled_tokens)
        engine.check_integrity()
    assert [seq.failure for seq in sequences] == [None] * len(sequences)
    assert (preemptions > 0) == run.tight
    assert (most_tokens <= 32) == run.chunks
    assert (most_running > 4) == run.batch or run.tight
    if run.prefixes:
        assert hits > 0
    else:
        assert hits <= sum(map(len, prompts)) * run.tight
    return [seq.output_token_ids for seq in sequences]


def check_all(
    model: Path,
    run: Run,
    prompts: list[list[int]],
    expected: list[OracleAnswer],
    block_bytes: int,
    tight_blocks: int = 0,
) -> None:
    compared = 0
    found = answers(model, run, prompts, block_bytes, tight_blocks)
    for index, (answer, tokens) in enumerate(zip(expected, found, strict=True)):
        compared += check_against(answer, tokens, f"prompt {index}, {run}")
    assert compared > 0.8 * TOKENS * len(prompts), "most decisions must be comparable"


def block_bytes(layers: int, kv_heads: int, head_dim: int) -> int:
    return BLOCK * 2 * layers * kv_heads * head_dim * 4


def tiny_prompts() -> list[list[int]]:
    """Twelve prompts of 3 to 110 tokens; eight begin with the same 70."""
    head = [(11 * index + 5) % 256 for index in range(70)]
    tails = [[(index * 7 + k * 13) % 256 for k in range(5 * index + 3)] for index in range(8)]
    own = [[(index * 31 + k * k) % 256 for k in range(3 + 30 * index)] for index in range(4)]
    return [head + tail for tail in tails] + own


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def tiny_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[OracleAnswer], int]:
    family = request.param
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp(family) / "model", family, seed=1)
    head_dim = tiny.tiny_config(family)["head_dim"]
    expected = greedy_answers(load_oracle(folder), tiny_prompts(), TOKENS)
    return folder, expected, block_bytes(2, 2, head_dim)


@pytest.mark.parametrize("run", PAIRWISE, ids=str)
def test_tiny_models_answer_as_transformers(
    run: Run, tiny_model: tuple[Path, list[OracleAnswer], int]
) -> None:
    folder, expected, size = tiny_model
    check_all(folder, run, tiny_prompts(), expected, size)


SYSTEM = (
    "You are a careful assistant of a travel agency. You answer in one or two plain sentences, you"
    " never invent prices, and you name the country when you name a city. Today the office is open"
    " from nine to five, and questions about refunds go to the desk on the second floor."
)
QUESTIONS = (
    *("What is the capital of France?", "Name a river in Egypt.", "How do tides work?"),
    *("Write a haiku about rain.", "Is a tomato a fruit?", "What is 17 + 25?"),
    *("Who wrote Hamlet?", "Explain gravity to a child.", "Give me a synonym of happy."),
    *("What colour is the sky on Mars?", "How many days has a leap year?", "What is RNA?"),
    *("Suggest a name for a cat.", "Why do cats purr?", "How far is the moon?", "What is tea?"),
)


def chat_prompts(tokenizer: Any) -> list[list[int]]:
    """Sixteen questions behind one long system prompt and sixteen behind none."""
    prompts = []
    for system in (SYSTEM, None):
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return prompts


@pytest.fixture(scope="module")
def demo_model() -> tuple[Path, list[list[int]], list[OracleAnswer]]:
    from headrace.engine.tokenizer import load_tokenizer

    path = resolve_model("smollm2-135m-instruct")
    prompts = chat_prompts(load_tokenizer(path))
    assert len(prompts) == 32
    return path, prompts, greedy_answers(load_oracle(path), prompts, TOKENS)


@pytest.mark.model
@pytest.mark.parametrize("run", (PAIRWISE[1], PAIRWISE[3]), ids=str)
def test_the_demo_model_answers_as_transformers(
    run: Run, demo_model: tuple[Path, list[list[int]], list[OracleAnswer]]
) -> None:
    """32 prompts. Transformers reads the GGUF file itself, so an error of our conversion shows."""
    path, prompts, expected = demo_model
    check_all(path, run, prompts, expected, block_bytes(30, 3, 64), tight_blocks=60)
