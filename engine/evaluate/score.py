"""What a scorer says of one answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """`value` 0 to 1; `json_valid`: whether it is JSON at all, None where no JSON was asked for."""

    correct: bool
    value: float
    why: str = ""
    json_valid: bool | None = None

    @classmethod
    def of(cls, correct: bool, why: str = "") -> "Score":
        return cls(correct, float(correct), why)
