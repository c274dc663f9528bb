"""Writes tiny GGUF files with the gguf package: quantized, permuted as llama.cpp's converter does,
with the byte tokenizer in their metadata. Any block type can be filled with random bytes."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import torch

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Transformers tensor."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, index, rest = module.split(".", 3)
        return f"blk.{index}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What the converter does to q and k rows of the llama architecture: halves become pairs."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    quantization: str = "F32",
    seed: int = 0,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    **overrides: Any,
) -> Path:
    """A model of `tiny` as one file; matrices are stored as `quantization`.

    `metadata`: further keys (integers, floats or strings); `extra`: further float32 tensors.
    """
    config = tiny.tiny_config(family, **{"hidden_size": 64, **overrides})
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in tiny.tiny_weights(config, seed).items():
        module = name.split(".")[-2]
        if family == "llama" and module in heads:
            weight = permuted(weight, heads[module])
        _add_tensor(writer, gguf_name(name), weight.contiguous().numpy(), quantization)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values.astype(np.float32))
    _finish(writer)
    return path


def write_random_blocks(path: Path, quantization: str, rows: int, columns: int) -> Path:
    """One matrix `blk.0.ffn_up.weight` of random bits: every scale, minimum and quant occurs."""
    kind = gguf.GGMLQuantizationType[quantization]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(len(quantization) + rows)
    data = generator.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    _finish(writer)
    return path


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], quantization: str
) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocabulary = tiny.byte_tokenizer().get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (len(tokens) - 256))
    writer.add_token_merges([])
    writer.add_bos_token_id(tiny.BOS)
    writer.add_eos_token_id(tiny.EOS)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
