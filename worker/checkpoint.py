"""A job's progress, so that another worker goes on after the last token instead of starting over.

What is kept: the generated token ids of each answer (never changed afterwards), the sampler's
position (the noise is a function of seed, sample index and position, so the count of tokens is all
of its state), and the fingerprint of model, quantization and tokenizer together with a hash of the
prompt's ids. Whatever does not match starts the job over. Text is not kept: detokenizing and
matching stop strings run again over the kept ids, so that a stop string across the cut still stops.
Nothing here knows Redis.
"""

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.engine.sequence import FinishReason, Sequence, SequenceStatus, TokenLogprobs

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of a checkpoint: `tokens` output tokens taken over, or why it starts over."""

    tokens: int = 0
    started_over: str | None = None


def save(sequences: Seq[Sequence], fingerprint: str) -> bytes | None:
    """The checkpoint of one job's sequences; None while there is no token worth keeping.

    May be called while another thread runs the engine: the lists only grow, and a length is taken
    once for each.
    """
    answers = []
    for sequence in sequences:
        ids = list(sequence.output_token_ids)
        if sequence.params.logprobs is not None:
            entries = list(sequence.logprobs)[: len(ids)]
            ids = ids[: len(entries)]
        else:
            entries = []
        answer: dict[str, Any] = {"i": sequence.sample_index, "t": ids, "at": len(ids)}
        if entries:
            answer["lp"] = [[e.token_id, e.logprob, e.top] for e in entries]
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            answer["end"] = [sequence.finish_reason.value, sequence.stop_reason, sequence.text]
        answers.append(answer)
    if not any(answer["t"] for answer in answers):
        return None
    document = {
        "v": FORMAT,
        "fp": fingerprint,
        "p": _prompt_hash(sequences[0].prompt_token_ids),
        "a": answers,
    }
    return orjson.dumps(document)


def restore(blob: bytes, sequences: Seq[Sequence], fingerprint: str) -> Restored:
    """Fill fresh sequences with what an earlier worker generated: all of them, or none.

    A sequence that had ended comes back finished and must not be added to an engine.
    """
    try:
        document = orjson.loads(blob)
        reason = _mismatch(document, sequences, fingerprint)
        if reason is not None:
            return Restored(started_over=reason)
        prepared = [_read(answer, s) for answer, s in zip(document["a"], sequences, strict=True)]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return Restored(started_over="the checkpoint cannot be read")
    for sequence, (ids, logprobs, end) in zip(sequences, prepared, strict=True):
        sequence.output_token_ids = ids
        sequence.logprobs = logprobs
        if end is not None:
            sequence.finish_reason, sequence.stop_reason, sequence.text = end
            sequence.status = SequenceStatus.FINISHED
    return Restored(tokens=sum(len(s.output_token_ids) for s in sequences))


def _mismatch(document: Any, sequences: Seq[Sequence], fingerprint: str) -> str | None:
    if document["v"] != FORMAT:
        return f"the checkpoint is of format {document['v']}, not {FORMAT}"
    if document["fp"] != fingerprint:
        return "the checkpoint was made with another model, quantization or tokenizer"
    if document["p"] != _prompt_hash(sequences[0].prompt_token_ids):
        return "the prompt has other tokens than when the checkpoint was made"
    if [answer["i"] for answer in document["a"]] != [s.sample_index for s in sequences]:
        return "the checkpoint holds other answers than the request asks for"
    return None


_End = tuple[FinishReason, str | int | None, str]


def _read(
    answer: dict[str, Any], sequence: Sequence
) -> tuple[list[int], list[TokenLogprobs], _End | None]:
    ids = answer["t"]
    if answer["at"] != len(ids) or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("token ids and the sampler's position disagree")
    logprobs = [
        TokenLogprobs(token, value, tuple((other, p) for other, p in top))
        for token, value, top in answer.get("lp", ())
    ]
    if sequence.params.logprobs is not None and len(logprobs) != len(ids):
        raise ValueError("log-probabilities are missing")
    end = answer.get("end")
    return ids, logprobs, (FinishReason(end[0]), end[1], end[2]) if end else None


def _prompt_hash(token_ids: Seq[int]) -> str:
    return hashlib.blake2b(orjson.dumps(list(token_ids)), digest_size=12).hexdigest()
