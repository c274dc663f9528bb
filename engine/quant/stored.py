"""What a checkpoint's quantization_config says, as a scheme: one function a format.

Which layers are quantized is read from the tensors that are there: a layer that is stored as plain
floats runs as such, whatever lists of exceptions a config has.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch

from headrace.engine.errors import CheckpointError
from headrace.engine.loading.checkpoint import Checkpoint
from headrace.engine.quant import awq, bitsandbytes, compressed_tensors, gguf_blocks, gptq
from headrace.engine.quant.fp8 import Fp8
from headrace.engine.quant.llm_int8 import LLMInt8
from headrace.engine.quant.method import AnyMethod, LinearSpec
from headrace.engine.quant.parts import Parts
from headrace.engine.quant.scheme import MethodFor, Scheme
from headrace.engine.quant.settings import Settings
from headrace.engine.quant.torchao import TorchaoInt8
from headrace.engine.quant.unquantized import Unquantized

FLOAT_TYPES = ("F32", "F16", "BF16")
_SAMPLED_LAYERS = 8


def stored_scheme(checkpoint: Checkpoint, layers: Sequence[LinearSpec], head: LinearSpec) -> Scheme:
    """The scheme that the checkpoint holds; `none` for plain floats."""
    values = checkpoint.quantization
    if values is None:
        _check_floats(checkpoint)
        return Scheme("none", checkpoint.tensors)
    name = str(values.get("quant_method") or values.get("method") or "unnamed").lower()
    if name == "gguf":
        return _gguf(checkpoint)
    make = _FORMATS.get(name)
    if make is None:
        raise CheckpointError(
            f"config: quantization method {name!r} is not supported; supported: {', '.join(NAMES)}"
        )
    every = [*layers, head]
    _check_types(checkpoint)
    method_of, ignored = make(checkpoint, every)
    return Scheme(
        name,
        checkpoint.tensors,
        _by_part(method_of),
        stored_head=not isinstance(method_of(head), Unquantized),
        ignored=ignored,
    )


MethodOf = Callable[[LinearSpec], AnyMethod]
"""The method of a layer of one part."""


def _by_part(method_of: MethodOf) -> MethodFor:
    """Fused layers get one method when their parts agree on it (the same object), else one each."""

    def method_for(spec: LinearSpec) -> AnyMethod:
        methods = [method_of(spec.part(index)) for index in range(len(spec.parts))]
        if all(method is methods[0] for method in methods[1:]):
            return methods[0]
        return Parts(methods)

    return method_for


def _gptq(checkpoint: Checkpoint, layers: Sequence[LinearSpec]) -> tuple[MethodOf, Sequence[str]]:
    config = gptq.read_config(checkpoint.quantization or {})
    settings = {
        part: config.of(part)
        for layer in layers
        for part in layer.parts
        if f"{part}.qweight" in checkpoint.types
    }
    known = {part: found for part, found in settings.items() if found is not None}
    source = checkpoint.tensors
    shapes = source.shapes()
    specs = {part: layer.part(index) for layer in layers for index, part in enumerate(layer.parts)}
    complete = {
        part: found
        for part, found in known.items()
        if all(
            tuple(shapes.get(name, ())) == shape
            for name, shape in gptq.GPTQ(found, 1).tensor_shapes(specs[part]).items()
        )
    }
    step = max(1, len(complete) // _SAMPLED_LAYERS)
    samples = dict(list(complete.items())[::step])
    version = gptq.zero_point_version(samples, source, config.version) if samples else 1
    methods = {(found.bits, found.group): gptq.GPTQ(found, version) for found in known.values()}
    floats = Unquantized()
    default = gptq.GPTQ(config, version)

    def method_of(spec: LinearSpec) -> AnyMethod:
        part = spec.parts[0]
        if f"{part}.weight" in shapes and f"{part}.qweight" not in shapes:
            return floats
        found = known.get(part)
        return default if found is None else methods[found.bits, found.group]

    return method_of, ()


def _awq(checkpoint: Checkpoint, layers: Sequence[LinearSpec]) -> tuple[MethodOf, Sequence[str]]:
    method, floats = awq.AWQ(awq.read_config(checkpoint.quantization or {})), Unquantized()
    shapes = checkpoint.tensors.shapes()

    def method_of(spec: LinearSpec) -> AnyMethod:
        part = spec.parts[0]
        plain = f"{part}.weight" in shapes and f"{part}.qweight" not in shapes
        return floats if plain else method

    return method_of, ()


def _bitsandbytes(
    checkpoint: Checkpoint, layers: Sequence[LinearSpec]
) -> tuple[MethodOf, Sequence[str]]:
    settings = Settings("quantization_config", checkpoint.quantization or {})
    types, floats = checkpoint.types, Unquantized()
    parts = [part for layer in layers for part in layer.parts]
    method: AnyMethod
    if settings.boolean("load_in_4bit", False):
        kind = settings.text("bnb_4bit_quant_type", "fp4")
        if kind not in bitsandbytes.CODES:
            raise CheckpointError(
                f"quantization_config: bnb_4bit_quant_type {kind!r} is not supported (nf4, fp4)"
            )
        storage = settings.text("bnb_4bit_quant_storage", "uint8")
        if storage != "uint8":
            raise CheckpointError(
                f"quantization_config: bnb_4bit_quant_storage {storage!r} is not supported (uint8)"
            )
        double = settings.boolean("bnb_4bit_use_double_quant", False)
        method = bitsandbytes.StoredCodes(kind, double)
        ignored = [method.state_name(part) for part in parts]
    elif settings.boolean("load_in_8bit", False):
        threshold = settings.values.get("llm_int8_threshold", 6.0)
        method = LLMInt8(float(threshold or "inf"), stored=True)
        ignored = [f"{part}.weight_format" for part in parts]
    else:
        raise CheckpointError(
            "quantization_config: bitsandbytes with neither load_in_4bit nor load_in_8bit"
        )

    def method_of(spec: LinearSpec) -> AnyMethod:
        return floats if types.get(f"{spec.parts[0]}.weight") in FLOAT_TYPES else method

    return method_of, ignored


def _compressed_tensors(
    checkpoint: Checkpoint, layers: Sequence[LinearSpec]
) -> tuple[MethodOf, Sequence[str]]:
    rules, left_out = compressed_tensors.read_rules(checkpoint.quantization or {})
    types, floats = checkpoint.types, Unquantized()

    def method_of(spec: LinearSpec) -> AnyMethod:
        part = spec.parts[0]
        if types.get(f"{part}.weight") in FLOAT_TYPES:
            return floats
        if compressed_tensors.matches(part, left_out):
            return floats
        for rule in rules:
            if compressed_tensors.matches(part, rule.targets):
                return rule.method
        return floats

    parts = [part for layer in layers for part in layer.parts]
    return method_of, [f"{part}.{kind}" for part in parts for kind in _STATIC_SCALES]


_STATIC_SCALES = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
"""Scales of activations that are not used: tokens are scaled when they are seen, or not at all."""


def _fp8(checkpoint: Checkpoint, layers: Sequence[LinearSpec]) -> tuple[MethodOf, Sequence[str]]:
    """Fine-grained FP8 as DeepSeek, Qwen and Transformers write it: blocks and inverse scales; or
    one scale a tensor."""
    values = checkpoint.quantization or {}
    block = values.get("weight_block_size")
    method: AnyMethod
    if isinstance(block, list) and len(block) == 2:
        method = Fp8("block", (int(block[0]), int(block[1])), "weight_scale_inv")
    elif block is None:
        method = Fp8("tensor")
    else:
        raise CheckpointError(f"quantization_config: weight_block_size is {block!r}")
    types, floats = checkpoint.types, Unquantized()

    def method_of(spec: LinearSpec) -> AnyMethod:
        return floats if types.get(f"{spec.parts[0]}.weight") in FLOAT_TYPES else method

    parts = [part for layer in layers for part in layer.parts]
    return method_of, [f"{part}.input_scale" for part in parts]


def _torchao(
    checkpoint: Checkpoint, layers: Sequence[LinearSpec]
) -> tuple[MethodOf, Sequence[str]]:
    kind = str((checkpoint.quantization or {}).get("quant_type"))
    if "Int8WeightOnlyConfig" not in kind:
        raise CheckpointError(
            f"quantization_config: torchao {kind[:100]} is not supported (Int8WeightOnlyConfig is)"
        )
    types, floats, method = checkpoint.types, Unquantized(), TorchaoInt8()

    def method_of(spec: LinearSpec) -> AnyMethod:
        return floats if types.get(f"{spec.parts[0]}.weight") in FLOAT_TYPES else method

    return method_of, ()


def _gguf(checkpoint: Checkpoint) -> Scheme:
    """Blocks as they are; a file of floats alone is not quantized."""
    types = checkpoint.types
    if not any(kind in gguf_blocks.BLOCK_TYPES for kind in types.values()):
        return Scheme("none", checkpoint.tensors)
    name = "model.embed_tokens.weight"
    source = gguf_blocks.SharedRows(cast(gguf_blocks.BlockSource, checkpoint.tensors), name)
    floats = Unquantized()
    methods: dict[str, AnyMethod] = {
        kind: gguf_blocks.Blocks(source) for kind in gguf_blocks.BLOCK_TYPES
    }

    def method_of(spec: LinearSpec) -> AnyMethod:
        return methods.get(types.get(f"{spec.parts[0]}.weight", ""), floats)

    def embedding(name: str, dtype: torch.dtype) -> gguf_blocks.BlockTable:
        kind, data = source.packed(name)
        columns = checkpoint.config.hidden_size
        return gguf_blocks.BlockTable(gguf_blocks.BlockMatrix(data, kind, columns), dtype)

    blocks = types.get(name) in gguf_blocks.BLOCK_TYPES
    head = name if checkpoint.config.tie_word_embeddings else "lm_head.weight"
    return Scheme(
        "gguf",
        source,
        _by_part(method_of),
        stored_head=types.get(head) in gguf_blocks.BLOCK_TYPES,
        embedding=embedding if blocks else None,
    )


_FORMATS: dict[str, Callable[..., tuple[MethodOf, Sequence[str]]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "torchao": _torchao,
}
NAMES = (*_FORMATS, "gguf")
"""Names of formats that come with a checkpoint."""


_TYPES = {
    **dict.fromkeys(("qweight", "qzeros", "g_idx", "weight_packed"), ("I32",)),
    **dict.fromkeys(("weight_shape",), ("I64", "I32")),
    **dict.fromkeys(("scales", "weight_scale", "weight_scale_inv", "SCB"), FLOAT_TYPES),
    **dict.fromkeys(("absmax",), ("U8", *FLOAT_TYPES)),
    **dict.fromkeys(("quant_map", "nested_absmax", "nested_quant_map", "bias"), FLOAT_TYPES),
    **dict.fromkeys(("_weight_qdata", "_weight_zero_point"), ("I8",)),
}
"""Types that tensors may have, by the last part of their names."""
_FLOAT_NAMES = ("norm.weight", "embed_tokens.weight")


def _check_types(checkpoint: Checkpoint) -> None:
    for name, kind in checkpoint.types.items():
        wanted = _TYPES.get(name.rpartition(".")[2], ())
        if name.endswith(_FLOAT_NAMES):
            wanted = FLOAT_TYPES
        if wanted and kind not in wanted:
            raise CheckpointError(
                f"{checkpoint.name}: {name} has dtype {kind}; {' or '.join(wanted)} is needed"
            )


def _check_floats(checkpoint: Checkpoint) -> None:
    for name, kind in checkpoint.types.items():
        if kind not in FLOAT_TYPES:
            raise CheckpointError(
                f"{checkpoint.name}: {name} has dtype {kind}, where floats"
                f" ({', '.join(FLOAT_TYPES)}) are needed: config.json has no quantization_config"
                " that says how to read it"
            )
