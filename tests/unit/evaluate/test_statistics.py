"""Statistics of paired answers against published values and another library's.

Published: Cavo et al. 2012 and Bentur et al. 2009 as worked in Fagerland, Lydersen and Laake,
Statistical Analysis of Contingency Tables (2017), chapter 8, and in the tests of their R package
contingencytables. Binomial tests and Wilson intervals: values that scipy 1.17.1 prints
(`binomtest(k, n, 0.5).pvalue`, `.proportion_ci(method="wilson")`).
"""

import math
from fractions import Fraction

import pytest

from headrace.engine.evaluate.statistics import (
    detectable_difference,
    fewest_significant,
    mcnemar_exact,
    paired_interval,
    power_of,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("lost", "gained", "p_value"),
    [
        (16, 6, 0.052479),  # Cavo
        (7, 1, 0.0703125),  # Bentur: 2 (1 + 8) / 256
        (0, 0, 1.0),
        (5, 5, 1.0),
        (5, 0, 0.0625),
        (6, 0, 0.03125),
        (2, 12, 0.012939453125),
        (25, 40, 0.08168153394154003),
        (3, 20, 0.00048828125),
    ],
)
def test_mcnemar_is_the_exact_one(lost: int, gained: int, p_value: float) -> None:
    assert mcnemar_exact(lost, gained) == pytest.approx(p_value, abs=5e-7)
    assert mcnemar_exact(gained, lost) == mcnemar_exact(lost, gained)


def test_mcnemar_of_thousands_of_pairs_does_not_overflow() -> None:
    assert mcnemar_exact(3000, 3000) == 1.0
    assert 0 < mcnemar_exact(2900, 3100) < 0.05


@pytest.mark.parametrize(
    ("gained", "lost", "total", "low", "high"),
    [
        (6, 16, 161, -0.1240, -0.0054),  # Cavo
        (1, 7, 21, -0.5172, -0.0260),  # Bentur
        (0, 0, 50, -0.0713, 0.0713),  # z^2 / (n + z^2): nothing differed, and still a width
    ],
)
def test_paired_interval_is_tangos(
    gained: int, lost: int, total: int, low: float, high: float
) -> None:
    assert paired_interval(gained, lost, total) == pytest.approx((low, high), abs=5e-5)


def test_paired_interval_is_where_the_score_test_stops_rejecting() -> None:
    """By its definition, the discordant probability that is most likely under a difference d found
    by trying a million values instead of by the formula."""
    gained, lost, total = 12, 2, 50
    for bound in paired_interval(gained, lost, total):
        steps = 1_000_000
        lowest, highest = max(0.0, -bound), (1 - bound) / 2

        def likelihood(q: float, d: float = bound) -> float:
            rest = 1 - 2 * q - d
            if q <= 0 or q + d <= 0 or rest <= 0:
                return -math.inf
            agreed = total - gained - lost
            return gained * math.log(q + d) + lost * math.log(q) + agreed * math.log(rest)

        tried = (lowest + (highest - lowest) * k / steps for k in range(1, steps, 97))
        best = max(tried, key=likelihood)
        variance = total * (2 * best + bound - bound * bound)
        distance = abs(gained - lost - total * bound) / math.sqrt(variance)
        assert distance == pytest.approx(1.959964, abs=2e-3)


def test_paired_interval_is_mirrored_and_stays_within_one() -> None:
    for gained, lost, total in [(3, 9, 40), (0, 20, 20), (20, 0, 20), (1, 0, 1)]:
        low, high = paired_interval(gained, lost, total)
        assert (-high, -low) == pytest.approx(paired_interval(lost, gained, total), abs=1e-9)
        assert -1 <= low <= (gained - lost) / total <= high <= 1
    assert paired_interval(0, 0, 0) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        (0, 50, 0.0, 0.07134759913335872),
        (1, 50, 0.0035392592716462223, 0.10495443589637814),
        (37, 50, 0.6044684273515115, 0.8412847250644762),
        (50, 50, 0.9286524008666412, 1.0),
        (123, 500, 0.21028099168567072, 0.2855921732687978),
    ],
)
def test_wilson_interval(right: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(right, total) == pytest.approx((low, high), abs=1e-9)


def test_six_lost_and_none_gained_are_the_fewest_that_are_significant() -> None:
    """2 / 2^5 = 0.0625 and 2 / 2^6 = 0.031; at one percent 2 / 2^8."""
    assert fewest_significant(0.05) == 6
    assert fewest_significant(0.01) == 8


@pytest.mark.parametrize(("difference", "discordant"), [(0.2, 0.2), (0.1, 0.3), (0.5, 0.6)])
def test_power_equals_the_sum_over_all_tables(difference: float, discordant: float) -> None:
    """Twelve questions, each lost, gained or the same: all 91 tables, in fractions."""
    total = 12
    lost_p = Fraction((discordant + difference) / 2).limit_denominator(1000)
    gained_p = Fraction((discordant - difference) / 2).limit_denominator(1000)
    power = Fraction(0)
    for lost in range(total + 1):
        for gained in range(total + 1 - lost):
            if lost > gained and mcnemar_exact(lost, gained) < 0.05:
                ways = math.comb(total, lost) * math.comb(total - lost, gained)
                rest = (1 - lost_p - gained_p) ** (total - lost - gained)
                power += ways * lost_p**lost * gained_p**gained * rest
    assert power_of(total, difference, discordant) == pytest.approx(float(power), abs=1e-9)


def test_few_questions_detect_large_losses_only() -> None:
    """50 questions: 15 points if nothing is gained; 5 find nothing, since 6 are the fewest."""
    fifty = detectable_difference(50)
    assert fifty is not None and 0.14 < fifty < 0.17
    assert power_of(50, fifty, fifty) >= 0.8 > power_of(50, fifty - 0.002, fifty - 0.002)
    noisy = detectable_difference(50, discordant=0.3)
    assert noisy is not None and noisy > fifty
    many = detectable_difference(1000, discordant=0.1)
    assert many is not None and many < 0.04
    assert detectable_difference(5) is None
