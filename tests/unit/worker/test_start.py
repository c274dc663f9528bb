"""A worker that was installed without its engine."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.config import EngineConfig
from headrace.producer.local import served_name
from headrace.worker.config import WorkerConfig, default_served_name
from headrace.worker.start import StartFailed, open_redis

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


NOWHERE = "redis://localhost:1/0"


@pytest.mark.parametrize("model", ["/models/My Model (v2)", "модель.gguf", "a.high"])
def test_a_models_name_that_cannot_be_a_queues_says_what_to_choose(model: str) -> None:
    with pytest.raises(StartFailed, match="--served-model-name"):
        open_redis(WorkerConfig(EngineConfig(model=model), NOWHERE))


@pytest.mark.parametrize("name", ["a b", "a:b", "x" * 129, "a\n"])
def test_a_workers_name_that_cannot_be_a_key_is_refused_by_name(name: str) -> None:
    with pytest.raises(StartFailed, match="--name"):
        open_redis(WorkerConfig(EngineConfig(model="m"), NOWHERE, name=name))


def test_a_folder_without_a_name_is_served_under_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Model-1B"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert {f(m) for f in (served_name, default_served_name) for m in (".", "./")} == {"model-1b"}
