"""KEDA's scalingModifiers: one metric computed from several triggers by a formula.

Source: kedacore/keda pkg/scaling/modifiers/formula.go. KEDA evaluates with the library expr; here
is the arithmetic part of that language: numbers, trigger names, + - * / % **, parentheses, `??`
(the right side where the left is nil) and max, min, abs, ceil, floor, round. Anything else is an
error that names the character.
"""

import math
import re
from collections.abc import Callable, Mapping

from headrace.worker.autoscale.keda import Fallback, FallbackBehavior, KedaError

COMPOSITE_METRIC = "composite-metric"

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?)|([A-Za-z_]\w*)|(\*\*|\?\?|[-+*/%(),]))")
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "round": lambda x: math.copysign(math.floor(abs(x) + 0.5), x),
}


def trigger_value(value: float, failures: int | None, fallback: Fallback | None) -> float | None:
    """A trigger's value in the formula: nil once it failed too often, if that is the behavior."""
    if fallback is None or fallback.behavior is not FallbackBehavior.SCALING_MODIFIERS:
        return value
    return None if (failures or 0) > fallback.failure_threshold else value


def composite_milli(
    formula: str,
    triggers: Mapping[str, float | None],
    *,
    target: float,
    fallback_replicas: int | None = None,
) -> int:
    """The composite metric in thousandths, truncated. Raises KedaError."""
    result = evaluate(formula, triggers)
    if result is None:
        if fallback_replicas is None:
            raise KedaError(f"the formula {formula!r} gave nil and there is no fallback")
        result = fallback_replicas * target
    return math.trunc(result * 1000)


def evaluate(formula: str, values: Mapping[str, float | None]) -> float | None:
    """The value of the formula; None is expr's nil. Raises KedaError."""
    return _Parser(formula, values).parse()


class _Parser:
    """Precedence as in expr, loosest first: + -, * / %, unary -, **, ??."""

    def __init__(self, formula: str, values: Mapping[str, float | None]) -> None:
        self._formula, self._values = formula, values
        self._tokens = self._split(formula)
        self._at = 0

    def _split(self, formula: str) -> list[str]:
        tokens, at, end = [], 0, len(formula.rstrip())
        while at < end:
            match = _TOKEN.match(formula, at)
            if match is None:
                raise KedaError(f"cannot read {formula[at:].strip()[0]!r} in formula {formula!r}")
            tokens.append(match.group().strip())
            at = match.end()
        return tokens

    def parse(self) -> float | None:
        value = self._sum()
        if self._peek():
            raise KedaError(f"{self._peek()!r} is not expected in formula {self._formula!r}")
        return value

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        token = self._peek()
        if token and token in wanted:
            self._at += 1
            return token
        return ""

    def _need(self, token: str) -> None:
        if not self._take(token):
            raise KedaError(f"{token!r} is missing in formula {self._formula!r}")

    def _number(self, value: float | None) -> float:
        if value is None:
            raise KedaError(f"a nil trigger meets an operator in formula {self._formula!r}: use ??")
        return value

    def _coalesce(self) -> float | None:
        value = self._atom()
        while self._take("??"):
            right = self._atom()
            value = right if value is None else value
        return value

    def _sum(self) -> float | None:
        value = self._product()
        while op := self._take("+", "-"):
            left, right = self._number(value), self._number(self._product())
            value = left + right if op == "+" else left - right
        return value

    def _product(self) -> float | None:
        value = self._unary()
        while op := self._take("*", "/", "%"):
            left, right = self._number(value), self._number(self._unary())
            if op == "*":
                value = left * right
            elif right == 0.0:
                raise KedaError(f"division by zero in formula {self._formula!r}")
            else:
                value = left / right if op == "/" else math.fmod(left, right)
        return value

    def _unary(self) -> float | None:
        if self._take("-"):
            return -self._number(self._unary())
        value = self._coalesce()
        if self._take("**"):
            return float(self._number(value) ** self._number(self._unary()))
        return value

    def _atom(self) -> float | None:
        if self._take("("):
            value = self._sum()
            self._need(")")
            return value
        token = self._peek()
        self._at += 1
        if token[:1].isdigit():
            return float(token)
        if token in _FUNCTIONS and self._take("("):
            arguments = [self._number(self._sum())]
            while self._take(","):
                arguments.append(self._number(self._sum()))
            self._need(")")
            return self._call(token, arguments)
        if token == "nil":
            return None
        if token in self._values:
            return self._values[token]
        raise KedaError(f"no trigger is named {token!r} (formula {self._formula!r})")

    def _call(self, name: str, arguments: list[float]) -> float:
        if name in {"max", "min"}:
            return float(_FUNCTIONS[name](arguments))
        if len(arguments) != 1:
            raise KedaError(f"{name} takes one argument (formula {self._formula!r})")
        return float(_FUNCTIONS[name](arguments[0]))
