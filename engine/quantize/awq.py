"""AWQ: channels with large inputs are scaled up before rounding, and their inputs down by as much.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"
(arXiv 2306.00978). The scale of an input channel is a power of its mean magnitude; the exponent is
searched for. The paper measures the layer's output over samples; here the same squared error comes
from the sum H of x x' over all calibration tokens, so that a try costs one product.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.engine.quantize.grid import GridSpec, round_groups, row_losses

_STEPS = 20


@dataclass(frozen=True, slots=True)
class ScaleSearch:
    """`scales` float32 [in]: multiply the weight's columns, divide the inputs. `exponent` 0: none
    was better than rounding to nearest as it is."""

    scales: Tensor
    exponent: float


def search_scales(
    weight: Tensor,
    hessian: Tensor,
    magnitudes: Tensor,
    channel_of: Tensor,
    group: int,
    spec: GridSpec,
) -> ScaleSearch:
    """The scales under which rounding `weight` [out, in] costs least.

    `magnitudes` float [in]: mean |x| of each input. `channel_of` int64 [in]: inputs that share a
    channel of what feeds them (heads that share a value head) get one scale.
    """
    shared = _shared_means(magnitudes, channel_of)
    floor = max(1e-4 * float(shared.mean()), 1e-12)
    plain = replace(spec, search=False)
    best, best_loss, best_exponent = torch.ones_like(magnitudes), float("inf"), 0.0
    for step in range(_STEPS + 1):
        exponent = step / _STEPS
        scales = shared.clamp(min=floor).pow(exponent)
        scales = scales / (scales.max() * scales.min()).sqrt()
        if exponent == 0:
            scales = torch.ones_like(scales)
        if not bool(scales.isfinite().all()):
            continue
        rounded = round_groups(weight * scales, group, plain).dequantize() / scales
        loss = float(row_losses(weight, rounded, hessian).sum())
        if loss < best_loss:
            best, best_loss, best_exponent = scales, loss, exponent
    return ScaleSearch(best, best_exponent)


def _shared_means(magnitudes: Tensor, channel_of: Tensor) -> Tensor:
    """Root mean square over the inputs of a channel, back at each input."""
    count = int(channel_of.max()) + 1
    totals = torch.zeros(count).index_add_(0, channel_of, magnitudes.square())
    return (totals / torch.bincount(channel_of, minlength=count)).sqrt()[channel_of]
