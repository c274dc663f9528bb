"""Compiled kernels are not taken from a cache that was filled from other sources."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.layers import kernel_cache

ENGINE = Path(kernel_cache.__file__).parents[1]
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


def numba_names(path: Path) -> set[str]:
    """What a file takes from numba when it is imported."""
    body = ast.parse(path.read_text()).body
    found = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name
        for node in found
        if (node.module or "").startswith("numba")
        for alias in node.names
    }


def engine_imports(path: Path) -> set[Path]:
    """The engine's files that a file names at its top, this way or that."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    prefix = "headrace.engine."
    files = {
        ENGINE / f"{name.removeprefix(prefix).replace('.', '/')}.py"
        for name in names
        if name.startswith(prefix)
    }
    return {file for file in files if file.is_file()}


def kernel_sources() -> list[Path]:
    """Every file with compiled code in it, and whatever those are made of. How the folder is
    chosen is no part of a kernel."""
    files = ENGINE.rglob("*.py")
    left = {file for file in files if numba_names(file) & {"carray", "cfunc", "njit", "intrinsic"}}
    found: set[Path] = set()
    while left:
        file = left.pop()
        found.add(file)
        left |= engine_imports(file) - found - {Path(kernel_cache.__file__)}
    return sorted(found)


def test_a_change_of_any_file_that_kernels_are_made_of_names_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile is inlined into the attention kernel of another file: numba would keep the old one."""
    sources = kernel_sources()
    names = {str(file.relative_to(ENGINE)) for file in sources}
    assert names >= {
        "layers/cpu_simd.py",
        "layers/cpu_attention_tiles.py",
        "layers/cpu_paged_attention.py",
        "layers/cpu_tokenwise.py",
        "quant/simd.py",
        "quant/kv_kernels.py",
    }, "found by what they import"
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ENGINE / name, tmp_path / name)
    monkeypatch.setattr(kernel_cache, "_ENGINE", tmp_path)
    seen = {kernel_cache.sources_digest()}
    for count, name in enumerate(sorted(names), 2):
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        seen.add(kernel_cache.sources_digest())
        assert len(seen) == count, f"{name} is not part of the folder's name"


def test_a_line_moved_from_one_file_to_the_next_names_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files behind one another hold the same bytes then."""
    (tmp_path / "quant").mkdir()
    first, second = tmp_path / "quant" / "a_kernels.py", tmp_path / "quant" / "b_kernels.py"
    monkeypatch.setattr(kernel_cache, "_ENGINE", tmp_path)
    first.write_text("x = 1\ny = 2\n")
    second.write_text("z = 3\n")
    before = kernel_cache.sources_digest()
    first.write_text("x = 1\n")
    second.write_text("y = 2\nz = 3\n")
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
