"""The README promises nothing that no test holds: its links to tests lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"`(tests/[\w./-]+)(?:::(\w+))?`")


def section(title: str) -> str:
    """The text under a heading, up to the next."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## )", README, re.M | re.S)
    assert found is not None, f"the README has no section {title!r}"
    return found.group(1)


def promises() -> list[str]:
    """The rows of the table of promises."""
    rows = [line for line in section("What is promised").splitlines() if line.startswith("| ")]
    return rows[1:]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("row", promises())
def test_each_promise_names_tests_that_exist(row: str) -> None:
    assert LINK.search(row), "a promise without a test"


@pytest.mark.parametrize(("path", "name"), sorted(set(LINK.findall(README))))
def test_each_link_to_a_test_leads_to_it(path: str, name: str) -> None:
    target = ROOT / path
    assert target.exists()
    if name:
        assert name in functions_of(target)
