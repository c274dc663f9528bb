"""Keys and values in 8 bits: INT8 or FP8 (e4m3), one float32 scale for each token's head."""

import torch
from torch import Tensor

from headrace.engine.errors import EngineError

SCALE_BYTES = 4
_TOPS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_NAMES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def resolved(name: str, quantization: str, backend: str) -> str:
    """`auto`, as this quantization on this backend means it: where a CPU multiplies activations in
    int8, keys and values are int8 too, since reading them is most of a decode step's attention, and
    their rounding is lost in that of the activations. `float` keeps floats."""
    dynamic = quantization.startswith("int8-dynamic")
    return "int8" if name == "auto" and backend == "cpu" and dynamic else name


def kv_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """What `kv_cache_dtype` means; auto and float are `default`, what the backend computes in.
    Raises EngineError."""
    if name in ("auto", "float", str(default).removeprefix("torch.")):
        return default
    found = _NAMES.get(name)
    if found is None:
        raise EngineError(f"kv_cache_dtype {name!r} is not one of auto, float, {', '.join(_NAMES)}")
    return found


def is_quantized(dtype: torch.dtype) -> bool:
    return dtype in _TOPS


def kernel_kind(dtype: torch.dtype) -> int:
    """As `kv_kernels` numbers the types."""
    return 1 if dtype == torch.int8 else 2


def quantize_heads(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads [..., head_dim] in 8 bits, and their scales [...]: the largest magnitude becomes the
    type's largest value. A head with NaN or infinity has the scale NaN."""
    wide = heads.float()
    top = _TOPS[dtype]
    peak = wide.abs().amax(-1)
    peak = torch.where(peak.isfinite(), peak, torch.nan)
    inverse = torch.where(peak < 1e-30, 0.0, torch.full_like(peak, top) / peak).nan_to_num(0.0)
    scaled = wide.nan_to_num(0.0, 0.0, 0.0) * inverse[..., None]
    if dtype == torch.int8:
        return scaled.round().to(torch.int8), peak / top
    return scaled.clamp(-top, top).to(dtype), peak / top


def dequantize_heads(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales[..., None]
