"""One decoder layer quantized, stage by stage: each linear layer sees the inputs that the quantized
ones before it give (`true_sequential`).

AWQ's input scales are folded away within the layer: into the norm before qkv and gate-up, into the
value rows before the output projection, into the up rows before down. Knows no files.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headrace.engine.models.config import ModelConfig
from headrace.engine.quant.method import LinearSpec
from headrace.engine.quantize.activations import Moments
from headrace.engine.quantize.awq import search_scales
from headrace.engine.quantize.block import LayerFloats, Texts
from headrace.engine.quantize.gptq import GPTQSettings, gptq
from headrace.engine.quantize.grid import GridSpec, QuantizedMatrix, round_groups, row_losses
from headrace.engine.quantize.recipe import Recipe

_UNCLIPPED = ("q_proj", "k_proj")
"""Clipping hurts where an error is multiplied by another in attention's scores (AWQ's authors)."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """`error`: squared error of the part's output over that output's square, over the calibration
    tokens (of the weights themselves where there are none); `nearest_error`: what rounding to
    nearest would have. `damping` and `exponent`: what GPTQ needed and AWQ chose."""

    part: str
    error: float
    nearest_error: float
    damping: float | None = None
    exponent: float | None = None


@dataclass(slots=True)
class QuantizedLayer:
    """By the part's prefix."""

    matrices: dict[str, QuantizedMatrix] = field(default_factory=dict)
    reports: list[PartReport] = field(default_factory=list)


