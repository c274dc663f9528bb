"""Whether a candidate holds: each limit, what was found, and whether it is kept."""

import math
from dataclasses import dataclass, fields

from headrace.engine.evaluate.compare import Comparison
from headrace.engine.evaluate.errors import EvaluateError


@dataclass(frozen=True, slots=True)
class Limits:
    """None: not asked for. Shares are 0 to 1.

    `drop`: loss of accuracy that is still accepted; `confident`: the whole confidence interval must
    lie within it, not only what was observed. `significance`: a loss with a smaller p-value fails
    whatever its size. `json_drop` never means less than one answer: of a dozen, one is 8 points.
    """

    drop: float = 0.05
    confident: bool = False
    significance: float = 0.05
    accuracy: float | None = None
    json_drop: float = 0.05
    perplexity: float | None = 0.10
    kl: float | None = None
    agreement: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            limit = getattr(self, one.name)
            if isinstance(limit, float) and math.isnan(limit):
                # Nothing is worse than it: every candidate would hold.
                raise EvaluateError(f"the limit {one.name} is {limit}, which is no number")


@dataclass(frozen=True, slots=True)
class Check:
    """`limit` and `found` as people read them. `holds` None: nothing to judge by (perplexity
    without text, or between two tokenizers); a limit that has no default and finds nothing to
    measure does not hold."""

    name: str
    limit: str
    found: str
    holds: bool | None


@dataclass(frozen=True, slots=True)
class Verdict:
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        return all(check.holds is not False for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.holds is False]


def judge(comparison: Comparison, limits: Limits) -> Verdict:
    accuracy = comparison.accuracy
    low, _ = accuracy.interval
    worst = low if limits.confident else accuracy.difference
    basis = "lower end of the interval" if limits.confident else "observed"
    checks = [
        Check(
            f"accuracy, {basis}",
            f"at least {points(-limits.drop)}",
            points(worst),
            worst >= -limits.drop - 1e-9,
        ),
        Check(
            "no significant loss",
            f"p at least {limits.significance:g}",
            f"p {accuracy.p_value:.3f}",
            accuracy.difference >= 0 or accuracy.p_value >= limits.significance,
        ),
    ]
    if limits.accuracy is not None:
        share = accuracy.candidate / accuracy.total
        checks.append(
            Check(
                "accuracy of its own",
                f"at least {limits.accuracy:.0%}",
                f"{share:.1%}",
                share >= limits.accuracy - 1e-9,
            )
        )
    before, after = comparison.reference_style.json_valid, comparison.candidate_style.json_valid
    if before is not None and after is not None:
        drop = max(limits.json_drop, 1 / comparison.reference_style.json_asked)
        checks.append(
            Check(
                "valid JSON",
                f"at least {points(-drop)}",
                points(after - before),
                after - before >= -drop - 1e-9,
            )
        )
    checks += _of_text(comparison, limits)
    return Verdict(tuple(checks))


def _of_text(comparison: Comparison, limits: Limits) -> list[Check]:
    checks = []
    if limits.perplexity is not None:
        name, limit = "perplexity", f"at most {limits.perplexity:+.0%}"
        found = comparison.perplexity_increase
        if found is None:
            checks.append(Check(name, limit, "not compared", None))
        else:
            checks.append(Check(name, limit, f"{found:+.1%}", found <= limits.perplexity))
    distance = comparison.candidate.distance
    if limits.kl is not None:
        kl = None if distance is None else distance.kl_mean
        found_kl = "not compared" if kl is None else f"{kl:.4f} nats"
        holds = kl is not None and kl <= limits.kl
        checks.append(Check("KL divergence", f"at most {limits.kl:g} nats", found_kl, holds))
    if limits.agreement is not None:
        top = None if distance is None else distance.top_agreement
        found_top = "not compared" if top is None else f"{top:.1%}"
        holds = top is not None and top >= limits.agreement
        checks.append(
            Check("same first token", f"at least {limits.agreement:.0%}", found_top, holds)
        )
    return checks


def points(share: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * share:+.1f} points"
