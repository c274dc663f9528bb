"""Compiling ahead of time, in processes of its own: the interpreter is active in this one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import triton

from headrace import kernels

TABLE = Path(kernels.__file__).parent / "data" / "aot.tsv"


def compile_ahead(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "headrace.kernels.aot", "--jobs", "1", *options],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_difference_from_the_table_fails(tmp_path):
    """The penalty kernel for three targets: as written, then with a register more than it takes."""
    table = tmp_path / "aot.tsv"
    written = compile_ahead("--only", "penalize", "--table", str(table), "--write")
    assert written.returncode == 0, written.stdout + written.stderr
    lines = table.read_text().splitlines()
    assert lines[0] == f"# triton {triton.__version__}"
    assert [line.split("\t")[2] for line in lines[2:]] == ["sm_75", "sm_80", "sm_90"]
    fields = lines[2].split("\t")
    fields[3] = str(int(fields[3]) + 1)
    table.write_text("\n".join([*lines[:2], "\t".join(fields), *lines[3:]]) + "\n")
    compared = compile_ahead("--only", "penalize", "--table", str(table))
    assert compared.returncode == 1
    assert "- " + "\t".join(fields) in compared.stdout
    assert "+ " + lines[2] in compared.stdout


def test_the_committed_table_holds_every_kernel_for_every_target():
    defined = set()
    for source in TABLE.parent.parent.glob("*.py"):
        defined |= set(re.findall(r"^def (_\w+_kernel)\(", source.read_text(), re.MULTILINE))
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()[2:]]
    assert {row[0] for row in rows} == defined
    for kernel in defined:
        assert {row[2] for row in rows if row[0] == kernel} == {"sm_75", "sm_80", "sm_90"}