class LayerQuantizer:
    """`norm_dtype`: the type that norms are stored in. `texts`: what the layer's inputs are read
    from; None for rounding to nearest."""

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        spec: GridSpec,
        norm_dtype: torch.dtype,
        texts: Texts | None,
    ) -> None:
        self._config = config
        self._recipe = recipe
        self._spec = spec
        self._norm_dtype = norm_dtype
        self._texts = texts

    def quantize(self, layer: LayerFloats) -> QuantizedLayer:
        """Quantize all linear layers; norms and biases of `layer` are changed where scales are
        folded into them. The texts' states stay where they are."""
        result = QuantizedLayer()
        if self._texts is None:
            for spec in layer.specs:
                for part in spec.parts:
                    self._round(part, layer.weights[part], result)
            return result
        self._quantize_stages(layer, self._texts, result)
        return result

    def _round(self, part: str, weight: Tensor, result: QuantizedLayer) -> None:
        matrix = round_groups(weight, self._group(weight), self._spec)
        error = float((matrix.dequantize() - weight).square().sum())
        relative = error / max(float(weight.square().sum()), 1e-30)
        result.matrices[part] = matrix
        result.reports.append(PartReport(part, relative, relative))

    def _quantize_stages(self, layer: LayerFloats, texts: Texts, result: QuantizedLayer) -> None:
        backend, eps = texts.backend, self._config.rms_norm_eps
        window = self._config.sliding_windows[layer.index]
        queries = self._config.num_heads * self._config.head_dim

        moments = Moments(self._config.hidden_size)
        for span, _ in texts.spans():
            moments.add(backend.rms_norm(texts.states[span], layer.input_norm, eps))

        def into_input_norm(scales: Tensor) -> Tensor:
            layer.input_norm, effective = self._folded(layer.input_norm, scales)
            return effective

        self._fit(layer, layer.qkv, moments, result, into_input_norm)

        mixed = torch.empty(len(texts), queries)
        moments = Moments(queries)
        for span, plan in texts.spans():
            normed = backend.rms_norm(texts.states[span], layer.input_norm, eps)
            mixed[span] = texts.mixed(layer, normed, plan, window)
            moments.add(mixed[span])
        channels = self._value_channels()

        def into_values(scales: Tensor) -> Tensor:
            rows = torch.empty(int(channels.max()) + 1)
            rows[channels] = scales
            self._divide_rows(layer, layer.qkv.parts[2], rows, result)
            mixed.div_(scales)
            return scales

        self._fit(layer, layer.output, moments, result, into_values, channels)
        after = texts.states.clone()
        moments = Moments(self._config.hidden_size)
        for span, _ in texts.spans():
            after[span] += layer.multiply(layer.output, mixed[span])
            moments.add(backend.rms_norm(after[span], layer.post_norm, eps))
        mixed = torch.empty(0)

        def into_post_norm(scales: Tensor) -> Tensor:
            layer.post_norm, effective = self._folded(layer.post_norm, scales)
            return effective

        self._fit(layer, layer.gate_up, moments, result, into_post_norm)
        moments = Moments(self._config.intermediate_size)
        for span, _ in texts.spans():
            normed = backend.rms_norm(after[span], layer.post_norm, eps)
            moments.add(backend.silu_mul(layer.multiply(layer.gate_up, normed)))

        def into_up(scales: Tensor) -> Tensor:
            self._divide_rows(layer, layer.gate_up.parts[1], scales, result)
            return scales

        self._fit(layer, layer.down, moments, result, into_up)

    def _fit(
        self,
        layer: LayerFloats,
        spec: LinearSpec,
        moments: Moments,
        result: QuantizedLayer,
        fold: Callable[[Tensor], Tensor],
        channel_of: Tensor | None = None,
    ) -> None:
        """Quantize one fused layer. `fold` divides what feeds it by AWQ's scales and returns those
        that came of it; inputs of one `channel_of` must share a scale."""
        recipe, grid = self._recipe, self._spec
        weight = torch.cat([layer.weights[part] for part in spec.parts])
        group, hessian = self._group(weight), moments.hessian()
        nearest = round_groups(weight, group, grid).dequantize()
        nearest_losses = row_losses(weight, nearest, hessian)
        whole = row_losses(weight, torch.zeros(()), hessian)
        damping = exponent = None
        if recipe.method == "gptq":
            settings = GPTQSettings(group, recipe.order, recipe.static_groups, recipe.damping)
            matrix, damping = gptq(weight, hessian, settings, replace(grid, search=recipe.clip))
        else:
            if channel_of is None:
                channel_of = torch.arange(spec.in_features)
            found = search_scales(weight, hessian, moments.magnitudes(), channel_of, group, grid)
            exponent = found.exponent
            if exponent:
                scales = fold(found.scales)
                weight = weight * scales
                hessian = hessian / scales / scales[:, None]
            matrix = self._clipped(spec, weight, hessian, group)
        losses = row_losses(weight, matrix.dequantize(), hessian)
        start = 0
        for part, rows in zip(spec.parts, spec.out_features, strict=True):
            span = slice(start, start + rows)
            start += rows
            result.matrices[part] = matrix.rows(span.start, span.stop)
            layer.weights[part] = result.matrices[part].dequantize()
            total = max(float(whole[span].sum()), 1e-30)
            errors = float(losses[span].sum()) / total, float(nearest_losses[span].sum()) / total
            result.reports.append(PartReport(part, *errors, damping, exponent))

    def _clipped(
        self, spec: LinearSpec, weight: Tensor, hessian: Tensor, group: int
    ) -> QuantizedMatrix:
        """Rounded to nearest, each part with the ranges that cost least if that is asked for."""
        pieces = []
        for part, rows in zip(
            spec.parts, torch.split(weight, list(spec.out_features)), strict=True
        ):
            clip = self._recipe.clip and not part.endswith(_UNCLIPPED)
            pieces.append(round_groups(rows, group, replace(self._spec, search=clip), hessian))
        return QuantizedMatrix(
            torch.cat([piece.codes for piece in pieces]),
            torch.cat([piece.scales for piece in pieces]),
            torch.cat([piece.zeros for piece in pieces]),
            pieces[0].group_of,
        )

    def _folded(self, norm: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The norm's weight divided by the scales, as it will be stored, and the scales that this
        rounding leaves: their product is the norm as it was."""
        divided = (norm / scales).to(self._norm_dtype).float()
        return divided, torch.where(divided == 0, 1.0, norm / divided)

    def _divide_rows(
        self, layer: LayerFloats, part: str, rows: Tensor, result: QuantizedLayer
    ) -> None:
        """Divide the output of a part that is quantized already: its codes stay."""
        matrix = result.matrices[part]
        scales = (matrix.scales.float() / rows[:, None]).to(matrix.scales.dtype)
        result.matrices[part] = replace(matrix, scales=scales)
        layer.weights[part] = result.matrices[part].dequantize()
        if part in layer.biases:
            layer.biases[part] = layer.biases[part] / rows

    def _value_channels(self) -> Tensor:
        """Which value row feeds each input of the output projection: heads of a group share one."""
        config = self._config
        inputs = torch.arange(config.num_heads * config.head_dim)
        heads, dimensions = inputs // config.head_dim, inputs % config.head_dim
        return heads // config.group_size * config.head_dim + dimensions

    def _group(self, weight: Tensor) -> int:
        return self._recipe.group or weight.shape[1]
