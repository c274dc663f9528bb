"""From what the user typed to a model: a folder, a config.json, a GGUF file, a name or a size."""

import glob
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.engine.planner import catalog
from headrace.engine.planner.config import read_config, shape_from_config
from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.gguf_header import GGUFHeader, read_gguf
from headrace.engine.planner.kv import kv_bytes_per_token
from headrace.engine.planner.schemes import Scheme
from headrace.engine.planner.shapes import ModelShape
from headrace.engine.planner.stored import (
    Stored,
    read_safetensors,
    scheme_from_quantization,
    stored_gguf,
    stored_safetensors,
)

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbt])", re.IGNORECASE)
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi2": "phi",
    "phi3": "phi3",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A shape, and what is known of its files.

    `stored`: the checkpoint's own bytes, None when only its shape is known. `quantized`: the scheme
    the checkpoint already has, None for an unquantized one. `assumed`: the shape is a guess.
    """

    shape: ModelShape
    stored: Stored | None = None
    quantized: Scheme | None = None
    assumed: bool = False


def resolve(text: str) -> Model:
    """Raises PlanError saying what is wrong with the file, or that the name is unknown."""
    try:
        path = Path(text).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:
        raise PlanError(f"{text[:80]}: {error}"[:200]) from error
    if is_folder:
        return _from_folder(path)
    if is_file:
        return _from_gguf(path) if path.suffix == ".gguf" else _from_config(path)
    if path.suffix in (".gguf", ".json"):
        raise PlanError(f"{text} does not exist")
    size = _SIZE.fullmatch(text.strip())
    if size:
        return _from_size(text.strip(), float(size[1]) * _UNITS[size[2].lower()])
    shape = catalog.find(text)
    if shape is not None:
        return Model(shape)
    cached = _hub_snapshot(text)
    if cached is not None:
        return _from_folder(cached)
    raise catalog.unknown(text)


def _hub_snapshot(name: str) -> Path | None:
    """The folder of a model that huggingface_hub has fetched before, newest first."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    found = hub.glob(f"models--{glob.escape(name.replace('/', '--'))}/snapshots/*/config.json")
    return max((p.parent for p in found), key=lambda p: p.stat().st_mtime, default=None)


def _from_folder(folder: Path) -> Model:
    config_path = folder / "config.json"
    if not config_path.is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1 or (ggufs and "-00001-of-" in ggufs[0].name):
            return _from_gguf(ggufs[0])
        what = f"{len(ggufs)} GGUF files: name one" if ggufs else "no config.json and no .gguf file"
        raise PlanError(f"{folder} has {what}")
    config = read_config(config_path)
    name = folder.resolve().name
    shape = shape_from_config(config, name)
    quantized = scheme_from_quantization(config, name)
    entries = read_safetensors(folder)
    if not entries:
        return Model(shape, quantized=quantized)
    stored = stored_safetensors(entries, quantized, shape.tied)
    return Model(_check_count(shape, stored), stored, quantized)


def _from_config(path: Path) -> Model:
    config = read_config(path)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return Model(shape_from_config(config, name), quantized=scheme_from_quantization(config, name))


def _check_count(shape: ModelShape, stored: Stored) -> ModelShape:
    """Adds a note when the files do not hold what the configuration describes."""
    count = stored.num_params
    if count is None or abs(count - shape.num_params) <= 0.001 * shape.num_params:
        return shape
    note = (
        f"the files hold {count / 1e9:.3f} B values, the configuration describes "
        f"{shape.num_params / 1e9:.3f} B"
    )
    return replace(shape, notes=(*shape.notes, note))


def _from_gguf(path: Path) -> Model:
    header = read_gguf(path)
    shape = shape_from_config(_gguf_config(header, path), path.stem)
    stored = stored_gguf(header)
    quantized = None if stored.scheme.mixture in ("F32", "F16", "BF16") else stored.scheme
    return Model(_check_count(shape, stored), stored, quantized)


def _gguf_config(header: GGUFHeader, path: Path) -> dict[str, Any]:
    metadata = header.metadata
    tensors = {t.name: t for t in header.tensors}
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise PlanError(
            f"{path}: GGUF architecture {architecture!r} is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].dims) != 2:
        raise PlanError(f"{path} has no token_embd.weight: it holds no complete model")

    def value(key: str) -> Any:
        found = metadata.get(f"{architecture}.{key}")
        if isinstance(found, list):
            if not found or len(set(found)) > 1:
                raise PlanError(f"{path}: {key} differs between layers, which is not supported")
            return found[0]
        return found

    config: dict[str, Any] = {
        "model_type": _ARCHITECTURES[architecture],
        "hidden_size": value("embedding_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        "intermediate_size": value("feed_forward_length"),
        "max_position_embeddings": value("context_length"),
        "sliding_window": value("attention.sliding_window"),
        "vocab_size": tensors["token_embd.weight"].dims[1],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }
    if value("expert_count"):
        config["num_local_experts"] = config["num_experts"] = value("expert_count")
        config["num_experts_per_tok"] = value("expert_used_count")
        config["moe_intermediate_size"] = value("expert_feed_forward_length")
        if architecture == "llama":
            config["model_type"] = "mixtral"
    return config


def _from_size(text: str, params: float) -> Model:
    """A typical decoder of that many parameters.

    The nearest public dense model with grouped-query attention, its feed-forward size adjusted to
    the count; scaled in depth and width first when none is near.
    """
    dense = [s for s in catalog.all_shapes() if not s.num_experts and s.gated_mlp]
    if not 1e6 <= params <= 1e13:
        raise PlanError(f"{text} is no size of a language model; write it as 7B or 350M")
    base = min(
        (s for s in dense if s.num_groups > 1 and not s.windows),
        key=lambda s: abs(math.log(s.num_params / params)),
    )
    ratio = params / base.num_params
    if not 0.75 <= ratio <= 1.33:
        side = ratio ** (1 / 3)
        heads = max(1, round(base.num_heads * side / base.num_groups)) * base.num_groups
        width = heads * base.head_dim
        base = replace(
            base,
            num_layers=max(1, round(base.num_layers * side)),
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=heads // base.num_groups,
            intermediate_size=max(128, round(base.intermediate_size * side)),
        )
    per_column = base.num_layers * 3 * base.hidden_size
    missing = round((params - base.num_params) / per_column)
    inner = max(128, base.intermediate_size + missing)
    near = [s for s in dense if 0.75 <= s.num_params / params <= 1.33]
    notes = [f"{text} names no architecture: a decoder like {base.name} is assumed"]
    if len({kv_bytes_per_token(s) for s in near}) > 1:
        low = min(near, key=kv_bytes_per_token)
        high = max(near, key=kv_bytes_per_token)
        notes.append(
            f"KV a token is {kv_bytes_per_token(low) / 1024:g} KiB for {low.name} and "
            f"{kv_bytes_per_token(high) / 1024:g} KiB for {high.name}: give a config.json for yours"
        )
    shape = replace(base, name=text, intermediate_size=inner, notes=tuple(notes))
    return Model(shape, assumed=True)
