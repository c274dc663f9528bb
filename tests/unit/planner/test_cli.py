"""`headrace plan` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.engine.planner.calibration import Point, write_measurement
from headrace.engine.planner.cli import plan
from headrace.engine.planner.units import duration, parse_duration, parse_size

REQUIRED = {
    "gpu",
    "count",
    "scheme",
    "weights_bytes",
    "kv_bytes_per_token",
    "max_sequences",
    "fits",
    "seconds",
    "cost",
    "reason",
}


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plan, arguments)


def rows(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "--json")
    found = json.loads(result.stdout)
    assert isinstance(found, list)
    return found


def test_json_has_a_row_a_candidate_with_all_its_columns() -> None:
    found = rows("Qwen2-7B", "--gpu", "T4,A10", "--count", "1,2", "--scheme", "16-bit,int8,int4")
    assert len(found) == 2 * 2 * 3
    for row in found:
        assert row.keys() >= REQUIRED
        assert row["reason"]
        assert (row["cost"] is not None) == row["fits"]
    assert sum(row["recommended"] for row in found) == 1


def test_json_numbers_are_those_of_the_model() -> None:
    """Qwen2-7B: 7.616 B parameters in two bytes, 56 KiB a token."""
    (row,) = rows("Qwen2-7B", "--gpu", "A10", "--count", "1", "--scheme", "bf16")
    assert row["weights_bytes"] == 2 * 7_615_616_512
    assert row["kv_bytes_per_token"] == 56 * 1024
    spent = row["context_bytes"] + row["activation_bytes"] + row["graph_bytes"]
    spent += row["table_bytes"] + row["weights_bytes"] + row["kv_cache_bytes"]
    assert spent == row["usable_bytes"]
    assert row["max_sequences"] == row["kv_cache_bytes"] // (1280 * 56 * 1024)


def test_the_table_names_the_recommendation_and_its_reasons() -> None:
    result = run("Qwen2-7B", "--gpu", "T4,A10", "--concurrency", "16")
    assert result.exit_code == 0
    assert "<- recommended" in result.stdout
    assert "70% and 30%" in result.stdout
    assert "list prices of 2025-07" in result.stdout
    assert "roofline estimates" in result.stdout


def test_prices_given_are_used_and_no_longer_called_list_prices() -> None:
    (row,) = rows("Qwen2-7B", "--gpu", "A10", "--count", "1", "--scheme", "bf16", "--price", "36")
    assert row["cost"] == pytest.approx(row["seconds"] / 100, abs=0.01)
    result = run("Qwen2-7B", "--gpu", "A10", "--price", "A10=36/1")
    assert "list prices" not in result.stdout


def test_several_models_are_compared() -> None:
    result = run("Qwen2-72B", "Qwen2-7B", "--gpu", "A10", "--count", "1,8")
    assert "Compared: Qwen2-72B on 8 x A10" in result.stdout
    assert "times cheaper" in result.stdout


def test_8_bit_kv_doubles_the_sequences_nearly() -> None:
    arguments = ("Qwen2-7B", "--gpu", "L40S", "--count", "1", "--scheme", "bf16")
    (wide,) = rows(*arguments)
    (narrow,) = rows(*arguments, "--kv-dtype", "fp8")
    assert 1.9 < narrow["max_sequences"] / wide["max_sequences"] <= 2.0
    assert narrow["kv_bytes_per_token"] == 28 * 2 * 4 * (128 + 4)


def test_a_measurement_replaces_the_defaults_of_its_card(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    points = [
        Point("decode", "Qwen2-7B", "bf16", 1 / 40, batch=1, context=1),
        Point("prefill", "Qwen2-7B", "bf16", 0.4, tokens=2048),
    ]
    write_measurement(path, "A100", points)
    arguments = ("Qwen2-7B", "--gpu", "A100,H100", "--count", "1", "--scheme", "bf16")
    before = {row["gpu"]: row for row in rows(*arguments)}
    after = {row["gpu"]: row for row in rows(*arguments, "--measurement", str(path))}
    assert after["A100-80"]["basis"] == "calibrated on 2 measurements"
    assert after["A100-80"]["seconds"] > 2 * before["A100-80"]["seconds"]
    assert after["H100"] == before["H100"]


def test_the_machines_own_measurement_is_found(tmp_path: Path) -> None:
    point = Point("decode", "Qwen2-7B", "bf16", 1 / 40, batch=1, context=1)
    write_measurement(tmp_path / "cache" / "measurement.json", "A100", [point])
    (row,) = rows("Qwen2-7B", "--gpu", "A100", "--count", "1", "--scheme", "bf16")
    assert row["basis"] == "calibrated on 1 measurements"


def test_nothing_fits_exits_with_1() -> None:
    result = run("Llama-3.1-405B", "--gpu", "T4", "--count", "1")
    assert result.exit_code == 1
    assert "no recommendation" in result.stdout
    assert "Nearest: 1 x T4 in int4-g128" in result.stdout


def test_a_missed_deadline_exits_with_1() -> None:
    assert run("Qwen2-7B", "--gpu", "T4", "--deadline", "1m").exit_code == 1
    assert run("Qwen2-7B", "--gpu", "T4", "--deadline", "2d").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Qwen2-7B", "--gpu", "K80"), "unknown card 'K80'"),
        (("Qwen2-7B", "--gpu", ","), "names no card"),
        (("Qwen9-7B",), "Did you mean"),
        (("no/config.json",), "does not exist"),
        (("Qwen2-7B", "--scheme", "int5"), "unknown weight scheme 'int5'"),
        (("Qwen2-7B", "--prompt", "0"), "prompt must be at least 1"),
        (("Qwen2-7B", "--output", "-5"), "output must be at least 1"),
        (("Llama-2-7B", "--prompt", "5000"), "takes 4,096 positions"),
        (("Qwen2-7B", "--shared-prefix", "2000"), "longer than the prompt"),
        (("Qwen2-7B", "--deadline", "soon"), "no duration"),
        (("Qwen2-7B", "--price", "A10=cheap"), "A10=cheap"),
        (("Qwen2-7B", "--count", "0"), "between 1 and 1024"),
        (("Qwen2-7B", "--count", "two"), "no list of numbers"),
        (("Qwen2-7B", "--kv-dtype", "int2"), "unknown KV type"),
        (("Qwen2-7B", "--kv-cache-memory", "lots"), "no size"),
        (("Qwen2-7B", "--measurement", "no.json"), "no.json cannot be read"),
        (("Qwen2-7B", "--requests", "9" * 400), "requests must be at least 1 and at most"),
        (("Qwen2-7B", "--output", "9" * 30), "output must be at least 1 and at most"),
        (("Qwen2-7B", "--concurrency", "0"), "concurrency must be at least 1"),
        (("Qwen2-7B", "--concurrency", "9" * 400), "concurrency must be at least 1 and at most"),
        (("Qwen2-7B", "--deadline", "9" * 400), "longer than any job"),
        (("Qwen2-7B", "--deadline", "0"), "the deadline must be positive"),
        (("Qwen2-7B", "--kv-cache-memory", "9" * 400), "no size that memory can have"),
        (("Qwen2-7B", "--kv-cache-memory", "0"), "no size that memory can have"),
        (("Qwen2-7B", "--interruptions", "nan"), "--interruptions nan is no such number"),
        (("Qwen2-7B", "--interruptions", "inf"), "--interruptions inf is no such number"),
        (("Qwen2-7B", "--gpu-memory-utilization", "nan"), "utilization nan is no such number"),
        (("Qwen2-7B", "--price", "A10=nan"), "is out of range"),
        (("Qwen2-7B", "--max-num-seqs", "9" * 30), "1<=x<=65536"),
        (("9" * 200 + "B",), "no size of a language model"),
        (("x" * 400,), "File name too long"),
        (("~nobody-of-that-name/x",), "home directory"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not result.stdout


def test_known_names_are_listed() -> None:
    result = run("--list")
    assert result.exit_code == 0
    for word in ("Qwen2.5-72B", "MI300X", "gguf-q4_k_m", "no bf16"):
        assert word in result.stdout


def test_planning_imports_neither_torch_nor_numpy() -> None:
    """In a process of its own, with every card and count."""
    code = (
        "import sys\n"
        "from headrace.engine.planner.cli import plan\n"
        "plan(['Qwen2.5-72B', '--all'], standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'redis', 'rq', 'gguf'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Qwen2.5-72B: " in done.stdout


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("15m", 900),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1.5 h", 5400),
        ("1d", 86400),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_durations_and_sizes_are_written_and_read() -> None:
    assert [duration(s) for s in (30, 600, 10_000, 400_000)] == ["30 s", "10 min", "2.8 h", "4.6 d"]
    assert [parse_size(t) for t in ("1GiB", "1G", "1GB", "512M", "7")] == [
        2**30,
        2**30,
        10**9,
        2**29,
        7,
    ]
