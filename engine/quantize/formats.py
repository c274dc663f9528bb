"""Quantized matrices as the ecosystem's files hold them: tensors and quantization_config.

Layouts are those that `engine.quant.gptq`, `awq` and `compressed_tensors` read.
"""

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from headrace.engine.quant.awq import AWQ, AWQConfig
from headrace.engine.quant.compressed_tensors import StoredInt8
from headrace.engine.quant.gptq import GPTQ, GPTQConfig
from headrace.engine.quant.method import AnyMethod
from headrace.engine.quantize.grid import GridSpec, QuantizedMatrix
from headrace.engine.quantize.recipe import Recipe

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def grid_spec(recipe: Recipe, dtype: torch.dtype) -> GridSpec:
    """The grid that the format can hold; `dtype`: of the checkpoint's floats."""
    if recipe.format in ("gptq", "awq"):
        return GridSpec(recipe.bits, recipe.symmetric)
    return GridSpec(recipe.bits, symmetric=True, scale_dtype=dtype)


def gptq_version(recipe: Recipe) -> int:
    """Version 1 stores a zero point less one, and readers disagree on what a stored -1 is (it
    borrows from its neighbours in the word; GPTQModel refuses other tools' files that may hold
    one). So it is written only where all zero points are in the middle, which every reader takes;
    files with zero points of their own are version 2."""
    return 1 if recipe.symmetric else 2


def tensors_of(part: str, matrix: QuantizedMatrix, recipe: Recipe) -> dict[str, Tensor]:
    """The tensors of one of the checkpoint's linear layers, bias excepted."""
    if recipe.format == "gptq":
        zeros = matrix.zeros - 1 if gptq_version(recipe) == 1 else matrix.zeros
        return {
            f"{part}.qweight": pack_words(matrix.codes.T, recipe.bits),
            f"{part}.qzeros": pack_words(zeros, recipe.bits).T.contiguous(),
            f"{part}.scales": matrix.scales.T.contiguous(),
            f"{part}.g_idx": matrix.group_of.int(),
        }
    if recipe.format == "awq":
        return {
            f"{part}.qweight": pack_columns(matrix.codes.T),
            f"{part}.qzeros": pack_columns(matrix.zeros.T),
            f"{part}.scales": matrix.scales.T.contiguous(),
        }
    return {
        f"{part}.weight": (matrix.codes.int() - 128).to(torch.int8),
        f"{part}.weight_scale": matrix.scales,
    }


def reader(recipe: Recipe) -> AnyMethod:
    """What reads these tensors back: the engine's own method for the format."""
    if recipe.format == "gptq":
        version = gptq_version(recipe)
        return GPTQ(GPTQConfig(recipe.bits, recipe.group, recipe.symmetric, version, {}), version)
    if recipe.format == "awq":
        return AWQ(AWQConfig(recipe.group))
    return StoredInt8("channel")


def quantization_config(recipe: Recipe) -> dict[str, Any]:
    """config.json's entry, with the keys that Transformers, vLLM and GPTQModel read."""
    maker = f"headrace:{metadata.version('headrace')}"
    group = recipe.group or -1
    if recipe.format == "gptq":
        reordered = recipe.method == "gptq" and recipe.order == "columns"
        return {
            "quant_method": "gptq",
            "bits": recipe.bits,
            "group_size": group,
            "desc_act": reordered and not recipe.static_groups,
            "static_groups": recipe.static_groups,
            "sym": recipe.symmetric,
            "lm_head": False,
            "true_sequential": True,
            "damp_percent": recipe.damping,
            "checkpoint_format": "gptq" if gptq_version(recipe) == 1 else "gptq_v2",
            "pack_dtype": "int32",
            "meta": {"quantizer": [maker], "method": recipe.method},
        }
    if recipe.format == "awq":
        return {
            "quant_method": "awq",
            "bits": recipe.bits,
            "group_size": group,
            "zero_point": not recipe.symmetric,
            "version": "gemm",
            "lm_head": False,
            "modules_to_not_convert": None,
            "meta": {"quantizer": [maker], "method": recipe.method},
        }
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "int-quantized",
                "targets": ["Linear"],
                "weights": {**integers, "strategy": "channel", "dynamic": False},
                "input_activations": {**integers, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def stored_bytes(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of tensors with these names and shapes in the recipe's format."""
    sizes = {"qweight": 4, "qzeros": 4, "g_idx": 4, "weight": 1}
    total = 0
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        total += count * sizes.get(name.rpartition(".")[2], 2)
    return total


def pack_words(values: Tensor, bits: int) -> Tensor:
    """uint8 [values, columns] to int32 [values * bits / 32, columns]: a stream of `bits` along the
    first dimension, lowest bits first. What `packing.unpack_words` undoes."""
    span = 32 if bits == 3 else 32 // bits  # values after which a word ends
    streams = values.long().reshape(-1, span, values.shape[-1])
    words = streams.new_zeros(len(streams), span * bits // 32, values.shape[-1])
    for index in range(span):
        word, shift = divmod(index * bits, 32)
        words[:, word] |= streams[:, index] << shift & 0xFFFFFFFF
        if shift + bits > 32:
            words[:, word + 1] |= streams[:, index] >> 32 - shift
    return _signed(words.flatten(0, 1))


def pack_columns(values: Tensor) -> Tensor:
    """uint8 [rows, columns] to int32 [rows, columns / 8] in AWQ's order. What
    `awq.unpack_columns` undoes."""
    nibbles = values.long().reshape(len(values), -1, 8)
    words = torch.zeros_like(nibbles[:, :, 0])
    for place, column in enumerate(_AWQ_COLUMNS):
        words |= nibbles[:, :, column] << 4 * place
    return _signed(words)


def _signed(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()
