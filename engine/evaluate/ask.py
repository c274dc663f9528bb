"""Puts questions to a loaded engine: all texts in one continuous batch, greedy; choices by the
probability that the model gives to each.

Probabilities are read through the first blocks of the engine's KV pool, so they come before its
batch; the engine is not to be used for anything else afterwards."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.engine.batch import ScheduledBatch
from headrace.engine.engine import Engine
from headrace.engine.errors import RequestError
from headrace.engine.evaluate.answers import Answer
from headrace.engine.evaluate.loaded import Loaded
from headrace.engine.evaluate.questions import Question
from headrace.engine.evaluate.score import Score
from headrace.engine.evaluate.scorers import Choice, Scorer
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import FinishReason
from headrace.engine.sequence import Sequence as EngineSequence

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """`seconds`: of the batch of texts alone, choices left out."""

    answers: list[Answer]
    seconds: float
    output_tokens: int


def ask(
    loaded: Loaded, questions: Sequence[Question], progress: Progress = lambda _: None
) -> Asked:
    """One answer a question, in their order. `progress` is told how many are done."""
    engine = loaded.engine
    answers: dict[str, Answer] = {}
    for question in questions:
        if isinstance(question.scorer, Choice):
            answers[question.id] = _choose(loaded, question, question.scorer)
            progress(len(answers))
    started = time.perf_counter()
    running: dict[int, tuple[Question, Scorer]] = {}
    ended: list[int] = []
    for question in questions:
        scorer = question.scorer
        if isinstance(scorer, Choice):
            continue
        params = SamplingParams(temperature=0.0, max_tokens=question.max_tokens)
        try:
            seq = EngineSequence(question.id, prompt_ids(engine, question), params)
            engine.add(seq)
        except RequestError as error:
            answers[question.id] = _failed(question, error.message)
        else:
            running[seq.seq_id] = question, scorer
    tokens = 0
    while engine.has_unfinished:
        for seq in engine.step().finished:
            question, scorer = running.pop(seq.seq_id)
            ended.append(seq.seq_id)
            tokens += len(seq.output_token_ids)
            answers[question.id] = _scored(question, scorer, seq)
        progress(len(answers))
    seconds = time.perf_counter() - started
    # The scheduler names ended rows in its next batch, and there is none.
    engine.runner.execute(ScheduledBatch(0, (), tuple(ended), ()))
    return Asked([answers[question.id] for question in questions], seconds, tokens)


def prompt_ids(engine: Engine, question: Question) -> list[int]:
    """The question as the model reads it. A model without a chat template gets the messages' texts
    with blank lines between them."""
    tokenizer = engine.tokenizer
    ids: list[int]
    if question.prompt is not None:
        ids = tokenizer.encode(question.prompt)
    elif tokenizer.has_chat_template:
        ids = tokenizer.apply_chat_template(question.messages)
    else:
        contents = [message["content"] for message in question.messages]
        ids = tokenizer.encode("\n\n".join([*contents, ""]))
    return ids


def _scored(question: Question, scorer: Scorer, seq: EngineSequence) -> Answer:
    if seq.finish_reason is FinishReason.FAILED:
        return _failed(question, seq.failure.message if seq.failure else "no reason given")
    reason = seq.finish_reason.value if seq.finish_reason else ""
    score = scorer.score(seq.text)
    ids = tuple(seq.output_token_ids)
    return Answer(question.id, question.category, score, seq.text, ids, reason)


def _failed(question: Question, message: str) -> Answer:
    score = Score.of(False, f"no answer: {message}")
    return Answer(question.id, question.category, score, failure=message)


def _choose(loaded: Loaded, question: Question, choice: Choice) -> Answer:
    try:
        prompt = prompt_ids(loaded.engine, question)
        logprobs = [
            continuation_logprob(loaded, prompt, loaded.engine.tokenizer.encode(text, False))
            for text in choice.choices
        ]
    except RequestError as error:
        return _failed(question, error.message)
    score = choice.score(logprobs)
    listed = zip(choice.choices, logprobs, strict=True)
    text = ", ".join(f"{text!r} {value:.2f}" for text, value in listed)
    return Answer(question.id, question.category, score, text)


def continuation_logprob(loaded: Loaded, prompt: list[int], continuation: list[int]) -> float:
    """Natural-log probability that the model goes on after `prompt` with exactly `continuation`."""
    longest = loaded.engine.limits.max_model_len
    tokens = [*prompt, *continuation]
    if len(tokens) > longest:
        raise RequestError(
            "prompt_too_long",
            f"question and choice have {len(tokens)} tokens, the model takes {longest}",
        )
    total, position = 0.0, len(prompt)
    for logits in loaded.runner.logits_in_chunks(tokens[:-1], first=len(prompt) - 1):
        wanted = torch.tensor(tokens[position : position + len(logits)], device=logits.device)
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        total += float(logprobs.gather(1, wanted[:, None]).sum())
        position += len(logits)
    return total
