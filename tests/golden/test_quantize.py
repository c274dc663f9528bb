"""GPTQ and AWQ against rounding to nearest on real weights: perplexity on a text of our own.

Only the first layers are quantized, which is where most is lost, so that it stays a matter of
seconds; all thirty take minutes and are in the README's table.
"""

from pathlib import Path

import pytest
import torch

from headrace.engine.loading.source import DEMO_MODEL
from headrace.engine.quantize.block import Texts, load_layer
from headrace.engine.quantize.calibration import calibration_tokens, evaluation_tokens
from headrace.engine.quantize.formats import grid_spec
from headrace.engine.quantize.layerwise import LayerQuantizer
from headrace.engine.quantize.perplexity import Perplexity
from headrace.engine.quantize.recipe import Method, make_recipe
from headrace.engine.quantize.source import EMBEDDING, FINAL_NORM, Source
from headrace.engine.tokenizer import load_tokenizer

TEXT = Path(__file__).parents[1] / "data" / "text.txt"
LAYERS = 5
SEQUENCES, LENGTH = 12, 256


@torch.inference_mode()
def perplexity(source: Source, to: str | None, method: Method = "rtn") -> float:
    """With the first layers quantized, asymmetric in groups of 64; None: as floats."""
    config, tokenizer = source.config, load_tokenizer(source.path)
    calibration = calibration_tokens(None, tokenizer, SEQUENCES, LENGTH)
    table = source.tensors.load(EMBEDDING)
    measured = Perplexity(
        config, evaluation_tokens(TEXT, tokenizer, 512, calibration).sequences, table
    )
    quantizer = texts = None
    if to is not None:
        recipe = make_recipe(to, source.linears, method=method, group=64, symmetric=False)
        if method != "rtn":
            texts = Texts(config, calibration.sequences)
            texts.embed(table)
        grid = grid_spec(recipe, source.dtype)
        quantizer = LayerQuantizer(config, recipe, grid, source.dtype, texts)
    for index in range(config.num_layers):
        layer = load_layer(config, source.tensors, index)
        if quantizer is not None and index < LAYERS:
            for part, matrix in quantizer.quantize(layer).matrices.items():
                layer.weights[part] = matrix.dequantize()
            if texts is not None:
                texts.advance(layer, config)
        measured.advance(layer)
    return measured.result(source.tensors.load(FINAL_NORM).float(), source.head().float())


@pytest.mark.model
def test_gptq_and_awq_lose_less_than_rounding_to_nearest() -> None:
    source = Source(DEMO_MODEL)
    exact = perplexity(source, None)
    assert 20 < exact < 60
    for to in ("int3", "int4"):
        nearest = perplexity(source, to) - exact
        for method in ("gptq", "awq"):
            lost = perplexity(source, to, method) - exact
            assert lost < 0.8 * nearest, (to, method, lost, nearest)
