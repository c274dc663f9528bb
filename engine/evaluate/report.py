"""A comparison as JSON for programs and as Markdown for people."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from headrace.engine.evaluate.answers import Answer
from headrace.engine.evaluate.compare import Comparison, Style
from headrace.engine.evaluate.measure import Measured
from headrace.engine.evaluate.run import Tried
from headrace.engine.evaluate.statistics import POWER, wilson_interval
from headrace.engine.evaluate.verdict import Verdict, points

FORMAT = "headrace-verify"
VERSION = 1
_MOST_CHANGED = 20
_SNIPPET = 60
_LITTLE = 0.05
"""Questions that cannot find a loss of so much tell little."""


def document(tried: Sequence[Tried], chosen: str | None) -> dict[str, Any]:
    """Everything, as plain values: shares 0 to 1, sizes in bytes, times in seconds, divergences in
    nats; what is not finite is None. `chosen`: the first candidate that holds, None without one."""
    found: dict[str, Any] = _finite(
        {
            "format": FORMAT,
            "version": VERSION,
            "chosen": chosen,
            "tried": [_tried(one) for one in tried],
        }
    )
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def markdown(tried: Sequence[Tried]) -> str:
    """One report after the other, the last tried first: it is the one that was chosen, if any."""
    return "\n".join(
        as_markdown(one.comparison, one.verdict)
        if one.comparison is not None and one.verdict is not None
        else f"# {one.variant.label}: cannot run\n\n{one.failure}\n"
        for one in reversed(tried)
    )


def summary(one: Tried) -> str:
    """One candidate in a line."""
    if one.comparison is None or one.verdict is None:
        return f"{one.variant.label}: cannot run: {one.failure}"
    accuracy = one.comparison.accuracy
    figures = f"{accuracy.candidate} of {accuracy.total} right (reference {accuracy.reference})"
    if one.holds:
        return f"{one.variant.label}: holds, {figures}"
    why = "; ".join(f"{c.name} {c.found}, limit {c.limit}" for c in one.verdict.failed)
    return f"{one.variant.label}: does not hold, {figures}: {why}"


def _tried(one: Tried) -> dict[str, Any]:
    if one.comparison is None or one.verdict is None:
        return {"label": one.variant.label, "holds": False, "failure": one.failure}
    return {"label": one.variant.label, **as_json(one.comparison, one.verdict), "failure": None}


def as_json(comparison: Comparison, verdict: Verdict) -> dict[str, Any]:
    accuracy = comparison.accuracy
    return {
        "holds": verdict.holds,
        "checks": [asdict(check) for check in verdict.checks],
        "accuracy": {
            **asdict(accuracy),
            "difference": accuracy.difference,
            "interval": list(accuracy.interval),
            "p_value": accuracy.p_value,
            "fewest_lost_for_significance": accuracy.fewest_lost,
            "detectable_loss": accuracy.detectable,
            "power": POWER,
        },
        "by_category": {
            name: {"reference": a, "candidate": b, "total": total}
            for name, (a, b, total) in comparison.by_category.items()
        },
        "token_agreement": None if comparison.agreement is None else asdict(comparison.agreement),
        "perplexity_increase": comparison.perplexity_increase,
        "reference": _model(comparison.reference, comparison.reference_style),
        "candidate": _model(comparison.candidate, comparison.candidate_style),
    }


def _model(measured: Measured, style: Style) -> dict[str, Any]:
    cost, text = measured.cost, measured.text
    return {
        **asdict(measured.variant),
        "label": measured.variant.label,
        "runs_as": measured.quantization,
        "compute_dtype": measured.dtype,
        "backend": measured.backend,
        "style": asdict(style),
        "text": None
        if text is None
        else {**asdict(text), "perplexity": text.perplexity, "bits_per_byte": text.bits_per_byte},
        "distance": None if measured.distance is None else asdict(measured.distance),
        "cost": {
            **asdict(cost),
            "weights_total": cost.weights.total,
            "tokens_per_second": cost.tokens_per_second,
        },
        "answers": [_answer(answer) for answer in measured.answers],
    }


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "id": answer.question,
        "category": answer.category,
        "text": answer.text,
        "tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason or None,
        "failure": answer.failure,
        **asdict(answer.score),
    }


def as_markdown(comparison: Comparison, verdict: Verdict) -> str:
    reference, candidate = comparison.reference, comparison.candidate
    says = "holds" if verdict.holds else "does not hold"
    parts = [
        f"# {candidate.variant.label} against {reference.variant.label}: {says}",
        _table(
            ("check", "limit", "found", ""),
            [(c.name, c.limit, c.found, _MARKS[c.holds]) for c in verdict.checks],
        ),
        "## Answers",
        _answers(comparison),
        certainty(comparison),
        _categories(comparison),
        "## Text, speed, memory",
        _costs(comparison),
    ]
    for title, pairs in (("Lost", comparison.lost), ("Gained", comparison.gained)):
        if pairs:
            parts += [f"## {title}", _changed(pairs)]
    return "\n\n".join(part for part in parts if part) + "\n"


_MARKS = {True: "holds", False: "fails", None: "-"}


def _answers(comparison: Comparison) -> str:
    accuracy = comparison.accuracy
    before, after = comparison.reference_style, comparison.candidate_style
    low, high = accuracy.interval
    share = f"{accuracy.confidence:.0%}"
    rows: list[tuple[str, str, str, str]] = [
        (
            "right",
            _right(accuracy.reference, accuracy.total),
            _right(accuracy.candidate, accuracy.total),
            f"{points(accuracy.difference)}, {share} interval {100 * low:+.1f} to"
            f" {100 * high:+.1f}; {accuracy.lost} lost, {accuracy.gained} gained,"
            f" McNemar's exact p {accuracy.p_value:.3f}",
        )
    ]
    if before.json_valid is not None and after.json_valid is not None:
        rows.append(
            (
                f"valid JSON of {before.json_asked}",
                f"{before.json_valid:.0%}",
                f"{after.json_valid:.0%}",
                points(after.json_valid - before.json_valid),
            )
        )
    rows += [
        ("tokens an answer", f"{before.mean_tokens:.1f}", f"{after.mean_tokens:.1f}", ""),
        ("cut off by max_tokens", f"{before.cut_off:.0%}", f"{after.cut_off:.0%}", ""),
        ("repeated 4-grams", f"{before.repetition:.1%}", f"{after.repetition:.1%}", ""),
        ("going in circles", f"{before.looping:.0%}", f"{after.looping:.0%}", ""),
    ]
    if comparison.agreement is not None:
        same = comparison.agreement
        shared = f"{same.identical:.0%} identical, {same.shared:.0%} of the tokens until they part"
        rows.append(("written answers", "", "", shared))
    names = ("reference", "candidate")
    return _table(("", *names, "candidate against reference"), rows)


def certainty(comparison: Comparison) -> str:
    """What so many questions can and cannot tell."""
    accuracy = comparison.accuracy
    little = accuracy.detectable is None or accuracy.detectable > _LITTLE
    text = (
        f"{accuracy.total:,} questions{' tell little' if little else ''}: a loss is significant"
        f" from {accuracy.fewest_lost} more lost than gained on"
    )
    if 2 * accuracy.reference < accuracy.total:
        text = (
            f"Only the {accuracy.reference} that the reference answers rightly can be lost; ask"
            f" questions that it can answer. {text}"
        )
    if accuracy.detectable is None:
        return f"{text}, and no true loss, however large, is found four times out of five."
    return (
        f"{text}, and a true loss has to be {100 * accuracy.detectable:.0f} points or more to be"
        " found four times out of five. A smaller one may be there unseen; ask more questions, and"
        " read the text's figures, which rest on every token."
    )


def _categories(comparison: Comparison) -> str:
    if len(comparison.by_category) < 2:
        return ""
    rows = [(name or "-", *counts) for name, counts in comparison.by_category.items()]
    return _table(("category", "reference right", "candidate right", "questions"), rows)


def _costs(comparison: Comparison) -> str:
    pair = (comparison.reference, comparison.candidate)
    rows: list[Sequence[object]] = []
    texts = [measured.text for measured in pair]
    distance = comparison.candidate.distance
    if texts[0] is not None and texts[1] is not None:
        rise = comparison.perplexity_increase
        rows += [
            (
                f"perplexity of {texts[0].num_tokens} tokens",
                *(f"{text.perplexity:.2f}" for text in texts if text),
                "" if rise is None else f"{rise:+.1%}",
            ),
            ("bits a byte", *(f"{text.bits_per_byte:.3f}" for text in texts if text), ""),
        ]
    if distance is not None:
        kl = f"mean {distance.kl_mean:.4f}, median {distance.kl_median:.4f}"
        kl += f", 99 % {distance.kl_p99:.3f}, most {distance.kl_max:.3f}"
        rows += [
            ("KL divergence, nats", "", kl, ""),
            ("same first token", "", f"{distance.top_agreement:.1%}", ""),
        ]
    costs = [measured.cost for measured in pair]
    weights = [cost.weights for cost in costs]
    rows += [
        ("runs as", *(f"{m.quantization}, {m.dtype}, {m.backend}" for m in pair), ""),
        (
            "output tokens/s, all at once",
            *(f"{cost.tokens_per_second:.1f}" for cost in costs),
            _times(costs[1].tokens_per_second, costs[0].tokens_per_second),
        ),
        (
            "weights MB (linear, embedding, head)",
            *(
                f"{_mb(w.total)} ({_mb(w.linear)}, {_mb(w.embedding)}, {_mb(w.head)})"
                for w in weights
            ),
            _times(weights[1].total, weights[0].total),
        ),
        (
            "KV bytes a token",
            *(f"{cost.kv_bytes_per_token:,}" for cost in costs),
            _times(costs[1].kv_bytes_per_token, costs[0].kv_bytes_per_token),
        ),
        ("peak memory MB", *(_mb(cost.peak_bytes) for cost in costs), ""),
        ("seconds to load", *(f"{cost.load_seconds:.1f}" for cost in costs), ""),
    ]
    return _table(("", "reference", "candidate", ""), rows)


def _changed(pairs: Sequence[tuple[Answer, Answer]]) -> str:
    rows = [
        (f"`{a.question}`", _snippet(a), _snippet(b), b.score.why or a.score.why)
        for a, b in pairs[:_MOST_CHANGED]
    ]
    more = len(pairs) - _MOST_CHANGED
    table = _table(("question", "reference", "candidate", "why"), rows)
    return table + (f"\n\nand {more} more (all are in the JSON)" if more > 0 else "")


def _snippet(answer: Answer) -> str:
    text = " ".join((answer.failure or answer.text).split())
    return text if len(text) <= _SNIPPET else text[: _SNIPPET - 1] + "…"


def _right(right: int, total: int) -> str:
    low, high = wilson_interval(right, total)
    return f"{right} of {total}, {right / total:.0%} ({100 * low:.0f} to {100 * high:.0f})"


def _mb(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.0f}"


def _times(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f} times" if theirs else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
