"""Scores answers that must be JSON: valid, of a schema, with the expected values.

The answer must be JSON as a whole; one Markdown fence around it is taken off, since chat models
write it. Names twice in an object, NaN and infinities are no JSON.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.engine.evaluate.fields import Fields
from headrace.engine.evaluate.score import Score

_FENCED = re.compile(r"```[\w-]*[ \t]*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """`validator`: of jsonschema; `expected`: values that it must have under these names, and may
    have others beside; `anywhere`: the first JSON value inside of other text counts too."""

    validator: Any
    expected: Any = None
    ignore_case: bool = False
    anywhere: bool = False

    @classmethod
    def read(cls, fields: Fields) -> "JsonSchema":
        schema = fields.any("schema")
        if not isinstance(schema, dict | bool):
            raise ValueError(f"score.schema is {schema!r:.60}; a JSON Schema is needed")
        return cls(
            _validator(schema),
            fields.any("expected"),
            fields.boolean("ignore_case"),
            fields.boolean("anywhere"),
        )

    def score(self, answer: str) -> Score:
        try:
            value = parse(answer)
            valid = True
        except ValueError as error:
            valid, problem = False, f"no JSON: {error}"
            value = first_value(answer) if self.anywhere else None
            if value is None:
                return Score(False, 0.0, problem, json_valid=False)
        for fault in self.validator.iter_errors(value):
            return Score(False, 0.0, f"{fault.json_path}: {fault.message:.80}", json_valid=valid)
        if self.expected is not None:
            wrong = next(differences(self.expected, value, self.ignore_case), None)
            if wrong is not None:
                return Score(False, 0.0, wrong, json_valid=valid)
        return Score(True, 1.0, json_valid=valid)


def parse(answer: str) -> Any:
    """The JSON value that the answer is. Raises ValueError."""
    text = answer.strip()
    fenced = _FENCED.fullmatch(text)
    return _loads(fenced[1] if fenced else text)


def first_value(answer: str) -> Any:
    """The first object or list inside of the answer that is JSON; None without one."""
    for start in re.finditer(r"[{\[]", answer):
        try:
            return _DECODER.raw_decode(answer, start.start())[0]
        except (ValueError, RecursionError):
            continue
    return None


def differences(expected: Any, given: Any, ignore_case: bool, path: str = "$") -> Iterator[str]:
    """Where `given` lacks or contradicts `expected`; what it has beyond names of an object is no
    difference. true is not 1, and 1 is 1.0."""
    if isinstance(expected, Mapping) and isinstance(given, Mapping):
        for name, value in expected.items():
            if name not in given:
                yield f"{path}.{name} is missing"
            else:
                yield from differences(value, given[name], ignore_case, f"{path}.{name}")
    elif isinstance(expected, list) and isinstance(given, list):
        if len(expected) != len(given):
            yield f"{path} has {len(given)} entries, not {len(expected)}"
            return
        for index, pair in enumerate(zip(expected, given, strict=True)):
            yield from differences(*pair, ignore_case, f"{path}[{index}]")
    elif not _same(expected, given, ignore_case):
        yield f"{path} is {given!r:.40}, not {expected!r:.40}"


def _same(expected: Any, given: Any, ignore_case: bool) -> bool:
    if isinstance(expected, str) and isinstance(given, str):
        a, b = " ".join(expected.split()), " ".join(given.split())
        return a.casefold() == b.casefold() if ignore_case else a == b
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    return bool(expected == given)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def _loads(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _validator(schema: Any) -> Any:
    """Raises ValueError. Nothing is ever fetched: references may point into the schema only."""
    import jsonschema
    from referencing import Registry

    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ValueError(
                f"score.schema refers to {reference!r}; only references inside (#) are read"
            )
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise ValueError(
            f"score.schema is no JSON Schema: {error.json_path}: {error.message}"
        ) from None
    return kind(schema, registry=Registry())


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if name in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
