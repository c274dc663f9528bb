"""Compiled kernels are not taken from a cache that was filled from other sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.layers import kernel_cache

SCRIPT = "from headrace.engine.layers.kernel_cache import *; print(choose_cache_folder())"


def folder_chosen(environment: dict[str, str]) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


def test_the_folder_s_name_follows_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba itself compares only the file of the kernel, not those of its helpers."""
    before = kernel_cache.sources_digest()
    for folder in ("layers", "quant"):
        (tmp_path / folder).mkdir()
        for path in (Path(kernel_cache.__file__).parents[1] / folder).glob("*.py"):
            (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(kernel_cache, "_ENGINE", tmp_path)
    assert kernel_cache.sources_digest() == before
    with (tmp_path / "quant" / "simd.py").open("a") as file:
        file.write("# changed\n")
    assert kernel_cache.sources_digest() != before


def test_stale_folders_of_this_installation_are_removed() -> None:
    stale = Path(kernel_cache.__file__).parent / "__pycache__" / "headrace-kernels-0123"
    stale.mkdir(parents=True)
    folder = folder_chosen({"NUMBA_CACHE_DIR": ""})
    assert folder.parent == stale.parent
    assert not stale.exists()


def test_a_shared_folder_keeps_what_other_versions_compiled(tmp_path: Path) -> None:
    """A node's, during a rollout."""
    (tmp_path / "headrace-kernels-0123").mkdir()
    folder = folder_chosen({"NUMBA_CACHE_DIR": str(tmp_path)})
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "headrace-kernels-0123"}


def test_where_nothing_can_be_written_a_temporary_folder_serves(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    folder = folder_chosen({"NUMBA_CACHE_DIR": str(blocked)})
    assert folder.is_dir() and blocked not in folder.parents
