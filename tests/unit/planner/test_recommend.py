"""The decision rules, and the comparisons that a recommendation makes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.planner.candidates import Candidate, Options, candidates
from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.hardware import find_card
from headrace.engine.planner.job import Job
from headrace.engine.planner.memory import Settings
from headrace.engine.planner.prices import price_table
from headrace.engine.planner.recommend import (
    Recommendation,
    apply_rules,
    compare,
    pick_market,
    recommend,
    smaller_model,
)
from headrace.engine.planner.resolve import resolve


def options(cards: str = "A10", **changes: Any) -> Options:
    fields: dict[str, Any] = {
        "job": Job(requests=10_000, prompt=1024, output=256),
        "settings": Settings(),
        "cards": [find_card(c) for c in cards.split(",")],
        "prices": price_table(),
        "counts": (1,),
    }
    return Options(**(fields | changes))


def decide(model: str, chosen: Options) -> tuple[Recommendation, Sequence[Candidate]]:
    found = resolve(model)
    rows = candidates(found, chosen)
    return recommend(found, rows, chosen), rows


def test_a_row_for_every_card_count_and_scheme() -> None:
    chosen = options("T4,A10", counts=(1, 2), schemes=("16-bit", "int8", "int4", "int3"))
    rows = candidates(resolve("Qwen2-7B"), chosen)
    keys = {(r.gpu, r.count, r.scheme) for r in rows}
    assert len(rows) == len(keys) == 2 * 2 * 4
    assert ("T4", 1, "fp16") in keys
    assert ("A10", 1, "bf16") in keys


def test_fits_in_16_bits_with_few_at_once_stays_16_bit() -> None:
    """An A10 holds 60 and more of Qwen2-7B's sequences in bf16: enough for 16."""
    chosen = options("A10", job=Job(10_000, 1024, 256, concurrency=16))
    found, _ = decide("Qwen2-7B", chosen)
    assert found.choice is not None
    assert found.choice.scheme == "bf16"
    assert "nothing to quantize for" in found.rule


def test_fits_but_many_at_once_goes_to_8_bits() -> None:
    """Of 256 at once bf16 holds a quarter; 8 bits hold over twice as many and cost less."""
    found, rows = decide("Qwen2-7B", options("A10"))
    assert found.choice is not None
    assert found.choice.bits == 8
    assert found.rule.startswith("fits in 16 bits, but only")
    wide = next(r for r in rows if r.scheme == "bf16")
    assert found.choice.max_sequences > 2 * wide.max_sequences
    assert found.choice.cost is not None
    assert wide.cost is not None
    assert found.choice.cost < 0.95 * wide.cost


def test_8_bits_that_save_nothing_are_not_advised() -> None:
    """A batch large enough to be bound by arithmetic: weight-only int8 is no faster."""
    chosen = options("A100-80", schemes=("16-bit", "int8"), settings=Settings(max_num_seqs=1024))
    found, _ = decide("Qwen2-7B", chosen)
    assert found.choice is not None
    assert found.choice.scheme == "bf16"
    assert "save nothing" in found.rule


def test_does_not_fit_goes_to_4_bits_on_one_card() -> None:
    """Qwen2.5-14B is 29.5, 16.3 and 10 GB: on a T4 only INT4 fits."""
    found, rows = decide("Qwen2.5-14B", options("T4"))
    assert found.choice is not None
    assert found.choice.scheme == "int4-g128"
    assert found.rule == "does not fit in 16 bits: 4 bits on one card"
    assert {r.scheme for r in rows if not r.fits} == {"fp16", "int8", "int8-dynamic"}


def test_does_not_fit_but_8_bits_hold_all_goes_to_8() -> None:
    """Qwen2-7B on a T4: 14.19 GiB do not fit; INT8 does and holds the 16 wanted."""
    found, _ = decide("Qwen2-7B", options("T4", job=Job(10_000, 1024, 256, concurrency=16)))
    assert found.choice is not None
    assert found.choice.bits == 8
    assert any("may overflow fp16" in r for r in found.reasons)


