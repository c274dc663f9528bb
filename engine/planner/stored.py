"""What a checkpoint's files really hold: bytes by part, read from headers alone.

For a quantized checkpoint this is the truth that a formula only approaches (mixed bits, modules
left out, index vectors). Knows names of tensors, not their values.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.gguf_header import GGUFHeader
from headrace.engine.planner.schemes import Scheme, parse_scheme
from headrace.engine.planner.weights import WeightBytes

_DTYPE_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U8": 8,
    "U16": 16,
    "U32": 32,
    "U64": 64,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
}
_MAX_HEADER = 100_000_000
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    32: "BF16",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint as it lies on disk. `weights` counts what is loaded from it."""

    scheme: Scheme
    weights: WeightBytes
    num_params: int | None
    """Values in the files, for unquantized and GGUF files; None where packing hides it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dims: tuple[int, ...]
    num_bytes: int
    dtype: str


def read_safetensors(folder: Path) -> list[TensorEntry]:
    """All tensors of a folder's safetensors files; empty when it has none.

    With an index, the shards it names; a missing or truncated shard is a PlanError.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({str(v) for v in weight_map.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{index} is damaged: {error!r}") from error
        missing = [f for f in files if not (folder / f).is_file()]
        if missing:
            raise PlanError(f"{folder} lacks {', '.join(missing)}, which {index.name} names")
    else:
        files = sorted(p.name for p in folder.glob("*.safetensors"))
        if "model.safetensors" in files:
            files = ["model.safetensors"]
    return [entry for file in files for entry in _read_file(folder / file)]


def _read_file(path: Path) -> list[TensorEntry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER, size - 8):
                raise PlanError(f"{path} is damaged or truncated inside its header")
            header = json.loads(file.read(length))
        entries = []
        for name, info in header.items():
            if name == "__metadata__":
                continue
            start, end = info["data_offsets"]
            dims = tuple(int(d) for d in info["shape"])
            if 8 + length + end > size:
                raise PlanError(
                    f"{path} is truncated: tensor {name!r} ends at byte {8 + length + end:,}, "
                    f"the file has {size:,}; download it again"
                )
            bits = _DTYPE_BITS.get(info["dtype"])
            if bits is not None and math.prod(dims) * bits // 8 != end - start:
                raise PlanError(f"{path} is damaged: tensor {name!r} has the wrong size")
            entries.append(TensorEntry(name, dims, end - start, info["dtype"]))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} has a damaged header: {error!r}") from error
    return entries


def stored_safetensors(entries: list[TensorEntry], scheme: Scheme | None, tied: bool) -> Stored:
    """`scheme` None: an unquantized checkpoint, named by its own float type.

    A head that a tied checkpoint holds all the same is not counted: it is not loaded.
    """
    kept = [e for e in entries if not (tied and e.name.startswith("lm_head."))]
    weights = _by_part((e.name, len(e.dims), e.num_bytes) for e in kept)
    if scheme is not None:
        return Stored(scheme, weights, None)
    by_dtype: dict[str, int] = {}
    for entry in kept:
        by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.num_bytes
    dtype = max(by_dtype, key=lambda d: by_dtype[d])
    names = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
    if dtype not in names:
        raise PlanError(f"the checkpoint's weights are {dtype} and there is no quantization_config")
    return Stored(parse_scheme(names[dtype]), weights, sum(math.prod(e.dims) for e in kept))


def stored_gguf(header: GGUFHeader) -> Stored:
    tensors = [t for t in header.tensors if not t.name.startswith("rope_")]
    file_type = _FILE_TYPES.get(header.metadata.get("general.file_type", -1))
    if file_type is None:
        by_type: dict[str, int] = {}
        for tensor in tensors:
            by_type[tensor.type_name] = by_type.get(tensor.type_name, 0) + tensor.num_params
        file_type = max(by_type, key=lambda t: by_type[t])
    scheme = Scheme(f"gguf-{file_type.lower()}", "gguf", _bits(file_type), mixture=file_type)
    weights = _by_part((t.name, len(t.dims), t.num_bytes) for t in tensors)
    return Stored(scheme, weights, sum(t.num_params for t in tensors))


def _bits(file_type: str) -> int:
    if file_type in ("F32", "F16", "BF16"):
        return 32 if file_type == "F32" else 16
    return int(next(c for c in file_type if c.isdigit()))


def _by_part(tensors: Iterable[tuple[str, int, int]]) -> WeightBytes:
    parts = {"linear": 0, "experts": 0, "embedding": 0, "head": 0, "other": 0}
    for name, num_dims, size in tensors:
        if "embed_tokens." in name or name.startswith("token_embd"):
            part = "embedding"
        elif name.startswith(("lm_head.", "output.")):
            part = "head"
        elif ".experts." in name or "_exps." in name:
            part = "experts"
        elif num_dims == 1 and ("norm" in name or name.endswith(".bias")):
            part = "other"
        else:
            part = "linear"
        parts[part] += size
    return WeightBytes(**parts)


def scheme_from_quantization(config: Mapping[str, Any], name: str) -> Scheme | None:
    """The scheme of a config.json's quantization_config, None when there is none.

    Raises PlanError naming a method or bits that no scheme here describes.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise PlanError(f"{name}: quantization_config is no object")
    method = str(quantization.get("quant_method", "")).lower()
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    group = quantization.get("group_size", quantization.get("q_group_size", 128))
    try:
        if method == "gptq":
            size = "channel" if int(group) <= 0 else f"g{int(group)}"
            return parse_scheme(f"gptq-int{int(bits)}-{size}")
        if method == "awq" and int(bits) == 4:
            return parse_scheme(f"awq-g{int(group)}")
        if method == "bitsandbytes":
            return _bitsandbytes(quantization)
        if method == "fp8":
            return parse_scheme("fp8-block" if quantization.get("weight_block_size") else "fp8")
        if method == "compressed-tensors":
            return _compressed_tensors(quantization)
    except (PlanError, TypeError, ValueError) as error:
        raise PlanError(f"{name}: quantization_config is not supported: {error}") from error
    raise PlanError(f"{name}: quantization method {method!r} with {bits} bits is not supported")


def _bitsandbytes(quantization: Mapping[str, Any]) -> Scheme:
    if quantization.get("load_in_8bit") or quantization.get("_load_in_8bit"):
        return parse_scheme("bnb-int8")
    kind = str(quantization.get("bnb_4bit_quant_type", "fp4"))
    double = quantization.get("bnb_4bit_use_double_quant", False)
    return parse_scheme(f"{kind}-double" if double else kind)


def _compressed_tensors(quantization: Mapping[str, Any]) -> Scheme:
    groups = list((quantization.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise PlanError(f"compressed-tensors with {len(groups)} groups of modules")
    weights = groups[0].get("weights") or {}
    activations = groups[0].get("input_activations")
    bits, kind = int(weights.get("num_bits", 0)), weights.get("type")
    if kind == "float" and bits == 8:
        return parse_scheme("fp8-block" if weights.get("strategy") == "block" else "fp8")
    if kind == "int" and bits == 8:
        return parse_scheme("int8-dynamic" if activations else "int8")
    if kind == "int" and bits == 4 and not activations:
        symmetric = "-sym" if weights.get("symmetric", True) else ""
        return parse_scheme(f"int4-g{int(weights.get('group_size') or 128)}{symmetric}")
    raise PlanError(f"compressed-tensors with {bits}-bit {kind} weights")
