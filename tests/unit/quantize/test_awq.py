"""AWQ's search, and that its scales fold away."""

import pytest
import tiny
import torch

from headrace.engine.loading.source import open_checkpoint
from headrace.engine.quantize.awq import search_scales
from headrace.engine.quantize.block import Texts, load_layer
from headrace.engine.quantize.grid import GridSpec, round_groups, row_losses
from headrace.engine.quantize.layerwise import LayerQuantizer
from headrace.engine.quantize.recipe import Recipe

RECIPE = Recipe(8, "awq", "gptq", 32, False, "groups", False, 0.01, clip=False)


def test_loud_channels_are_scaled_up_and_cost_less() -> None:
    """Rounding noise of a channel weighs as much as its inputs do."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator)
    loudness = torch.ones(128)
    loudness[::17] = 30.0
    inputs = torch.randn(2000, 128, generator=generator) * loudness
    hessian, magnitudes = inputs.T @ inputs / 2000, inputs.abs().mean(0)
    spec = GridSpec(3, False)
    found = search_scales(weight, hessian, magnitudes, torch.arange(128), 32, spec)
    scaled = round_groups(weight * found.scales, 32, spec).dequantize() / found.scales
    nearest = round_groups(weight, 32, spec).dequantize()
    ours = float(row_losses(weight, scaled, hessian).sum())
    theirs = float(row_losses(weight, nearest, hessian).sum())
    assert 0 < found.exponent < 1
    assert ours < 0.5 * theirs
    assert found.scales[::17].min() > found.scales[1::17].max()


def test_inputs_of_one_channel_share_a_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(500, 64, generator=generator) * torch.linspace(0.1, 9, 64)
    channels = torch.arange(64) % 16
    found = search_scales(
        torch.randn(32, 64, generator=generator),
        inputs.T @ inputs / 500,
        inputs.abs().mean(0),
        channels,
        32,
        GridSpec(3, False),
    )
    assert found.exponent > 0
    assert torch.equal(found.scales, found.scales[:16].repeat(4))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_folded_scales_leave_the_layer_as_it_was(family, tmp_path) -> None:
    """At 8 bits only the folding could move the output: norms, value rows of grouped heads and
    their biases, up rows."""
    checkpoint = open_checkpoint(tiny.write_checkpoint(tmp_path, family))
    config = checkpoint.config
    tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(2)).tolist()
    texts, exact = Texts(config, tokens), Texts(config, tokens)
    table = checkpoint.tensors.load("model.embed_tokens.weight")
    table = table * torch.linspace(0.05, 3, config.hidden_size)  # channels differ
    texts.embed(table)
    exact.embed(table)
    layer = load_layer(config, checkpoint.tensors, 0)
    exact.advance(layer, config)
    before = layer.input_norm.clone()
    quantizer = LayerQuantizer(config, RECIPE, GridSpec(8, False), torch.float16, texts)
    found = quantizer.quantize(layer)
    texts.advance(layer, config)
    exponents = {report.part.rpartition(".")[2]: report.exponent for report in found.reports}
    assert sum(value > 0 for value in exponents.values()) >= 4, exponents
    assert not torch.equal(before, layer.input_norm)
    difference = (texts.states - exact.states).square().mean().sqrt()
    assert difference < 0.02 * exact.states.square().mean().sqrt()
