"""Counter-based random numbers: a pure function of key and counter, vectorized in numpy.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(
    counter: tuple[NDArray[np.uint64], ...], key: tuple[NDArray[np.uint64], ...]
) -> tuple[NDArray[np.uint64], ...]:
    """Four 32-bit words (in uint64 arrays) from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seed: NDArray[np.uint64], sample_index: NDArray[np.uint64], position: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, sample index, position), of 53 random bits."""
    counter = (position & _LOW, position >> _HALF, sample_index & _LOW, sample_index >> _HALF)
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _HALF))
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    result: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return result