def test_bigger_than_any_card_goes_to_several_and_is_marked() -> None:
    """Llama-3.1-70B in 4 bits (39.8 GB) on T4s: only a split holds it, and splits do not run."""
    found, rows = decide("Llama-3.1-70B", options("T4", counts=(1, 2, 4, 8)))
    assert found.choice is not None
    assert found.choice.count > 1
    assert found.choice.tensor_parallel > 1
    assert not found.choice.runnable
    assert any("tensor parallelism is not yet runnable" in r for r in found.reasons)
    assert all(not r.fits for r in rows if r.count == 1)


def test_4_bits_on_one_card_are_set_against_16_on_several() -> None:
    found, _ = decide("Qwen2.5-14B", options("T4", counts=(1, 2, 4)))
    assert any("Instead of fewer bits, 4 x T4 would hold it in fp16" in r for r in found.reasons)


def test_nothing_fits_says_what_is_nearest() -> None:
    found, rows = decide("Llama-3.1-405B", options("T4"))
    assert found.choice is None
    assert "exceed the 13.14 GiB usable by" in found.reasons[1]
    assert all(r.reason and not r.fits and r.cost is None for r in rows)


def test_the_70_30_rule_is_a_check_not_a_verdict() -> None:
    """Qwen2.5-72B in bf16 on 2 x A100-80 takes 86 % of each card and still fits."""
    chosen = options("A100-80", counts=(2,), schemes=("16-bit",))
    found, _ = decide("Qwen2.5-72B", chosen)
    assert found.choice is not None
    assert not found.choice.follows_70_30
    assert found.choice.weights_share == pytest.approx(0.855, abs=0.01)
    assert any("rule of 70% and 30% is broken, yet" in r for r in found.reasons)
    small, _ = decide("Qwen2-7B", options("A100-80"))
    assert any("rule of 70% and 30% holds" in r for r in small.reasons)


def test_the_cheapest_card_in_time_wins() -> None:
    """Without a deadline the cheapest; with a short one a faster card that costs more."""
    easy, _ = decide("Qwen2-7B", options("T4,H100", schemes=("int4",)))
    assert easy.choice is not None
    assert easy.choice.seconds is not None
    hurry = options("T4,H100", schemes=("int4",), job=Job(10_000, 1024, 256, deadline=900))
    quick, rows = decide("Qwen2-7B", hurry)
    assert quick.choice is not None
    assert quick.choice.gpu == "H100"
    assert quick.choice.meets_deadline
    assert [r.meets_deadline for r in rows] == [False, True]


def test_a_missed_deadline_says_how_many_cards_it_takes() -> None:
    chosen = options("A10", job=Job(100_000, 1024, 256, deadline=600))
    found, _ = decide("Qwen2-7B", chosen)
    assert found.choice is not None
    assert not found.choice.meets_deadline
    text = next(r for r in found.reasons if "is missed" in r)
    needed = int(text.split("about ")[1].split()[0])
    assert needed == pytest.approx((found.choice.seconds or 0) / 600, rel=0.05)


def test_more_cards_take_less_time_for_about_the_same_money() -> None:
    rows = candidates(resolve("Qwen2-7B"), options("A10", schemes=("int8",), counts=(1, 4)))
    one, four = rows
    assert four.tensor_parallel == 1
    assert four.seconds is not None
    assert one.seconds is not None
    assert four.seconds < 0.27 * one.seconds
    assert four.cost == pytest.approx(one.cost, rel=0.05)


def test_spot_is_advised_until_the_deadline_is_near() -> None:
    """Spot costs 40 % and takes a little longer; within 90 % of the deadline it is safe."""
    chosen = options("A10", schemes=("int8",))
    (row,) = candidates(resolve("Qwen2-7B"), chosen)
    assert row.seconds is not None
    assert row.spot_seconds is not None
    assert row.spot_seconds > row.seconds
    near = replace(chosen, job=replace(chosen.job, deadline=1.05 * row.seconds))
    far = replace(chosen, job=replace(chosen.job, deadline=2 * row.seconds))
    assert pick_market(row, chosen, "any") == "spot"
    assert pick_market(row, far, "any") == "spot"
    assert pick_market(row, near, "any") == "on-demand"
    assert pick_market(row, far, "on-demand") == "on-demand"


