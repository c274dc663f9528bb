"""Comparison, verdict and report of answers that are made up, so that every figure is known."""

from typing import Any

import pytest

from headrace.engine.evaluate.answers import Answer, common_prefix, repetition
from headrace.engine.evaluate.compare import compare
from headrace.engine.evaluate.errors import EvaluateError
from headrace.engine.evaluate.measure import Cost, Measured
from headrace.engine.evaluate.report import as_json, as_markdown, certainty
from headrace.engine.evaluate.score import Score
from headrace.engine.evaluate.text import Distance, TextScore
from headrace.engine.evaluate.variant import Variant
from headrace.engine.evaluate.verdict import Limits, judge
from headrace.engine.models.decoder import WeightMemory


def measured(pattern: str, **changes: Any) -> Measured:
    """`pattern`: one letter a question, r right, w wrong, j wrong and no JSON though it was asked,
    v right and valid JSON."""
    answers = [
        Answer(
            f"q{index}",
            "even" if index % 2 == 0 else "odd",
            Score(letter in "rv", float(letter in "rv"), "", {"j": False, "v": True}.get(letter)),
            "text",
            (1, 2, index if letter in "rv" else -1),
            "stop",
        )
        for index, letter in enumerate(pattern)
    ]
    values: dict[str, Any] = {
        "variant": Variant("m", "int8"),
        "quantization": "int8",
        "dtype": "float32",
        "backend": "cpu",
        "answers": answers,
        "cost": Cost(1.0, 2.0, 100, WeightMemory(10, 20, 30, 4), 512, None),
        **changes,
    }
    return Measured(**values)


def failed(reference: Measured, candidate: Measured, **limits: Any) -> list[str]:
    verdict = judge(compare(reference, candidate), Limits(**limits))
    return [check.name for check in verdict.failed]


def test_losses_and_gains_are_counted_pair_by_pair() -> None:
    found = compare(measured("rrrrrwww"), measured("rrwwwrww"))
    accuracy = found.accuracy
    assert (accuracy.reference, accuracy.candidate) == (5, 3)
    assert (accuracy.lost, accuracy.gained, accuracy.total) == (3, 1, 8)
    assert accuracy.difference == -0.25
    assert accuracy.p_value == pytest.approx(0.625)  # 2 (1 + 4) / 16
    assert found.by_category == {"even": (3, 1, 4), "odd": (2, 2, 4)}
    assert [a.question for a, _ in found.lost] == ["q2", "q3", "q4"]
    assert [a.question for a, _ in found.gained] == ["q5"]
    assert found.agreement is not None
    assert found.agreement.identical == 0.5
    assert found.agreement.shared == pytest.approx((4 * 1 + 4 * 2 / 3) / 8)


def test_a_drop_beyond_the_limit_fails_and_one_within_holds() -> None:
    reference = measured("r" * 40)
    assert failed(reference, measured("r" * 38 + "w" * 2)) == []
    assert failed(reference, measured("r" * 37 + "w" * 3)) == ["accuracy, observed"]
    assert failed(reference, measured("r" * 37 + "w" * 3), drop=0.1) == []


@pytest.mark.parametrize("name", ["drop", "significance", "perplexity", "kl", "agreement"])
def test_a_limit_that_is_no_number_would_let_everything_hold_and_is_refused(name: str) -> None:
    with pytest.raises(EvaluateError, match=f"the limit {name} is nan"):
        Limits(**{name: float("nan")})


def test_a_significant_loss_fails_however_large_the_accepted_drop() -> None:
    """6 lost and none gained: p 0.031."""
    reference = measured("r" * 60)
    assert failed(reference, measured("r" * 55 + "w" * 5), drop=0.5) == []
    assert failed(reference, measured("r" * 54 + "w" * 6), drop=0.5) == ["no significant loss"]
    assert failed(measured("r" * 54 + "w" * 6), reference) == []


