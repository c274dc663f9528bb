"""What answers to the same questions tell about two models: paired statistics for small counts.

Counts in, numbers out; knows no question and no model.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

POWER = 0.8


def wilson_interval(right: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of one proportion (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    z = _z(confidence)
    share = right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = (
        z
        / (1 + z * z / total)
        * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided p-value of McNemar's exact test: were gains and losses equally likely, how often
    would they be at least this unequal."""
    total = lost + gained
    tail = ways = 1
    for k in range(min(lost, gained)):
        ways = ways * (total - k) // (k + 1)
        tail += ways
    return min(1.0, float(Fraction(2 * tail, 2**total)))


def paired_interval(
    gained: int, lost: int, total: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of the difference (gained - lost) / total of two paired proportions.

    Score interval of Tango, Statistics in Medicine 17 (1998) 891-908: all differences d whose score
    test (the discordant probability estimated under d) does not reject. Right for small counts,
    also when nothing or everything differs, where the usual one has no width.
    """
    if not total:
        return -1.0, 1.0
    z = _z(confidence)

    def statistic(d: float) -> float:
        a = 2 * total
        b = (2 * total - gained + lost) * d - gained - lost
        c = -lost * d * (1 - d)
        q = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        variance = total * (2 * q + d * (1 - d))
        distance = gained - lost - total * d
        if variance <= 0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / math.sqrt(variance)

    estimate = (gained - lost) / total
    low = _crossing(statistic, z, -1.0, estimate)
    high = _crossing(statistic, -z, estimate, 1.0)
    return low, high


def _crossing(falling: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where a falling function passes `level` between low and high."""
    for _ in range(60):
        middle = (low + high) / 2
        if falling(middle) > level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def fewest_significant(alpha: float = 0.05) -> int:
    """How many lost answers, none gained, are significant by McNemar's exact test."""
    lost = 1
    while mcnemar_exact(lost, 0) >= alpha:
        lost += 1
    return lost


def detectable_difference(
    total: int, discordant: float = 0.0, alpha: float = 0.05, power: float = POWER
) -> float | None:
    """The smallest true loss of accuracy that McNemar's exact test on `total` questions finds with
    probability `power`; None when even the loss of everything is not found.

    `discordant`: share of questions on which two models differ either way; a loss of d has at least
    d of them. Exact: the binomial distribution of the discordant pairs, then of the losses.
    """
    if power_of(total, 1.0, 1.0, alpha) < power:
        return None
    low, high = 0.0, 1.0
    while high - low > 5e-4:
        middle = (low + high) / 2
        if power_of(total, middle, max(middle, discordant), alpha) < power:
            low = middle
        else:
            high = middle
    return high


def power_of(total: int, difference: float, discordant: float, alpha: float = 0.05) -> float:
    """Probability that a true loss of `difference` is significant as a loss."""
    if not discordant:
        return 0.0
    pairs = _binomial(total, discordant)
    loss = (1 + difference / discordant) / 2
    found = 0.0
    for count in np.flatnonzero(pairs > 1e-12):
        n = int(count)
        critical = _critical(n, alpha)
        if critical is not None:
            found += pairs[n] * float(_binomial(n, loss)[critical:].sum())
    return found


def _critical(pairs: int, alpha: float) -> int | None:
    """The fewest losses among `pairs` that are significant."""
    if 2.0 ** (1 - pairs) >= alpha:
        return None
    tails = np.cumsum(_binomial(pairs, 0.5))
    gains = int(np.searchsorted(2 * tails, alpha, side="left")) - 1
    return pairs - gains if gains >= 0 else None


def _binomial(n: int, p: float) -> NDArray[np.float64]:
    """Probabilities of 0 to n successes."""
    if p >= 1.0:
        certain: NDArray[np.float64] = np.eye(1, n + 1, n)[0]
        return certain
    counts = np.arange(n + 1)
    logs = np.array([math.lgamma(k + 1) for k in range(n + 1)])
    chosen = logs[n] - logs - logs[::-1]
    result: NDArray[np.float64] = np.exp(
        chosen + counts * math.log(p) + (n - counts) * math.log1p(-p)
    )
    return result


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