def test_spot_that_is_interrupted_all_the_time_is_not_advised() -> None:
    chosen = options("A10", schemes=("int8",), interruptions_per_hour=60)
    (row,) = candidates(resolve("Qwen2-7B"), chosen)
    assert pick_market(row, chosen, "any") == "on-demand"


def test_a_big_model_on_several_cards_is_set_against_a_small_one() -> None:
    """Llama-3.1-70B needs several A10; its 8B sibling fits on one."""
    chosen = options("A10", counts=(1, 2, 4, 8))
    found, _ = decide("Llama-3.1-70B", chosen)
    text = smaller_model(resolve("Llama-3.1-70B"), found, chosen)
    assert text is not None
    assert "Llama-3.1-8B on A10" in text
    assert "times cheaper" in text
    small, _ = decide("Llama-3.1-8B", chosen)
    assert smaller_model(resolve("Llama-3.1-8B"), small, chosen) is None
    assert compare([small, found]).count("; ") == 1


def test_a_group_of_the_scheme_is_never_cut_by_a_split() -> None:
    """Qwen2.5-72B: 29,568 columns over 2 cards are 115.5 groups of 128, but 231 of 64."""
    chosen = options("A100-40", counts=(2,), schemes=("int4-g128", "int4-g64"), tensor_parallel=2)
    cut, whole = candidates(resolve("Qwen2.5-72B"), chosen)
    assert not cut.fits
    assert "cuts a group of 128" in cut.reason
    assert whole.fits


def test_heads_that_do_not_divide_are_named() -> None:
    """Qwen2-7B has 28 heads: 8 cards cannot share them."""
    chosen = options("A10", counts=(8,), schemes=("bf16",), tensor_parallel=8)
    (row,) = candidates(resolve("Qwen2-7B"), chosen)
    assert row.reason == "28 attention heads do not divide over 8 cards"


def test_what_a_card_cannot_multiply_is_a_row_that_does_not_fit() -> None:
    chosen = options("T4", schemes=("bf16", "fp8"))
    rows = candidates(resolve("Qwen2-7B"), chosen)
    assert [r.fits for r in rows] == [False, False]
    assert rows[0].reason == "T4 has no bf16; use fp16"


def test_the_scheme_of_a_quantized_checkpoint_is_the_one_planned(tmp_path: Any) -> None:
    import json

    config = tmp_path / "config.json"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "max_position_embeddings": 131072,
                "quantization_config": gptq,
            }
        )
    )
    (row,) = candidates(resolve(str(config)), options("T4"))
    assert row.scheme == "gptq-int4-g64"


def test_lengths_beyond_the_model_are_refused() -> None:
    chosen = options("A10", job=Job(10, 4000, 200))
    with pytest.raises(PlanError, match=r"Llama-2-7B takes 4,096 positions.*4,200"):
        candidates(resolve("Llama-2-7B"), chosen)


def test_kv_of_a_small_multi_head_model_is_not_scaled_from_its_size() -> None:
    """SmolLM2-1.7B takes 192 KiB a token, Llama-3-8B 128: fewer sequences on equal KV memory."""
    chosen = options("A10", settings=Settings(kv_cache_memory=4 << 30), schemes=("bf16",))
    (small,) = candidates(resolve("SmolLM2-1.7B"), chosen)
    (large,) = candidates(resolve("Llama-3-8B"), chosen)
    assert small.max_sequences < large.max_sequences
    assert small.kv_bytes_per_token == 192 * 1024


def test_only_4_bit_schemes_compared_makes_no_claim_about_16() -> None:
    chosen = options("A10", schemes=("int4",))
    rows = candidates(resolve("Qwen2-7B"), chosen)
    found = apply_rules(rows, chosen)
    assert found is not None
    assert found[1] == "int4-g128 fits; 16 bits were not compared"
