"""Compile every kernel ahead of time for GPUs that are not here: `python -m headrace.kernels.aot`.

Each launcher is called with tensors that have a shape but no memory, once for every configuration
in `aot_cases`; what it would launch is recorded and compiled by Triton and ptxas for each target.
Registers, shared memory and spills go into a table, which is compared with data/aot.tsv. The exit
status is 1 on a compile error, on a kernel that needs more shared memory than its target has, and
on a difference from the table (skipped, and said so, when the table was made by another Triton).
`--write` makes the table anew. Nothing here needs a GPU or runs a kernel.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from headrace.kernels import device
from headrace.kernels.aot_cases import Case, cases

TABLE = Path(__file__).parent / "data" / "aot.tsv"
TARGETS = {(7, 5): 64 * 1024, (8, 0): 163 * 1024, (9, 0): 227 * 1024}
"""Compute capability and the shared memory that one program may have there, bytes."""

MULTIPROCESSORS = 132
COLUMNS = "kernel\tcase\ttarget\tregisters\tshared_bytes\tspill_bytes"

_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Launch(NamedTuple):
    """One recorded launch: what `triton.compile` needs."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, Any]


class Row(NamedTuple):
    """One line of the table; `error` is empty when the kernel compiled."""

    kernel: str
    case: str
    target: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    error: str = ""

    def line(self) -> str:
        return "\t".join(str(field) for field in self[:6])


@contextmanager
def recorded(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """Inside, a launch is recorded instead of run, and every device claims `capability`."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_describe(self, args, kwargs))

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(device, "capability", lambda _: capability),
        mock.patch.object(device, "multiprocessors", lambda _: MULTIPROCESSORS),
    ):
        yield launches


def _describe(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False))
    options: dict[str, Any] = {}
    for name, value in kwargs.items():
        (values if name in kernel.arg_names else options)[name] = value
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for parameter in kernel.params:
        value = values[parameter.name]
        aligned = [["tt.divisibility", 16]]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            attributes[(parameter.num,)] = aligned
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(parameter.num,)] = aligned
    return Launch(kernel, signature, constants, attributes, options)


def compile_case(case: Case, capability: tuple[int, int]) -> list[Row]:
    """One row for each kernel that the case launches on a device of `capability`."""
    target = f"sm_{capability[0]}{capability[1]}"
    with recorded(capability) as launches:
        case.launch()
    rows = []
    for launch in launches:
        name = launch.kernel.__name__
        try:
            compiled = triton.compile(
                ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes),
                target=GPUTarget("cuda", capability[0] * 10 + capability[1], 32),
                options=launch.options,
            )
            registers, spill = _resources(compiled.asm["cubin"])
            shared = int(compiled.metadata.shared)
            limit = TARGETS[capability]
            error = f"{shared} bytes of shared memory, {limit} allowed" if shared > limit else ""
            rows.append(Row(name, case.name, target, registers, shared, spill, error))
        except Exception as failure:
            rows.append(Row(name, case.name, target, 0, 0, 0, str(failure) or repr(failure)))
    return rows


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) a thread. Triton's kernels use the stack for spills only."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump did not report resources: {report}")
    return int(found[1]), int(found[2])


def _compile_numbered(numbers: tuple[int, tuple[int, int]]) -> list[Row]:
    index, capability = numbers
    return compile_case(cases(capability)[index], capability)


def compile_all(keep: Callable[[str], bool], jobs: int) -> list[Row]:
    """Rows of every case whose name passes `keep`, sorted."""
    work = [
        (index, capability)
        for capability in TARGETS
        for index, case in enumerate(cases(capability))
        if keep(case.name)
    ]
    rows: set[Row] = set()
    if jobs == 1:
        return sorted({row for numbers in work for row in _compile_numbered(numbers)})
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done, found in enumerate(pool.map(_compile_numbered, work), 1):
            rows.update(found)
            if sys.stderr.isatty():
                print(f"\r{done}/{len(work)}", end="", file=sys.stderr)
    return sorted(rows)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compile every kernel without a GPU.")
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("unset TRITON_INTERPRET: the interpreter compiles nothing")

    rows = compile_all(lambda name: options.only in name, options.jobs)
    failures = [row for row in rows if row.error]
    for row in failures:
        print(f"FAILED {row.kernel} {row.case} {row.target}: {row.error}")
    header = f"# triton {triton.__version__}"
    spilled = sum(row.spill_bytes > 0 for row in rows)
    print(f"{len(rows)} kernels, {len(failures)} failed, {spilled} spill; triton {header[9:]}")
    if failures:
        return 1
    lines = [row.line() for row in rows]
    if options.write:
        options.table.parent.mkdir(exist_ok=True)
        options.table.write_text("\n".join([header, COLUMNS, *lines]) + "\n")
        return 0
    known = options.table.read_text().splitlines()
    if known[0] != header:
        print(f"not compared: the table was made by {known[0][2:]}")
        return 0
    expected = {line for line in known[2:] if options.only in line.split("\t")[1]}
    for line in sorted(expected - set(lines)):
        print(f"- {line}")
    for line in sorted(set(lines) - expected):
        print(f"+ {line}")
    return int(expected != set(lines))


if __name__ == "__main__":
    sys.exit(main())
