"""Chooses among candidates, and says why.

The rules for one card or group: what fits in 16 bits and holds the wanted concurrency stays 16-bit;
what fits but holds too few at once goes to 8 bits where that is cheaper; what does not fit goes to
8 bits if all fit, else to 4 bits, or to several cards. Between cards: the cheapest that meets the
deadline, on interruptible capacity where the time allows it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.engine.planner import catalog
from headrace.engine.planner.blocks import about_blocks
from headrace.engine.planner.candidates import Candidate, Options, candidates
from headrace.engine.planner.memory import WEIGHTS_SHARE
from headrace.engine.planner.prices import PRICES_DATE
from headrace.engine.planner.resolve import Model
from headrace.engine.planner.units import dollars, duration, gib

Market = Literal["any", "on-demand", "spot"]
_CHEAPER = 0.95
_MUCH_CHEAPER = 0.9
_PATIENCE = 86400.0
"""Without a deadline, what ends within a day comes before what is cheaper and does not."""
_SPOT_MARGIN = 0.9
"""On spot, the expected time must end before this share of the deadline."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`choice` None: nothing fits; then `reasons` says what is nearest and what would help."""

    model: str
    choice: Candidate | None
    market: Literal["on-demand", "spot"]
    rule: str
    reasons: tuple[str, ...]

    @property
    def cost(self) -> float | None:
        if self.choice is None:
            return None
        return self.choice.spot_cost if self.market == "spot" else self.choice.cost


def pick_market(row: Candidate, options: Options, allowed: Market) -> Literal["on-demand", "spot"]:
    """Spot where it is cheaper and its expected time still leaves a margin to the deadline."""
    if allowed != "any":
        return allowed
    if row.cost is None or row.spot_cost is None or row.spot_seconds is None:
        return "on-demand"
    deadline = options.job.deadline
    in_time = deadline is None or row.spot_seconds <= _SPOT_MARGIN * deadline
    return "spot" if in_time and row.spot_cost < row.cost else "on-demand"


def apply_rules(
    rows: Sequence[Candidate], options: Options, compared: frozenset[int] = frozenset()
) -> tuple[Candidate, str] | None:
    """The scheme for one model on one card and count, and the rule that chose it.

    `compared`: the bits that were tried there, those of `rows` and of wider splits.
    """
    fitting = [r for r in rows if r.fits]
    if not fitting:
        return None
    wide = _cheapest(r for r in fitting if r.bits >= 16)
    eight = _cheapest(r for r in fitting if r.bits == 8)
    narrow = _cheapest(r for r in fitting if 4 <= r.bits < 8)
    workers = fitting[0].count // fitting[0].tensor_parallel
    demand = min(options.job.demand(options.settings), math.ceil(options.job.requests / workers))
    if wide is not None:
        if wide.max_sequences >= demand:
            return wide, f"fits in 16 bits and holds all {demand} at once: nothing to quantize for"
        held = f"fits in 16 bits, but only {wide.max_sequences} of {demand} at once"
        if eight is not None and eight.max_sequences > wide.max_sequences:
            if _cost(eight) <= _CHEAPER * _cost(wide):
                saved = 1 - _cost(eight) / _cost(wide) if _cost(wide) else 0.0
                text = (
                    f"{held}; {eight.scheme} holds {eight.max_sequences} and costs {saved:.0%} less"
                )
                return eight, text
            return wide, f"{held}; 8 bits would hold {eight.max_sequences} and save nothing"
        return wide, held
    if not any(bits >= 16 for bits in compared | {r.bits for r in rows}):
        best = min(fitting, key=_cost)
        return best, f"{best.scheme} fits; 16 bits were not compared"
    if eight is not None and eight.max_sequences >= demand:
        return eight, f"does not fit in 16 bits; 8 bits fit and hold all {demand} at once"
    if eight is not None and narrow is not None and _cost(eight) <= _cost(narrow):
        return eight, "does not fit in 16 bits; 8 bits fit and cost no more than 4"
    if narrow is not None:
        where = "on one card" if narrow.count == 1 else f"on {narrow.count} cards"
        return narrow, f"does not fit in 16 bits: {narrow.bits} bits {where}"
    if eight is not None:
        return eight, f"does not fit in 16 bits: 8 bits, {eight.max_sequences} at once"
    return fitting[0], f"fits only in {fitting[0].bits} bits"


