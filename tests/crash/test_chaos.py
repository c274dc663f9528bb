"""The short form of `make chaos`: 2,000 jobs while everything around them breaks."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("chaos.py")
SEED = os.environ.get("HEADRACE_CHAOS_SEED", "1")


def test_chaos_every_accepted_job_has_exactly_one_terminal_result(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(PROGRAM), "--seconds", "40", "--jobs", "2000"]
    command += ["--seed", SEED, "--folder", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-6000:]
    assert "0 violations" in ran.stdout
