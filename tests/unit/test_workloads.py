"""The benchmark's workloads are the same token ids for everyone."""

import hashlib

from headrace.worker.bench import workloads


def words(text: str) -> list[int]:
    """A stand-in tokenizer: one id a word, stable."""
    return [
        int.from_bytes(hashlib.blake2b(w.encode(), digest_size=4).digest()) for w in text.split()
    ]


def test_shared_is_unshared_behind_one_head() -> None:
    """Both workloads ask the same 64 questions for the same 4,497 output tokens."""
    shared, unshared = workloads.build("shared", words), workloads.build("unshared", words)
    assert len(shared) == len(unshared) == 64
    assert sum(r.max_tokens for r in shared) == sum(r.max_tokens for r in unshared) == 4497
    head = len(shared[0].prompt_token_ids) - len(unshared[0].prompt_token_ids)
    first_head = shared[0].prompt_token_ids[:head]
    for a, b in zip(shared, unshared, strict=True):
        assert a.prompt_token_ids == first_head + b.prompt_token_ids


def test_synthesized_work_repeats_by_seed() -> None:
    def make(seed: int) -> list[workloads.BenchRequest]:
        return workloads.synthesize(
            words, requests=9, head_words=20, user_words=(3, 9), max_tokens=(1, 5), seed=seed
        )

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert all(1 <= r.max_tokens <= 5 for r in make(1))
