"""A checkpoint is taken over whole or not at all."""

import orjson
import pytest

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import FinishReason, Sequence, SequenceStatus, TokenLogprobs
from headrace.worker import checkpoint


def sequences(n: int = 1, prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> list[Sequence]:
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    return [Sequence("r", list(prompt), settings, sample_index=i) for i in range(n)]


def saved(n: int = 1, **params: object) -> bytes:
    running = sequences(n, **params)
    for index, sequence in enumerate(running):
        sequence.output_token_ids = [10 + index, 20 + index]
    blob = checkpoint.save(running, "fp")
    assert blob is not None
    return blob


def test_nothing_generated_is_nothing_to_keep() -> None:
    assert checkpoint.save(sequences(), "fp") is None


def test_tokens_go_on_where_they_were() -> None:
    fresh = sequences(2)
    restored = checkpoint.restore(saved(2), fresh, "fp")
    assert (restored.tokens, restored.started_over) == (4, None)
    assert [s.output_token_ids for s in fresh] == [[10, 20], [11, 21]]
    assert not any(s.finished for s in fresh)


def test_an_answer_that_had_ended_stays_ended() -> None:
    running = sequences(2)
    running[0].output_token_ids = [10]
    running[0].finish_reason, running[0].stop_reason = FinishReason.STOP, "END"
    running[0].text = "héllo"
    running[1].output_token_ids = [11, 12]
    blob = checkpoint.save(running, "fp")
    assert blob is not None
    fresh = sequences(2)
    assert checkpoint.restore(blob, fresh, "fp").tokens == 3
    assert fresh[0].status is SequenceStatus.FINISHED
    assert (fresh[0].text, fresh[0].stop_reason) == ("héllo", "END")
    assert not fresh[1].finished


def test_log_probabilities_go_with_their_tokens() -> None:
    running = sequences(logprobs=1)
    running[0].output_token_ids = [7, 8]
    # The engine's thread may have appended a token and not yet its log-probability.
    running[0].logprobs = [TokenLogprobs(7, -0.5, ((7, -0.5), (9, -1.0)))]
    blob = checkpoint.save(running, "fp")
    assert blob is not None
    fresh = sequences(logprobs=1)
    assert checkpoint.restore(blob, fresh, "fp").tokens == 1
    assert fresh[0].logprobs == running[0].logprobs


@pytest.mark.parametrize(
    ("fresh", "fingerprint"),
    [
        (sequences(1), "other"),
        (sequences(2), "fp"),
        (sequences(1, prompt=(1, 2, 4)), "fp"),
        (sequences(1, logprobs=0), "fp"),
    ],
)
def test_what_does_not_match_starts_over_and_says_so(
    fresh: list[Sequence], fingerprint: str
) -> None:
    restored = checkpoint.restore(saved(), fresh, fingerprint)
    assert restored.tokens == 0
    assert restored.started_over
    assert all(s.output_token_ids == [] for s in fresh)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"\x80\x04", b'{"v":1,"fp":"fp"}'])
def test_a_damaged_checkpoint_starts_over(damage: bytes) -> None:
    fresh = sequences()
    assert checkpoint.restore(damage, fresh, "fp").started_over
    assert fresh[0].output_token_ids == []


@pytest.mark.parametrize("change", [{"at": 3}, {"t": [1, -1]}, {"t": ["a", "b"]}, {"t": [True, 1]}])
def test_tokens_that_cannot_be_are_not_taken_over(change: dict[str, object]) -> None:
    document = orjson.loads(saved())
    document["a"][0].update(change)
    fresh = sequences()
    assert checkpoint.restore(orjson.dumps(document), fresh, "fp").started_over
    assert fresh[0].output_token_ids == []


def test_one_bad_answer_of_n_keeps_none() -> None:
    document = orjson.loads(saved(2))
    document["a"][1]["at"] = 99
    fresh = sequences(2)
    assert checkpoint.restore(orjson.dumps(document), fresh, "fp").started_over
    assert [s.output_token_ids for s in fresh] == [[], []]
