"""INT8 weights (one scale a row) times INT8 activations (one scale a token), on integer dot
products: our own kernel multiplies bytes where the CPU has AVX-512 VNNI, else oneDNN.

Activations are unsigned with zero point 128: the instruction multiplies unsigned by signed bytes,
and oneDNN multiplies signed ones by a reference path, thousands of times slower. Each token is
quantized alone, so a row's result knows no batch.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.device_matrix import on_kernels
from headrace.engine.quant.int8 import quantize_channels
from headrace.engine.quant.int8_panels import (
    Int8Panels,
    in_int8_panels,
    multiplies_int8_panels,
    multiply_int8_panels,
)
from headrace.engine.quant.method import LinearSpec, stacked_bias
from headrace.engine.quant.native import bits_of, kernel
from headrace.engine.quant.unquantized import Unquantized

logger = logging.getLogger(__name__)

_PACKED_ROWS = 64  # the row count that oneDNN's layout is chosen for; any count runs
_ZERO_POINT = 128
_ROW_BYTES = 16


@dataclass(frozen=True, slots=True)
class Int8DynamicWeights:
    """`weight` int8 [out, in], or in oneDNN's layout when `packed`, or its rows padded to 16 bytes
    for the Triton kernel when `on_kernels`; `scales` float32 [out]; `zeros` what oneDNN wants
    beside them: int64 [out], all 0. Where there are `panels`, they hold it all but the bias."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    bias: Tensor | None
    packed: bool = False
    panels: Int8Panels | None = None
    on_kernels: bool = False


class Int8Dynamic:
    """`levels`: a token's largest magnitude becomes this integer (127; compressed-tensors rounds
    against 127.5)."""

    def __init__(self, levels: float = 127.0) -> None:
        self._levels = levels

    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        return Unquantized().tensor_shapes(spec)

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Int8DynamicWeights:
        parts = [quantize_channels(source.load(f"{part}.weight").to(device)) for part in spec.parts]
        return int8_dynamic_weights(
            torch.cat([weight for weight, _ in parts]),
            torch.cat([scales for _, scales in parts]),
            stacked_bias(spec, source, torch.float32, device),
        )

    def process(self, weights: Int8DynamicWeights) -> Int8DynamicWeights:
        weight = weights.weight
        if on_kernels(weight.device):
            columns = weight.shape[1]
            padded = functional.pad(weight, (0, -columns % _ROW_BYTES)).contiguous()
            return replace(weights, weight=padded[:, :columns], on_kernels=True)
        if weight.device.type != "cpu":
            return weights
        if weight.shape[1] % 4 == 0 and multiplies_int8_panels():
            panels = in_int8_panels(weight, weights.scales, _ZERO_POINT)
            nothing = weight.new_empty(0)
            return Int8DynamicWeights(nothing, nothing, nothing, weights.bias, panels=panels)
        if not multiplies_bytes():
            return weights
        packed = torch.ops.onednn.qlinear_prepack(
            weights.weight, [_PACKED_ROWS, weights.weight.shape[1]]
        )
        return Int8DynamicWeights(packed, weights.scales, weights.zeros, weights.bias, packed=True)

    def apply(self, weights: Int8DynamicWeights, x: Tensor) -> Tensor:
        if weights.on_kernels:
            from headrace.kernels.int8_dynamic_matmul import int8_dynamic_matmul

            return int8_dynamic_matmul(
                x, weights.weight, weights.scales, weights.bias, levels=self._levels
            )
        quantized, scales = quantize_tokens(x, self._levels)
        if weights.panels is not None:
            return multiply_int8_panels(weights.panels, weights.bias, quantized, scales).to(x.dtype)
        if not weights.packed:
            y = functional.linear(quantized.float() - _ZERO_POINT, weights.weight.float())
            y *= weights.scales
        else:
            y = torch.ops.onednn.qlinear_pointwise(
                *(quantized, 1.0, _ZERO_POINT, weights.weight, weights.scales, weights.zeros),
                *(None, 1.0, 0, torch.float32, "none", [], ""),
            )
        return scale_tokens(y, scales, weights.bias).to(x.dtype)

    def dequantize(self, weights: Int8DynamicWeights) -> Tensor:
        return weights.weight.float() * weights.scales[:, None]


def int8_dynamic_weights(weight: Tensor, scales: Tensor, bias: Tensor | None) -> Int8DynamicWeights:
    """int8 [out, in] and float32 [out] as weights to be processed."""
    zeros = torch.zeros(len(scales), dtype=torch.int64, device=weight.device)
    return Int8DynamicWeights(weight.contiguous(), scales.contiguous(), zeros, bias)


def quantize_tokens(x: Tensor, levels: float = 127.0) -> tuple[Tensor, Tensor]:
    """Rows of x as uint8 around 128, and their float32 scales [rows]; a row with NaN or infinity
    has the scale NaN, so that its outputs are NaN."""
    x = x.float().contiguous()
    rows, size = x.shape
    run = kernel("int8_kernels", "quantize_rows") if x.device.type == "cpu" else None
    if run is not None:
        quantized = torch.empty(rows, size, dtype=torch.uint8)
        scales = torch.empty(rows)
        addresses = (x.data_ptr(), quantized.data_ptr(), scales.data_ptr())
        run(*addresses, rows, size, bits_of(levels), _grain(rows))
        return quantized, scales
    peak = x.abs().amax(dim=1)
    peak = torch.where(peak.isfinite(), peak, torch.nan)
    # (A Python number over a tensor would be a reciprocal and a product, rounded twice.)
    inverse = torch.where(peak < 1e-30, 0.0, torch.full_like(peak, levels) / peak).nan_to_num(0.0)
    steps = (x.nan_to_num(0.0, 0.0, 0.0) * inverse[:, None]).round()
    return (steps + _ZERO_POINT).clamp(max=255).to(torch.uint8), peak / levels


def scale_tokens(y: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """y (float32, contiguous) times its rows' scales, plus bias, in place."""
    run = kernel("int8_kernels", "scale_rows") if y.device.type == "cpu" else None
    if run is None:
        y.mul_(scales[:, None])
        return y if bias is None else y.add_(bias)
    rows, size = y.shape
    addresses = (y.data_ptr(), scales.data_ptr(), 0 if bias is None else bias.data_ptr())
    run(*addresses, rows, size, _grain(rows))
    return y


@functools.cache
def multiplies_bytes() -> bool:
    """Whether oneDNN multiplies bytes here exactly and fast: an x86 CPU with VNNI. Without VNNI
    pairs of products saturate at 16 bits."""
    if not (torch._C._has_mkldnn and hasattr(torch.ops.onednn, "qlinear_prepack")):
        return False
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    if not flags & {"avx512_vnni", "avx_vnni", "amx_int8"}:
        logger.warning(
            "int8-dynamic: this CPU has no VNNI, so integers are multiplied as floats: no faster"
            " than float32; int8 (weight only) is the better choice here"
        )
        return False
    return True


def _grain(rows: int) -> int:
    """Rows that a thread claims at once."""
    return 1 if rows < 64 else 16
