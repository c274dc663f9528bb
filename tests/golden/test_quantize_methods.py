"""GPTQ and AWQ against rounding to nearest on real weights: how far the first layers' outputs move,
on a text that nothing was fitted to. The README's table has perplexities of whole models.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.engine.loading.source import DEMO_MODEL
from headrace.engine.quantize.block import LayerFloats, Texts, load_layer
from headrace.engine.quantize.calibration import calibration_tokens, evaluation_tokens
from headrace.engine.quantize.formats import grid_spec
from headrace.engine.quantize.layerwise import LayerQuantizer
from headrace.engine.quantize.recipe import Method, make_recipe
from headrace.engine.quantize.source import EMBEDDING, Source
from headrace.engine.tokenizer import load_tokenizer

TEXT = Path(__file__).parents[1] / "data" / "text.txt"
LAYERS = 2
SEQUENCES, LENGTH = 8, 256


class Model:
    """SmolLM2's first layers, calibrated on the shipped text and read with another."""

    def __init__(self) -> None:
        self.source = Source(DEMO_MODEL)
        tokenizer = load_tokenizer(self.source.path)
        self._calibration = calibration_tokens(None, tokenizer, SEQUENCES, LENGTH)
        self._text = evaluation_tokens(TEXT, tokenizer, 512, self._calibration)
        self._table = self.source.tensors.load(EMBEDDING)
        self._layers = [
            load_layer(self.source.config, self.source.tensors, index) for index in range(LAYERS)
        ]
        self._exact = self._states(self._layers)

    def error(self, to: str, method: Method) -> float:
        """Squared error of a token's state after the layers over the state's square, the mean of
        all tokens. Groups of 64, with zero points."""
        config, dtype = self.source.config, self.source.dtype
        recipe = make_recipe(to, self.source.linears, method=method, group=64, symmetric=False)
        texts = None if method == "rtn" else self._embedded(self._calibration.sequences)
        quantizer = LayerQuantizer(config, recipe, grid_spec(recipe, dtype), dtype, texts)
        quantized = []
        for floats in self._layers:
            layer = replace(floats, weights=dict(floats.weights), biases=dict(floats.biases))
            for part, matrix in quantizer.quantize(layer).matrices.items():
                layer.weights[part] = matrix.dequantize()
            quantized.append(layer)
            if texts is not None and len(quantized) < LAYERS:
                texts.advance(layer, config)
        moved = (self._states(quantized) - self._exact).square().sum(dim=1)
        return float((moved / self._exact.square().sum(dim=1)).mean())

    def _states(self, layers: list[LayerFloats]) -> Tensor:
        texts = self._embedded(self._text.sequences)
        for layer in layers:
            texts.advance(layer, self.source.config)
        return texts.states

    def _embedded(self, sequences: Sequence[Sequence[int]]) -> Texts:
        texts = Texts(self.source.config, sequences)
        texts.embed(self._table)
        return texts


@pytest.fixture(scope="module")
def model() -> Model:
    with torch.inference_mode():
        return Model()


@pytest.mark.model
@pytest.mark.parametrize("to", ["int4", "int3"])
@torch.inference_mode()
def test_gptq_and_awq_err_less_than_rounding_to_nearest(to: str, model: Model) -> None:
    nearest = model.error(to, "rtn")
    gptq, awq = model.error(to, "gptq"), model.error(to, "awq")
    print(f"{to}: rounded to nearest {nearest:.5f}, gptq {gptq:.5f}, awq {awq:.5f}")
    assert 0 < gptq < 0.8 * nearest
    assert 0 < awq < 0.8 * nearest
