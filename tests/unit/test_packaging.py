"""The house: what is packaged, and what may not leak onto sys.path."""

import importlib.util
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_of_code_is_packaged() -> None:
    """A package missing from the list would work here and be absent from an installed wheel."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    found = {
        "headrace." + ".".join(init.parent.relative_to(ROOT).parts)
        for room in ("producer", "worker", "engine", "kernels")
        for init in (ROOT / room).rglob("__init__.py")
    }
    assert listed == found


def test_the_root_is_not_on_the_path() -> None:
    """`import kernels` must mean the package of that name that transformers looks for, not ours."""
    assert importlib.util.find_spec("engine") is None
    assert importlib.util.find_spec("kernels") is None
