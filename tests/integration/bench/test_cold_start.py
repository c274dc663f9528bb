"""`headrace bench --cold-start` with the tiny model: real workers, real phases."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.worker.bench.__main__ import main
from headrace.worker.metrics import PHASES


def test_a_start_is_measured_by_phase_beside_the_bare_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch: compiling kernels would take most of the test."""
    monkeypatch.setenv("HEADRACE_BACKEND", "torch")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "mine")
    arguments = ["--cold-start", "--model", str(model), "--repeats", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert os.environ["NUMBA_CACHE_DIR"] == "mine", "the caller's setting is back"
    result = json.loads((tmp_path / "cold_start.json").read_text())
    for start in (result["first"], result["later"]):
        assert all(start[phase] > 0 for phase in PHASES)
        assert start["answered"] == pytest.approx(start["total"] + start["first_token"])
        assert start["answered"] > start["bare"] > 0
    assert f"| first token | {result['first']['first_token']:.2f} |" in done.stdout