def test_confidence_asks_for_more_questions() -> None:
    """No loss seen in 50: the interval still reaches 7 points down; in 100 it reaches 4."""
    names = ["accuracy, lower end of the interval"]
    assert failed(measured("r" * 50), measured("r" * 50), confident=True) == names
    assert failed(measured("r" * 100), measured("r" * 100), confident=True) == []


def test_json_that_breaks_fails() -> None:
    reference = measured("v" * 20 + "r" * 80)
    assert failed(reference, measured("v" * 18 + "jj" + "r" * 80)) == ["valid JSON"]
    assert failed(reference, measured("v" * 19 + "j" + "r" * 80)) == []


def test_one_broken_json_of_a_few_decides_nothing_and_two_do() -> None:
    """Of 12, one is 8.3 points."""
    reference = measured("v" * 12 + "r" * 80)
    assert failed(reference, measured("v" * 11 + "j" + "r" * 80)) == []
    assert failed(reference, measured("v" * 10 + "jj" + "r" * 80)) == ["valid JSON"]


def test_text_limits_and_what_was_not_measured() -> None:
    distance = Distance(0.2, 0.1, 0.5, 0.9, 0.8)
    reference = measured("rrr", text=TextScore(100.0, 50, 200))
    worse = measured("rrr", text=TextScore(106.0, 50, 200), distance=distance)
    found = compare(reference, worse)
    assert found.perplexity_increase == pytest.approx(2.718281828**0.12 - 1)
    assert failed(reference, worse) == ["perplexity"]
    assert failed(reference, worse, perplexity=0.2) == []
    assert failed(reference, worse, perplexity=None, kl=0.1) == ["KL divergence"]
    assert failed(reference, worse, perplexity=None, kl=0.2, agreement=0.9) == ["same first token"]
    assert failed(measured("rrr"), measured("rrr")) == []
    assert failed(measured("rrr"), measured("rrr"), kl=0.5) == ["KL divergence"]


def test_accuracy_of_its_own() -> None:
    assert failed(measured("rw"), measured("rw"), accuracy=0.6) == ["accuracy of its own"]
    assert failed(measured("rw"), measured("rw"), accuracy=0.5) == []


def test_repetition_and_common_prefix() -> None:
    """a b a b a b a b: five 4-grams, two of them distinct."""
    assert repetition([1, 2] * 4) == pytest.approx(3 / 5)
    assert repetition(list(range(20))) == 0.0
    assert repetition([1, 1, 1, 1]) == 0.0
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([], [1]) == 0


def test_report_says_what_was_found_and_how_little_it_is() -> None:
    found = compare(measured("r" * 50), measured("r" * 46 + "w" * 4))
    verdict = judge(found, Limits())
    text = as_markdown(found, verdict)
    assert text.startswith("# m int8 against m int8: does not hold\n")
    assert "50 questions tell little: a loss is significant from 6 more lost" in text
    assert "4 lost, 0 gained" in text and "## Lost" in text and "## Gained" not in text
    assert "| weights MB" in text
    assert "can be lost" not in text
    weak = compare(measured("r" * 3 + "w" * 47), measured("w" * 50))
    assert "Only the 3 that the reference answers rightly can be lost" in certainty(weak)
    many = certainty(compare(measured("r" * 1000), measured("r" * 1000)))
    assert many.startswith("1,000 questions: a loss is significant from 6 more lost")
    values = as_json(found, verdict)
    assert values["holds"] is False
    assert values["accuracy"]["difference"] == pytest.approx(-0.08)
    assert len(values["candidate"]["answers"]) == 50
    assert values["candidate"]["cost"]["tokens_per_second"] == 50.0


def test_variants_are_named_as_typed_and_floats_choose_their_type() -> None:
    assert Variant.read("a/smol.gguf", "int4-g64", kv="int8").label == "smol int4-g64, kv int8"
    assert Variant.read("m", "bf16") == Variant("m", "float", "bfloat16")
    assert Variant.read("m", "float").dtype == "auto"
    assert Variant.read("m", None) == Variant("m")
