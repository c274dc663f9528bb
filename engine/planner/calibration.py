"""Fits the roofline's three constants to measured steps, and reads and writes the measurements.

The file, as `headrace bench` writes it and `headrace plan` reads it:

    {"format": "headrace-measurement", "version": 1, "device": "H100", "points": [
      {"kind": "decode", "model": "Qwen2-7B", "scheme": "bf16", "batch": 16, "context": 700,
       "seconds": 0.012},
      {"kind": "prefill", "model": "Qwen2-7B", "scheme": "bf16", "tokens": 2048, "context": 0,
       "seconds": 0.095}]}

`seconds` is one step: a token for each of `batch` sequences, or one chunk of `tokens`. `model` is
whatever `headrace plan` accepts; `device` is a card's name or `cpu`.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.hardware import Card, find_card
from headrace.engine.planner.resolve import resolve
from headrace.engine.planner.roofline import (
    Efficiency,
    Roofline,
    StepWork,
    default_efficiency,
)
from headrace.engine.planner.schemes import parse_scheme
from headrace.engine.planner.weights import weight_bytes

FORMAT = "headrace-measurement"
VERSION = 1
_PRIOR = 1e-3
"""Weight of the defaults beside a measured point: they decide only what no point tells."""
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Point:
    """One measured step; see the module's docstring."""

    kind: str
    model: str
    scheme: str
    seconds: float
    batch: int = 1
    context: int = 0
    tokens: int = 0

    def work(self, card: Card) -> StepWork:
        shape = resolve(self.model).shape
        scheme = parse_scheme(self.scheme)
        reason = card.refuses(scheme)
        if reason:
            raise PlanError(reason)
        weights = weight_bytes(shape, scheme, card.dtype_bytes)
        roofline = Roofline(shape, scheme, weights, card)
        if self.kind == "decode":
            return roofline.decode(self.batch, self.context)
        return roofline.prefill(self.tokens, self.context)


def default_path() -> Path:
    """Where a measurement of this machine is kept: HEADRACE_CACHE or ~/.cache/headrace."""
    cache = os.environ.get("HEADRACE_CACHE") or "~/.cache/headrace"
    return Path(cache).expanduser() / "measurement.json"


def write_measurement(path: Path, device: str, points: Iterable[Point]) -> None:
    """Writes to a temporary name and renames, so that a reader never sees half a file."""
    rows = []
    for p in points:
        row: dict[str, Any] = {"kind": p.kind, "model": p.model, "scheme": p.scheme}
        sizes = {"batch": p.batch} if p.kind == "decode" else {"tokens": p.tokens}
        rows.append({**row, **sizes, "context": p.context, "seconds": p.seconds})
    document = {"format": FORMAT, "version": VERSION, "device": device, "points": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_measurement(path: Path) -> tuple[Card, Efficiency]:
    """The card and its fitted constants. Raises PlanError naming the point that is wrong."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"measurement {path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError(f"{path} is no measurement: its format is not {FORMAT!r}")
    if document.get("version") != VERSION:
        raise PlanError(f"{path} has version {document.get('version')!r}; known: {VERSION}")
    card = find_card(str(document.get("device")))
    rows = document.get("points")
    if not isinstance(rows, list) or not rows:
        raise PlanError(f"measurement {path} has no points")
    points = [_point(row, f"{path}: point {i}") for i, row in enumerate(rows, 1)]
    return card, fit(card, points)


def _point(row: Any, where: str) -> Point:
    if not isinstance(row, Mapping) or row.get("kind") not in ("decode", "prefill"):
        raise PlanError(f"{where} needs a kind: decode or prefill")
    size = "batch" if row["kind"] == "decode" else "tokens"
    try:
        values = {size: int(row[size]), "context": int(row.get("context", 0))}
        seconds = float(row["seconds"])
        model, scheme = str(row["model"]), str(row["scheme"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{where} is damaged: {error!r}") from error
    if values[size] < 1 or values["context"] < 0 or not 0 < seconds < 1e6:
        raise PlanError(f"{where} has an impossible {size}, context or seconds")
    return Point(row["kind"], model, scheme, seconds, **values)


def fit(card: Card, points: Sequence[Point]) -> Efficiency:
    """The constants with the least squared relative error over `points`.

    A step is bound by memory or by arithmetic; which one follows from the constants, so both are
    settled in turns. What no point tells (arithmetic, if only small batches were measured) stays
    at its default.
    """
    works = [p.work(card) for p in points]
    start = default_efficiency(card)
    prior = (1 / start.memory, 1 / start.compute, start.overhead)
    current = prior
    for _ in range(_ROUNDS):
        rows = []
        for work, point in zip(works, points, strict=True):
            bound_by_memory = work.memory * current[0] >= work.compute * current[1]
            memory = work.memory if bound_by_memory else 0.0
            compute = 0.0 if bound_by_memory else work.compute
            target = point.seconds - work.communication
            rows.append(
                (
                    (memory / point.seconds, compute / point.seconds, 1 / point.seconds),
                    target / point.seconds,
                )
            )
        solved = _least_squares(rows, prior)
        settled = all(
            abs(a - b) <= 1e-9 * (abs(a) + 1e-9) for a, b in zip(solved, current, strict=True)
        )
        current = solved
        if settled:
            break
    return Efficiency(1 / current[0], 1 / current[1], current[2], len(points))


_Vector = tuple[float, float, float]


def _least_squares(rows: Sequence[tuple[_Vector, float]], prior: _Vector) -> _Vector:
    """Three unknowns, all kept positive: one that would turn negative is held near zero."""
    held: set[int] = set()
    while True:
        matrix = [[0.0] * 3 for _ in range(3)]
        right = [0.0] * 3
        for coefficients, target in rows:
            for i in range(3):
                right[i] += coefficients[i] * target
                for j in range(3):
                    matrix[i][j] += coefficients[i] * coefficients[j]
        for i in range(3):
            weight = (_PRIOR / prior[i]) ** 2 if i not in held else 1e12 / prior[i] ** 2
            matrix[i][i] += weight
            right[i] += weight * prior[i] if i not in held else weight * prior[i] * 1e-3
        solution = _solve(matrix, right)
        negative = {i for i in range(3) if solution[i] <= 0} - held
        if not negative:
            return (solution[0], solution[1], max(solution[2], 0.0))
        held |= negative


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a positive definite system."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
            right[j] -= factor * right[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][k] * solution[k] for k in range(i + 1, size))
        solution[i] = (right[i] - rest) / matrix[i][i]
    return solution
