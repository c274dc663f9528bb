"""Runs a compiled function on the thread team that torch's own operations use.

Two thread pools on the same cores wait for each other while spinning, so kernels that run between
torch operations must share torch's. Its OpenMP runtime (libgomp) is already in the process; a
function pointer handed to `GOMP_parallel` runs on that team, a few microseconds a launch.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

Launch = Callable[[int, int], None]
"""(function pointer, data pointer): call `void f(void *data)` once on each thread and wait."""


def launcher() -> Launch:
    """A launch on torch's team, or on the calling thread alone where torch has no libgomp."""
    runtime = _torch_libgomp()
    if runtime is None:
        return _run_here
    parallel = runtime.GOMP_parallel
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    threads = torch.get_num_threads()

    def launch(function: int, data: int) -> None:
        parallel(function, data, threads, 0)

    return launch


def _run_here(function: int, data: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)


def _torch_libgomp() -> ctypes.CDLL | None:
    """The libgomp that torch has loaded, never another copy of it."""
    package = Path(torch.__file__).parent
    folders = (package / "lib", package.parent / "torch.libs")
    for folder in folders:
        for path in sorted(folder.glob("libgomp*.so*")):
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                continue
            if hasattr(library, "GOMP_parallel"):
                return library
    return None
