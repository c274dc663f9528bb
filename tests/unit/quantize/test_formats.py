"""What is written is read back: packing, and each format by the engine's own reader."""

import pytest
import torch
from torch import Tensor

from headrace.engine.errors import EngineError
from headrace.engine.quant.awq import unpack_columns
from headrace.engine.quant.method import LinearSpec
from headrace.engine.quant.packing import unpack_words
from headrace.engine.quantize import formats
from headrace.engine.quantize.gptq import GPTQSettings, gptq
from headrace.engine.quantize.grid import round_groups
from headrace.engine.quantize.recipe import Recipe, choose_group, make_recipe

LAYER = LinearSpec(("layer",), 192, (96,))


class Tensors:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def load(self, name: str) -> Tensor:
        return self._tensors[name]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_words_hold_every_value(bits: int) -> None:
    values = torch.randint(0, 2**bits, (96, 7), generator=torch.Generator().manual_seed(bits))
    values = values.to(torch.uint8)
    packed = formats.pack_words(values, bits)
    assert packed.shape == (96 * bits // 32, 7)
    assert torch.equal(unpack_words(packed, bits), values)


def test_packed_columns_hold_every_value() -> None:
    values = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(0))
    values = values.to(torch.uint8)
    assert torch.equal(unpack_columns(formats.pack_columns(values)), values)


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("int2", {"method": "rtn", "symmetric": False}),
        ("int3", {"method": "gptq", "symmetric": False}),
        ("int3", {"method": "awq"}),
        ("int4", {"method": "gptq", "order": "columns"}),
        ("int4", {"method": "gptq", "symmetric": False, "group": -1}),
        ("int4", {"method": "awq"}),
        ("int4", {"method": "awq", "symmetric": True, "format": "gptq"}),
        ("int8", {"method": "gptq"}),
        ("int8", {"method": "rtn", "format": "gptq"}),
    ],
)
def test_the_reader_gives_back_what_was_rounded(to: str, options: dict[str, object]) -> None:
    recipe = make_recipe(to, [LAYER], **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 192, generator=generator) + 0.3
    weight[:4] = weight[:4].abs()  # a zero point at the end of its range
    weight[4] = 0
    spec = formats.grid_spec(recipe, torch.float16)
    if recipe.order == "columns":
        inputs = torch.randn(400, 192, generator=generator) * torch.rand(192, generator=generator)
        settings = GPTQSettings(recipe.group, "columns")
        matrix, _ = gptq(weight, inputs.T @ inputs, settings, spec)
    else:
        matrix = round_groups(weight, recipe.group or 192, spec)
    tensors = formats.tensors_of("layer", matrix, recipe)
    reader = formats.reader(recipe)
    shapes = reader.tensor_shapes(LAYER)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert formats.stored_bytes(recipe, shapes) == sum(item.nbytes for item in tensors.values())
    weights = reader.create_weights(LAYER, Tensors(tensors), torch.float32, torch.device("cpu"))
    assert torch.equal(reader.dequantize(weights), matrix.dequantize())


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("int5", {}, "int2, int3, int4, int8"),
        ("int4", {"method": "magic"}, "gptq, awq, rtn"),
        ("int8", {"method": "awq"}, "awq is for 4 bits and fewer"),
        ("int3", {"method": "awq", "format": "awq"}, "holds 4 bits, not 3"),
        ("int4", {"group": 128}, "does not divide the 192 inputs of layer; use 64"),
        ("int4", {"group": 48}, "not a multiple of 32"),
        ("int8", {"group": 64}, "one scale a row"),
        ("int8", {"symmetric": False}, "symmetric"),
        ("int4", {"damping": 0.0}, "not between 0 and 1"),
        ("int4", {"order": "random"}, "groups, columns, none"),
        ("int8", {"order": "columns"}, "reorders groups"),
    ],
)
def test_impossible_recipes_are_refused_by_name(to, options, message) -> None:
    with pytest.raises(EngineError, match=message):
        make_recipe(to, [LAYER], **options)


def test_rows_that_fill_no_word_are_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"odd \(36 x 64\) does not fill whole words"):
        make_recipe("int3", [LinearSpec(("odd",), 64, (36,))])


@pytest.mark.parametrize(
    ("inputs", "group"), [((576, 1536), 64), ((4096, 14336), 128), ((64, 160), 32)]
)
def test_the_largest_group_that_divides_is_chosen(inputs, group) -> None:
    layers = [LinearSpec(("layer",), size, (64,)) for size in inputs]
    assert choose_group(layers, None) == group


def test_what_is_not_said_follows_from_the_method() -> None:
    assert make_recipe("int4", [LAYER]) == Recipe(
        4, "gptq", "gptq", 64, True, "groups", False, 0.01, True
    )
    awq = make_recipe("int4", [LAYER], method="awq")
    assert (awq.format, awq.symmetric) == ("awq", False)
    three = make_recipe("int3", [LAYER], method="awq")
    assert (three.format, three.symmetric) == ("gptq", False)
    eight = make_recipe("int8", [LAYER], method="rtn")
    assert (eight.format, eight.group, eight.symmetric) == ("compressed-tensors", 0, True)
