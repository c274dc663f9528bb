"""A worker that was installed without its engine."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["torch"] = None
from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.worker.coldstart import ColdStart
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.start import load_engine
class Config:
    engine = EngineConfig(model="none")
try:
    load_engine(Config(), ColdStart(WorkerMetrics("m")))
except EngineError as error:
    print(error)
"""


def test_a_missing_engine_is_told_with_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert "pip install 'headrace[worker]'" in done.stdout