def recommend(
    model: Model, rows: Sequence[Candidate], options: Options, market: Market = "any"
) -> Recommendation:
    """The choice for one model among its rows."""
    compared = frozenset(r.bits for r in rows)
    chosen = [found for group in _groups(rows) if (found := apply_rules(group, options, compared))]
    if not chosen:
        return _nothing_fits(model, rows)
    in_time = [c for c in chosen if _meets(c[0], options, market)]
    if options.job.deadline is None:
        in_time = [c for c in in_time if (c[0].seconds or 0.0) <= _PATIENCE] or in_time
    if in_time:
        best, rule = min(in_time, key=lambda c: _rank(c[0], options, market))
    else:
        best, rule = min(chosen, key=lambda c: (c[0].tensor_parallel > 1, c[0].seconds or math.inf))
    where = pick_market(best, options, market)
    reasons = [rule[0].upper() + rule[1:] + "."]
    reasons.append(_check_70_30(best))
    reasons.extend(about_blocks(model, best))
    reasons.append(_time_and_cost(best, options, where))
    reasons.extend(f"{n[0].upper()}{n[1:]}." for n in best.notes if "not yet" not in n)
    reasons.extend(_today(best, [c[0] for c in chosen], options, market))
    reasons.extend(_several_cards(best, rows))
    reasons.extend(_lower_bits(best, rows, options, market))
    return Recommendation(model.shape.name, best, where, rule, tuple(reasons))


def smaller_model(
    model: Model, chosen: Recommendation, options: Options, market: Market = "any"
) -> str | None:
    """A sentence on the largest sibling that fits on one card, when this model needs several."""
    if chosen.choice is not None and chosen.choice.count == 1:
        return None
    one = replace(options, counts=(1,), tensor_parallel=None)
    for shape in catalog.smaller_siblings(model.shape.name):
        if options.job.length > shape.max_position_embeddings:
            continue
        other = Model(shape)
        found = recommend(other, candidates(other, one), one, market)
        if found.choice is not None:
            return compare([chosen, found])
    return None


def compare(found: Sequence[Recommendation]) -> str:
    """Several models side by side: what each needs and costs, against the first."""
    lines = []
    first = found[0]
    for r in found:
        if r.choice is None:
            lines.append(f"{r.model} fits nowhere")
            continue
        cards = f"{r.choice.count} x {r.choice.gpu}" if r.choice.count > 1 else r.choice.gpu
        text = f"{r.model} on {cards} in {r.choice.scheme}: {duration(r.choice.seconds)}"
        text += f", {dollars(r.cost)}" if r.cost is not None else ""
        if r is not first and r.cost and first.cost:
            text += (
                f" ({first.cost / r.cost:.1f} times cheaper)"
                if first.cost >= r.cost
                else (f" ({r.cost / first.cost:.1f} times dearer)")
            )
        lines.append(text)
    advice = "Whether the smaller one is good enough is for your own questions to say"
    return "; ".join(lines) + f". {advice}."


def _groups(rows: Iterable[Candidate]) -> list[list[Candidate]]:
    """Rows of equal card and count, those that need a split apart from those that do not."""
    groups: dict[tuple[str, int, int], list[Candidate]] = {}
    for row in rows:
        width = row.tensor_parallel if row.fits else 0
        groups.setdefault((row.gpu, row.count, width), []).append(row)
    return list(groups.values())


def _cost(row: Candidate) -> float:
    """Dollars, or seconds x cards where there is no price or it is nothing."""
    return row.cost or (row.seconds or math.inf) * row.count


def _cheapest(rows: Iterable[Candidate]) -> Candidate | None:
    return min(rows, key=_cost, default=None)


def _meets(row: Candidate, options: Options, market: Market) -> bool:
    deadline = options.job.deadline
    if deadline is None:
        return True
    if market == "spot":
        return row.spot_seconds is not None and row.spot_seconds <= deadline
    return row.meets_deadline


def _rank(row: Candidate, options: Options, market: Market) -> tuple[bool, float, float]:
    """Splits that do not run yet come last; then cost, then time."""
    where = pick_market(row, options, market)
    cost = row.spot_cost if where == "spot" else row.cost
    split = row.tensor_parallel > 1 and not row.runnable
    return split, math.inf if cost is None else cost, row.seconds or math.inf


def _nothing_fits(model: Model, rows: Sequence[Candidate]) -> Recommendation:
    with_memory = [r for r in rows if r.memory is not None]
    reasons = ["Nothing compared fits."]
    if with_memory:
        near = max(with_memory, key=lambda r: r.kv_bytes)
        reasons.append(f"Nearest: {near.count} x {near.gpu} in {near.scheme}: {near.reason}.")
    elif rows:
        reasons.append(f"{rows[0].gpu} in {rows[0].scheme}: {rows[0].reason}.")
    reasons.append(
        "Try a larger card, more cards, fewer bits (--scheme int4, int3), or shorter requests."
    )
    return Recommendation(model.shape.name, None, "on-demand", "nothing fits", tuple(reasons))


