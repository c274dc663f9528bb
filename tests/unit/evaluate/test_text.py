"""Perplexity, KL divergence and choices against Transformers on the same weights."""

import math
from pathlib import Path

import pytest
import torch
from oracle import load_oracle
from tiny import write_checkpoint

from headrace.engine.config import EngineConfig
from headrace.engine.evaluate import text as text_module
from headrace.engine.evaluate.ask import ask, continuation_logprob, prompt_ids
from headrace.engine.evaluate.loaded import Loaded
from headrace.engine.evaluate.questions import read_question
from headrace.engine.evaluate.text import TextReader, kl_divergence, windows

TEXT = "The ferry left the harbour at seven; 春天来得很晚. " * 4


def load(folder: Path, max_model_len: int | None = None) -> Loaded:
    return Loaded.load(
        EngineConfig(
            str(folder),
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 22,
            num_threads=1,
        )
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("two")
    return (
        write_checkpoint(root / "a", "llama", tie_word_embeddings=True),
        write_checkpoint(root / "b", "llama", seed=1, tie_word_embeddings=True),
    )


@torch.inference_mode()
def theirs(folder: Path, window: list[int]) -> torch.Tensor:
    """Float64 log-probabilities after each token but the last."""
    logits = load_oracle(folder)(torch.tensor([window])).logits[0, :-1]
    return torch.log_softmax(logits.double(), dim=-1)


@pytest.mark.parametrize("step", [512, 50])
def test_perplexity_and_divergence_equal_transformers(
    folders: tuple[Path, Path], step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in several windows, which begin anew."""
    monkeypatch.setattr(text_module, "WINDOW", step)
    first, second = map(load, folders)
    reader = TextReader(TEXT, 150, tmp_path)
    score = reader.first(first)
    other, distance = reader.second(second)
    pieces = windows(first, TEXT, 150)
    assert len(pieces) == -(-150 // step) and sum(map(len, pieces)) == 150
    p = torch.cat([theirs(folders[0], piece) for piece in pieces])
    q = torch.cat([theirs(folders[1], piece) for piece in pieces])
    targets = torch.tensor([token for piece in pieces for token in piece[1:]])
    for found, expected in ((score, p), (other, q)):
        nll = -expected.gather(1, targets[:, None]).mean()
        assert found.num_tokens == len(targets)
        assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
    # One token is one byte here: bits a byte are the mean in bits.
    assert score.bits_per_byte == pytest.approx(math.log2(score.perplexity))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(1)
    assert distance is not None
    assert distance.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert distance.kl_max == pytest.approx(float(kl.max()), rel=1e-3)
    assert distance.kl_median == pytest.approx(float(kl.quantile(0.5)), rel=1e-3)
    assert distance.top_agreement == pytest.approx(
        float((p.argmax(1) == q.argmax(1)).double().mean())
    )


def test_a_model_has_no_distance_from_itself(folders: tuple[Path, Path], tmp_path: Path) -> None:
    loaded = load(folders[0])
    reader = TextReader(TEXT, 100, tmp_path)
    score = reader.first(loaded)
    again, distance = reader.second(loaded)
    assert again == score and distance is not None
    assert distance.kl_max < 1e-9 and distance.top_agreement == 1.0


def test_models_with_other_tokens_have_perplexities_and_no_distance(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    wide = write_checkpoint(tmp_path / "wide", "llama", vocab_size=200)
    reader = TextReader("plain letters only, plain letters", 100, tmp_path)
    reader.first(load(folders[0]))
    score, distance = reader.second(load(wide))
    assert distance is None and score.perplexity > 1


def test_divergence_of_impossible_tokens() -> None:
    """What the reference rules out adds nothing; what only the candidate rules out is infinite."""
    p = torch.tensor([[0.5, 0.5, 0.0]]).log()
    q = torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert float(kl_divergence(p, q)) == pytest.approx(math.log(2))
    assert float(kl_divergence(q, p)) == math.inf


def test_choices_have_the_probabilities_that_transformers_gives_them(
    folders: tuple[Path, Path],
) -> None:
    loaded = load(folders[0])
    prompt, choice = list(b"Is it red or green? "), list(b"green")
    logprobs = theirs(folders[0], [*prompt, *choice])
    rows = range(len(prompt) - 1, len(prompt) + len(choice) - 1)
    expected = sum(float(logprobs[row, token]) for row, token in zip(rows, choice, strict=True))
    assert continuation_logprob(loaded, prompt, choice) == pytest.approx(expected, rel=1e-5)


def test_one_question_that_cannot_be_asked_is_wrong_and_the_others_are_answered(
    folders: tuple[Path, Path],
) -> None:
    loaded = load(folders[0], max_model_len=64)
    specs = [
        {"prompt": "x" * 100, "score": {"type": "regex", "pattern": ""}},
        {"prompt": "x" * 100, "score": {"type": "choice", "choices": ["a", "b"], "answer": 0}},
        {"prompt": "hello", "score": {"type": "regex", "pattern": ""}, "max_tokens": 4},
    ]
    questions = [read_question(spec, f"q{index}", 8) for index, spec in enumerate(specs)]
    long, choice, good = ask(loaded, questions).answers
    assert long.failure is not None and "100 tokens" in long.failure and not long.score.correct
    assert choice.failure is not None and "101 tokens" in choice.failure
    assert good.score.correct and 1 <= len(good.token_ids) <= 4
    # The engine is idle again.
    assert loaded.runner.logits([1, 2, 3]).shape == (3, 260)


def test_messages_go_through_the_chat_template_and_stand_alone_without_one(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    row = {
        "messages": [{"role": "user", "content": "hi"}],
        "score": {"type": "exact", "answer": "x"},
    }
    question = read_question(row, "q", 8)
    engine = load(folders[0]).engine
    assert engine.tokenizer.decode(prompt_ids(engine, question), False) == (
        "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    bare = load(write_checkpoint(tmp_path / "bare", "llama", chat_template=None)).engine
    assert bytes(prompt_ids(bare, question)) == b"hi\n\n"
