"""A GGUF file alone: its metadata as a ModelConfig, its tensors dequantized on load.

Tensors come under Transformers' names and in Transformers' order: the converter's permutation of q
and k rows in the llama architecture is undone here.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.errors import CheckpointError
from headrace.engine.loading.checkpoint import Checkpoint, fingerprint_files, token_ids
from headrace.engine.loading.gguf_file import GGUFFile, GGUFTensor, read_gguf
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.registry import read_config
from headrace.engine.quant.gguf_blocks import BLOCK_TYPES, BlockMatrix
from headrace.engine.quant.packed import expanded

SUPPORTED_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GGUFSource:
    """Tensors of a GGUF file under Transformers' names, dequantized one by one."""

    def __init__(self, file: GGUFFile, config: ModelConfig, permuted: bool) -> None:
        self._file = file
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._permuted = permuted
        self._tensors = {
            _model_name(name): tensor
            for name, tensor in file.tensors.items()
            if name != _ROPE_FACTORS
        }
        for tensor in file.tensors.values():
            _check_extent(file, tensor)
        self.types = {name: _type_of(file, tensor).name for name, tensor in self._tensors.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def load(self, name: str) -> Tensor:
        return self._reordered(name, dequantized(self._file, self._tensors[name]))

    def packed(self, name: str) -> tuple[str, Tensor]:
        """The tensor's type and a copy of its blocks, uint8 [rows, bytes a row]."""
        rows = torch.from_numpy(_bytes_of(self._file, self._tensors[name]).copy())
        return self.types[name], self._reordered(name, rows.view(self._tensors[name].shape[0], -1))

    def _reordered(self, name: str, rows: Tensor) -> Tensor:
        heads = self._heads.get(name.split(".")[-2]) if self._permuted else None
        return rows if heads is None else unpermute(rows, heads)


def open_gguf(path: Path) -> Checkpoint:
    """Read the file's metadata; CheckpointError names what is not supported."""
    file = read_gguf(path)
    values = config_values(file)
    config = read_config(values)
    metadata = file.metadata
    eos: list[int] = []
    for key in _EOS_KEYS:
        eos += token_ids(metadata.get(f"tokenizer.ggml.{key}"), f"{path.name}: {key}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    source = GGUFSource(file, config, permuted=metadata["general.architecture"] == "llama")
    return Checkpoint(
        name=path.stem,
        config=config,
        tensors=source,
        num_token_ids=None if tokens is None else len(tokens),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        fingerprint=fingerprint_files([path]),
        quantization={"quant_method": "gguf"},
        types=source.types,
    )


def config_values(file: GGUFFile) -> dict[str, Any]:
    """The metadata as the config.json that the model had before its conversion."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path.name}: architecture {architecture!r} is not supported;"
            f" supported: {', '.join(_ARCHITECTURES)}"
        )

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise CheckpointError(f"{file.path.name}: {architecture}.{key} is missing")
        return found

    def optional(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    heads = value("attention.head_count")
    head_dim = optional("attention.key_length") or value("embedding_length") // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if optional(key) not in (None, head_dim):
            raise CheckpointError(
                f"{file.path.name}: {key} {optional(key)} differs from head_dim {head_dim};"
                " that is not supported"
            )
    if optional("expert_count"):
        raise CheckpointError(f"{file.path.name}: mixture of experts is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path.name}: tensor token_embd.weight missing")
    window = optional("attention.sliding_window")
    values: dict[str, Any] = {
        "model_type": "mistral" if architecture == "llama" and window else architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope_parameters(file, optional),
        "dtype": "bfloat16" if _is_bfloat16(file) else "float16",
    }
    if window:
        values["sliding_window"] = window
    if architecture == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return values


def _rope_parameters(file: GGUFFile, optional: Any) -> dict[str, Any]:
    kind = optional("rope.scaling.type") or "none"
    parameters: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": optional("rope.freq_base") or 10000.0,
    }
    if kind in ("linear", "yarn"):
        parameters["factor"] = optional("rope.scaling.factor")
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = optional(
            "rope.scaling.original_context_length"
        )
        parameters["attention_factor"] = optional("rope.scaling.attn_factor")
        parameters["beta_fast"] = optional("rope.scaling.yarn_beta_fast")
        parameters["beta_slow"] = optional("rope.scaling.yarn_beta_slow")
    factors = file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        _check_extent(file, factors)
        parameters["frequency_factors"] = dequantized(file, factors).tolist()
    return parameters


def dequantized(file: GGUFFile, tensor: GGUFTensor) -> Tensor:
    """The tensor's values: float16 and float32 as stored, everything else float32."""
    from gguf import quants

    kind = _type_of(file, tensor)
    rows = _bytes_of(file, tensor)
    if kind.name in ("F32", "F16"):
        dtype = np.float32 if kind.name == "F32" else np.float16
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the map is read-only
            return torch.from_numpy(rows.view(dtype).reshape(tensor.shape))
    byte_shape = quants.quant_shape_to_byte_shape(tensor.shape, kind)
    if kind.name in BLOCK_TYPES and len(tensor.shape) == 2:
        # The same values, 15 times as fast (Q4_1, one core: 14 -> 0.8 ns each).
        data = torch.from_numpy(rows.reshape(byte_shape).copy())
        return expanded(BlockMatrix(data, kind.name, tensor.shape[1]))
    values = quants.dequantize(rows.reshape(byte_shape), kind)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(tensor.shape)


def _bytes_of(file: GGUFFile, tensor: GGUFTensor) -> NDArray[np.uint8]:
    size = _num_bytes(file, tensor)
    return np.asarray(np.memmap(file.path, mode="r", offset=tensor.offset, shape=(size,)))


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo the converter's reordering of q and k rows: [heads, head_dim / 2, 2] pairs beside each
    other become [heads, 2, head_dim / 2] halves. Biases have one dimension, weights two."""
    shape = (heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return tensor.reshape(shape).transpose(1, 2).reshape(tensor.shape).contiguous()


def _model_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _type_of(file: GGUFFile, tensor: GGUFTensor) -> Any:
    from gguf import GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(tensor.type_id)
    except ValueError:
        kind = None
    if kind is None or kind.name not in SUPPORTED_TYPES:
        name = tensor.type_id if kind is None else kind.name
        raise CheckpointError(
            f"{file.path.name}: tensor {tensor.name} has type {name}, which is not supported;"
            f" supported: {', '.join(SUPPORTED_TYPES)}"
        )
    return kind


def _num_bytes(file: GGUFFile, tensor: GGUFTensor) -> int:
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[_type_of(file, tensor)]
    elements = math.prod(tensor.shape)
    if not elements:
        raise CheckpointError(f"{file.path.name}: damaged ({tensor.name} is empty)")
    if tensor.shape[-1] % block:
        raise CheckpointError(
            f"{file.path.name}: damaged (rows of {tensor.name} are no multiple of {block})"
        )
    return elements // int(block) * int(size)


def _check_extent(file: GGUFFile, tensor: GGUFTensor) -> None:
    end = tensor.offset + _num_bytes(file, tensor)
    if end > file.size:
        raise CheckpointError(
            f"{file.path.name}: truncated ({tensor.name} ends at byte {end},"
            f" the file has {file.size})"
        )


def _is_bfloat16(file: GGUFFile) -> bool:
    from gguf import GGMLQuantizationType

    bfloat16 = GGMLQuantizationType.BF16.value
    return any(tensor.type_id == bfloat16 for tensor in file.tensors.values())
