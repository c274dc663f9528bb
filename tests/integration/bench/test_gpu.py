"""The GPU benchmark rehearsed on the CPU: every item runs end to end with tiny shapes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.worker.bench.gpu.__main__ import main
from headrace.worker.bench.gpu.items import ITEMS

FIGURES = {
    "tests": 1,
    "linear": 9,
    "large": 1,
    "small": 2,
    "prefix": 3,
    "kernels": 11,
    "transformers": 3,
    "queue": 3,
    "deterministic": 1,
}
"""Rows that each item writes."""


def test_every_item_runs_on_a_cpu_with_tiny_shapes(tmp_path: Path) -> None:
    assert main(["--tiny", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "gpu.json").read_text())
    results = {result["item"]: result for result in document["items"]}
    assert list(results) == [item.name for item in ITEMS]
    for name, rows in FIGURES.items():
        result = results[name]
        assert result["status"] == "done", (name, result)
        assert len(result["rows"]) == rows, (name, result["rows"])
        assert all(row["value"] > 0 for row in result["rows"])
    assert results["queue"]["rows"][1]["what"] == "through Redis"
    assert results["tests"]["rows"][0]["failed"] == 0
    assert not any("met" in row for result in results.values() for row in result.get("rows", []))
    report = (tmp_path / "gpu.md").read_text()
    assert document["device"] in report
    assert "A rehearsal" in report
    for item in ITEMS:
        assert f"### {item.title}" in report


def test_a_cut_item_keeps_what_it_has(tmp_path: Path) -> None:
    """Killed at the limit while it measures: the figures so far are in the report."""
    from headrace.worker.bench.gpu import __main__ as driver
    from headrace.worker.bench.gpu.items import Item
    from headrace.worker.bench.gpu.record import Record

    path = tmp_path / "small.json"
    record = Record(path, "small")
    record.add("first", 12.5, "s", at_most=20.0)
    kept = path.read_text()

    item = Item("small", "Small", "engines", "small", 1)
    script = (
        f"import pathlib, time; pathlib.Path({str(path)!r}).write_text({kept!r}); time.sleep(60)"
    )
    real = subprocess.Popen

    def hanging(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        return real([sys.executable, "-c", script], **options)  # type: ignore[call-overload,no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.subprocess, "Popen", hanging)
        result = driver._run(item, path, True, 2.0)
    assert result["status"] == "cut"
    assert result["rows"] == [
        {"what": "first", "value": 12.5, "unit": "s", "target": "<= 20", "met": True}
    ]


def test_measuring_the_engine_needs_no_queue_and_no_client() -> None:
    """On a bare GPU machine Redis, RQ and the rest of the client may be missing."""
    code = """
import sys
for name in ("redis", "rq", "pydantic", "orjson", "click", "tqdm", "prometheus_client",
             "transformers"):
    sys.modules[name] = None
import headrace.worker.bench.gpu.__main__
import headrace.worker.bench.gpu.items
import headrace.worker.bench.gpu.engines, headrace.worker.bench.gpu.kernels
import headrace.worker.bench.gpu.packed, headrace.worker.bench.gpu.kernel_tests
"""
    subprocess.run([sys.executable, "-c", code], check=True)
