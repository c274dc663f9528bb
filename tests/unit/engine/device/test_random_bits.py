"""Philox against its authors' known answers, and that noise depends on its key alone."""

import numpy as np
import pytest

from headrace.engine.random_bits import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """The vectors of Random123's kat_vectors for philox4x32 with 10 rounds."""

    def words(values: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        return tuple(np.array([value], dtype=np.uint64) for value in values)

    found = philox4x32(words(counter), words(key))
    assert [int(word[0]) for word in found] == list(expected)


def as_words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_each_part_of_the_key_changes_the_noise_and_the_company_does_not() -> None:
    base = uniforms(as_words(7), as_words(0), as_words(30))[0]
    for seed, sample, position in ((8, 0, 30), (7, 1, 30), (7, 0, 31), (7 + 2**40, 0, 30)):
        assert uniforms(as_words(seed), as_words(sample), as_words(position))[0] != base
    many = uniforms(as_words(*range(100)), as_words(*[0] * 100), as_words(*[30] * 100))
    assert many[7] == base
    assert len(set(many.tolist())) == 100


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    """100,000 numbers in 20 bins: each bin within 5 standard deviations (69) of 5,000; mean within
    5 of 1/2 (0.0046)."""
    count = 100_000
    numbers = uniforms(
        np.full(count, 3, dtype=np.uint64),
        np.zeros(count, dtype=np.uint64),
        np.arange(count, dtype=np.uint64),
    )
    assert numbers.min() >= 0 and numbers.max() < 1
    bins, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(bins - count / 20).max() < 5 * 69
    assert abs(numbers.mean() - 0.5) < 0.0046
