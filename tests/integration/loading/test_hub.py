"""Models by hub id: the real huggingface_hub against a hub on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from hub import serve_hub

REPO = "someone/Tiny-Llama"

LOAD = """
import sys
from headrace.engine.config import EngineConfig
from headrace.engine.errors import CheckpointError
from headrace.engine.loading.source import resolve_model
from headrace.engine.runner import load_runner
try:
    print(resolve_model(sys.argv[1]))
    print(load_runner(EngineConfig(sys.argv[1], kv_cache_memory_bytes=1 << 22)).model_name)
except CheckpointError as error:
    sys.exit(f"refused: {error}")
"""


def child(home: Path, endpoint: str, repo: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOAD, repo]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny.write_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle that nobody should fetch")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"a second copy")
    return folder


def test_a_hub_id_is_fetched_once_and_then_served_from_the_cache(
    model: Path, tmp_path: Path
) -> None:
    with serve_hub(REPO, model) as (endpoint, requests):
        fetched = child(tmp_path / "home", endpoint, REPO)
        assert fetched.returncode == 0, fetched.stderr
        folder = Path(fetched.stdout.split()[0])
        assert (folder / "model.safetensors").read_bytes() == (
            model / "model.safetensors"
        ).read_bytes()
        assert not any(path.endswith((".bin", "consolidated.safetensors")) for path in requests)
    # The hub is gone: the cache still holds the model, which is named like its repository.
    loaded = child(tmp_path / "home", endpoint, REPO)
    assert (loaded.returncode, loaded.stdout) == (0, f"{folder}\ntiny-llama\n"), loaded.stderr


def test_an_unknown_hub_id_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    with serve_hub(REPO, model) as (endpoint, _):
        refused = child(tmp_path / "home", endpoint, "someone/else")
    assert refused.returncode == 1
    assert refused.stderr.startswith("refused: someone/else cannot be brought from the hub")


def test_a_hub_that_is_away_is_said_so(tmp_path: Path) -> None:
    refused = child(tmp_path / "home", "http://127.0.0.1:9", REPO)
    assert refused.returncode == 1
    assert f"refused: {REPO} cannot be brought from the hub" in refused.stderr
