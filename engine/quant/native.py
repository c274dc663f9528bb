"""Compiled kernels for quantized weights and activations: compiled on first use, run on torch's own
threads. Where numba is missing, `kernel` returns None and methods compute in plain torch; weights
that were laid out for a kernel are multiplied by the one that `needed` gives.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable

import numpy as np
import torch

from headrace.engine.errors import EngineError
from headrace.engine.layers.openmp import Launch, launcher

logger = logging.getLogger(__name__)

Kernel = Callable[..., None]


@functools.cache
def kernel(module: str, name: str) -> Kernel | None:
    """Function `name` of `headrace.engine.quant.<module>` as a call that takes its int64 arguments
    but for the first, which is the address of two fresh counters: threads claim their work from one
    and their own numbers from the other."""
    if os.environ.get("HEADRACE_BACKEND") == "torch":
        return None
    try:
        from numba import cfunc
    except ImportError:
        logger.warning("numba is missing: quantized layers run in plain torch, which is slower")
        return None
    from headrace.engine.layers.kernel_cache import choose_cache_folder

    choose_cache_folder()
    found = importlib.import_module(f"headrace.engine.quant.{module}")
    compiled = cfunc("void(CPointer(int64))", **found.OPTIONS)(getattr(found, name))

    def run(*args: int) -> None:
        # A counter for work and one for threads, their address, the arguments.
        packed = np.array((0, 0, 0, *args), dtype=np.int64)
        address = packed.ctypes.data
        packed[2] = address
        _launch(torch.get_num_threads())(compiled.address, address + 16)

    return run


def needed(module: str, name: str) -> Kernel:
    """The same for weights that only this kernel reads. EngineError: it does not run here."""
    found = kernel(module, name)
    if found is None:
        raise EngineError(
            f"weights are laid out for the compiled kernel {name}, which needs numba and does not"
            " run with HEADRACE_BACKEND=torch; load the model again"
        )
    return found


@functools.cache
def _launch(threads: int) -> Launch:
    return launcher()


def bits_of(value: float) -> int:
    """The bits of a float64 as an int64, as kernels take their scalars."""
    return int(np.float64(value).view(np.int64))
