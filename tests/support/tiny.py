"""Writes small random checkpoints that go through the real loader.

`write_checkpoint` makes a folder as Transformers saves one: config.json, safetensors (one file or
shards), generation_config.json and a byte-level tokenizer with a chat template. Every token is a
byte (ids 0 to 255) or one of four special tokens, so any text encodes and any output decodes.
Knows no engine: only the file formats.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """config.json of a two-layer model of `family`; `overrides` replace single keys."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family == "qwen3" else 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
        "use_cache": True,
    }
    if family == "mistral":
        config["sliding_window"] = 24
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    if family == "llama":
        config["mlp_bias"] = False
    config.update(overrides)
    return config


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights under Transformers' names, scaled so that every layer matters."""
    generator = torch.Generator().manual_seed(seed)
    hidden = config["hidden_size"]
    intermediate = config["intermediate_size"]
    head_dim = config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    family = config["model_type"]

    def normal(*shape: int, scale: float | None = None) -> torch.Tensor:
        std = 1.5 / math.sqrt(shape[-1]) if scale is None else scale
        return torch.randn(*shape, generator=generator) * std

    def norm(size: int) -> torch.Tensor:
        return 1.0 + normal(size, scale=0.2)

    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=1.0)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        weights[layer + "input_layernorm.weight"] = norm(hidden)
        weights[layer + "post_attention_layernorm.weight"] = norm(hidden)
        for name, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            weights[layer + f"self_attn.{name}.weight"] = normal(rows, hidden)
            if family == "qwen2" or config.get("attention_bias"):
                weights[layer + f"self_attn.{name}.bias"] = normal(rows, scale=0.5)
        weights[layer + "self_attn.o_proj.weight"] = normal(hidden, q_size)
        if family != "qwen2" and config.get("attention_bias"):
            weights[layer + "self_attn.o_proj.bias"] = normal(hidden, scale=0.5)
        if family == "qwen3":
            weights[layer + "self_attn.q_norm.weight"] = norm(head_dim)
            weights[layer + "self_attn.k_norm.weight"] = norm(head_dim)
        for name, shape in (
            ("gate_proj", (intermediate, hidden)),
            ("up_proj", (intermediate, hidden)),
            ("down_proj", (hidden, intermediate)),
        ):
            weights[layer + f"mlp.{name}.weight"] = normal(*shape)
            if config.get("mlp_bias"):
                weights[layer + f"mlp.{name}.bias"] = normal(shape[0], scale=0.5)
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden)
    return weights


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer without merges: one token a byte, and four special tokens."""
    alphabet = _byte_characters()
    vocabulary = {alphabet[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """tokenizer.json and tokenizer_config.json of the byte tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    generation_config: dict[str, Any] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    **overrides: Any,
) -> Path:
    """Write a loadable checkpoint into `folder` (made when missing) and return the folder.

    `dtype` is the stored type (float32, bfloat16, float16); `overrides` go into config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **{"dtype": dtype, **overrides})
    weights = {
        name: tensor.to(getattr(torch, dtype)).contiguous()
        for name, tensor in tiny_weights(config, seed).items()
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END]}
    generation.update(generation_config or {})
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    write_tokenizer(folder, chat_template)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return folder


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = [""] * 256
    for byte in printable:
        characters[byte] = chr(byte)
    shifted = 0
    for byte in range(256):
        if not characters[byte]:
            characters[byte] = chr(0x100 + shifted)
            shifted += 1
    return characters
