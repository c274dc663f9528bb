"""`headrace bench` on a user's model and prompts, with the real child processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from headrace.engine.planner.calibration import read_measurement


def test_a_users_model_and_prompts_are_compared_in_one_run(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Three systems, the same ids: 4 + 5 + ... + 9 = 39 tokens out of each, and equal ones, since
    all compute in float32. A child that fails would leave its row without times."""
    command = [sys.executable, "-m", "headrace.producer.cli", "bench", "--model", str(model)]
    command += ["--prompts", str(prompts), "--repeats", "1", "--threads", "1"]
    command += ["--dtype", "float32", "--out", str(tmp_path), "--kv-cache-memory", "16M"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADRACE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["system"]: row for row in report["rows"]}
    assert list(rows) == [
        "headrace engine",
        "headrace through the queue",
        "Transformers, batches of 16",
    ]
    for row in rows.values():
        assert row["error"] is None
        assert row["workload"] == "mine"
        assert (row["output_tokens"], row["exact"], len(row["times_s"])) == (39, 6, 1)
        assert row["peak_rss_bytes"] > 1 << 20
        assert row["system"] in done.stdout
    assert report["threads"] == 1
    _, fitted = read_measurement(tmp_path / "cache" / "measurement.json")
    assert fitted.points == 5, "a run leaves what `headrace plan` reads"
    assert not (tmp_path / "queue.json").exists(), "the queue alone is not what was asked for"
