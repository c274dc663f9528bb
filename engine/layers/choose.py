"""Which backend computes what a model needs beside matmuls: by device, shapes, what is installed.

The choice is made once, at load; nothing here computes.
"""

import logging
import os

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.layers.backend import Backend
from headrace.engine.layers.torch_backend import TorchBackend
from headrace.engine.models.config import ModelConfig

logger = logging.getLogger(__name__)


def choose_backend(
    config: EngineConfig,
    model: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Backend:
    """On CUDA the Triton kernels. On a CPU the compiled kernels where they take the shapes and
    numba is installed, else plain torch. HEADRACE_BACKEND=torch chooses that on both, and =triton
    the Triton kernels on a CPU, in Triton's interpreter."""
    chosen = os.environ.get("HEADRACE_BACKEND")
    if chosen == "triton" or (device.type == "cuda" and chosen != "torch"):
        return _triton_backend(config, model, max_model_len, dtype, device)
    if chosen != "torch" and device.type == "cpu":
        try:
            from headrace.engine.layers.cpu_backend import CpuBackend
        except ImportError:
            logger.warning("numba is missing: attention runs in plain torch, which is slower")
        else:
            if CpuBackend.serves(model, config.block_size):
                return CpuBackend(model, max_model_len, config.deterministic)
    return TorchBackend(model, max_model_len, dtype, device)


def _triton_backend(
    config: EngineConfig,
    model: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Backend:
    try:
        from headrace.engine.layers.triton_backend import TritonBackend, interpreted
    except ImportError as error:
        raise EngineError("the Triton kernels need the package triton, which is missing") from error
    if device.type == "cpu" and not interpreted():
        raise EngineError("on a CPU the Triton kernels need TRITON_INTERPRET=1 (slow: for tests)")
    refusal = TritonBackend.refusal(model, config.block_size)
    if refusal is not None:
        raise EngineError(f"the Triton kernels do not take this model: {refusal}")
    return TritonBackend(model, max_model_len, dtype, device, config.deterministic)