def _check_70_30(row: Candidate) -> str:
    rest = 1 - row.weights_share
    verdict = "holds" if row.follows_70_30 else "is broken"
    advice = (
        ""
        if row.follows_70_30
        else f", yet {gib(row.kv_bytes)} for KV hold {row.max_sequences} sequences"
    )
    return (
        f"Check: weights {row.weights_share:.0%}, {rest:.0%} for the run: the rule of "
        f"{WEIGHTS_SHARE:.0%} and {1 - WEIGHTS_SHARE:.0%} {verdict}{advice}."
    )


def _time_and_cost(row: Candidate, options: Options, market: str) -> str:
    seconds = row.spot_seconds if market == "spot" else row.seconds
    text = f"{options.job.requests:,} requests in {duration(seconds)}"
    if row.cost and row.spot_cost is not None:
        text += (
            f": {dollars(row.cost)} on demand, {dollars(row.spot_cost)} on spot with "
            f"{options.interruptions_per_hour:g} interruptions an hour "
            f"({duration(row.spot_seconds)})"
        )
        text += f"; {market} is advised"
    deadline = options.job.deadline
    if deadline is None or seconds is None:
        return text + "."
    if seconds <= deadline:
        return f"{text}; the deadline of {duration(deadline)} is met."
    needed = math.ceil(row.count * seconds / deadline)
    return (
        f"{text}; the deadline of {duration(deadline)} is missed: about {needed} such cards "
        "would be needed."
    )


def _today(
    best: Candidate, chosen: Sequence[Candidate], options: Options, market: Market
) -> list[str]:
    """What runs today when the choice does not."""
    if best.runnable:
        return []
    why = ", ".join(n for n in best.notes if "not yet" in n)
    running = [c for c in chosen if c.runnable and _meets(c, options, market)]
    if not running:
        return [f"A plan, not yet what Headrace runs: {why}."]
    other = min(running, key=lambda c: _rank(c, options, market))
    where = pick_market(other, options, market)
    cost = other.spot_cost if where == "spot" else other.cost
    price = f", {dollars(cost)} on {where}" if cost else ""
    return [
        f"A plan, not yet what Headrace runs: {why}. Today: {other.count} x {other.gpu} in "
        f"{other.scheme}, {duration(other.seconds)}{price}."
    ]


def _several_cards(best: Candidate, rows: Sequence[Candidate]) -> list[str]:
    """Fewer bits on one card against 16 bits on several."""
    if best.bits >= 16:
        return []
    split = [r for r in rows if r.bits >= 16 and r.fits and r.tensor_parallel > 1]
    wide = [r for r in split if r.meets_deadline] or split
    other = _cheapest(wide)
    if other is None:
        return []
    price = f", {dollars(other.cost)} on demand" if other.cost is not None else ""
    state = "runs" if other.runnable else "not yet runnable"
    return [
        f"Instead of fewer bits, {other.count} x {other.gpu} would hold it in {other.scheme}: "
        f"{duration(other.seconds)}{price} (split, {state})."
    ]


def _lower_bits(
    best: Candidate, rows: Sequence[Candidate], options: Options, market: Market
) -> list[str]:
    fitting = [r for r in rows if r.fits and r.tensor_parallel == 1 and _meets(r, options, market)]
    other = _cheapest(r for r in fitting if r.bits < best.bits)
    if other is None or best.cost is None or other.cost is None or best.cost == 0:
        return []
    if other.cost > _MUCH_CHEAPER * best.cost:
        return []
    saved = 1 - other.cost / best.cost
    return [
        f"{other.count} x {other.gpu} in {other.scheme} would cost {saved:.0%} less; "
        "check its answers on your own questions first."
    ]


def assumptions(options: Options) -> list[str]:
    """What the figures rest on, for the foot of a report."""
    lines = []
    for card in options.cards:
        efficiency = options.efficiency(card)
        if efficiency.points:
            lines.append(
                f"{card.name}: {efficiency.basis}: {efficiency.memory:.0%} of its bandwidth, "
                f"{efficiency.compute:.0%} of its arithmetic, "
                f"{efficiency.overhead * 1e3:.2g} ms a step."
            )
    uncalibrated = [c.name for c in options.cards if not options.efficiency(c).points]
    if uncalibrated:
        lines.append(
            f"Rates of {', '.join(uncalibrated)} are roofline estimates; measure with "
            "`headrace bench` and pass --measurement."
        )
    listed = sorted(
        c.name
        for c in options.cards
        if (p := options.prices.get(c.name)) and p.source != "given" and not c.is_cpu
    )
    if listed:
        lines.append(
            f"Prices of {', '.join(listed)} are list prices of {PRICES_DATE}, spot at 40 % of "
            "them; yours: --price CARD=ONDEMAND/SPOT."
        )
    return lines
