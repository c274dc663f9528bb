"""A plan for a GGUF file says how the file runs when nothing is asked for, and what to ask for."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.engine.planner import blocks
from headrace.engine.planner.cli import plan

DATA = Path(__file__).parents[2] / "data" / "gguf"
MODEL = str(DATA / "Q4_0" / "model.gguf")


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def run(model: str, *arguments: str) -> Result:
    """A CPU with 16-bit weights only where it is asked for."""
    return CliRunner().invoke(
        plan, [model, "--count", "1", "--prompt", "64", "--output", "32", *arguments]
    )


def test_a_small_file_that_is_planned_packed_has_to_be_asked_for() -> None:
    result = run(MODEL, "--gpu", "cpu", "--scheme", "gguf-q4_0")
    assert (
        "Give --quantization gguf: a file of up to 1 GiB of float32 is run as floats"
        in result.output
    )


def test_a_small_file_planned_as_floats_says_how_to_keep_it_packed() -> None:
    result = run(MODEL, "--gpu", "cpu", "--scheme", "fp32")
    assert "the default up to 1 GiB of float32" in result.output
    assert "--quantization gguf keeps them packed: 0.1 MB instead of 0.6 MB" in result.output


def test_a_large_file_stays_packed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "FLOATS_UP_TO", 1 << 10)
    result = run(MODEL, "--gpu", "cpu", "--scheme", "gguf-q4_0")
    assert "The file's blocks stay packed" in result.output
    assert "Give --quantization" not in result.output
    as_floats = run(MODEL, "--gpu", "cpu", "--scheme", "fp32")
    assert "Give --quantization float: above" in as_floats.output


def test_blocks_on_a_card_are_marked_as_not_run() -> None:
    """The engine refuses `gguf` there by name."""
    result = run(MODEL, "--gpu", "T4", "--scheme", "gguf-q4_0")
    assert "GGUF blocks are not yet multiplied on T4 (int8, int4-g32 are)" in result.output
    assert "--quantization gguf" not in result.output


def test_a_file_of_floats_has_no_blocks_to_speak_of() -> None:
    result = run(str(DATA / "F16" / "model.gguf"), "--gpu", "cpu")
    assert result.exit_code == 0
    assert "packed" not in result.output
