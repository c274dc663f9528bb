"""Reads a Hugging Face config.json into a shape; what is not understood is refused by name.

Defaults of missing keys are those of the architecture in Transformers, since older files leave out
what equals them. Knows no file system beyond the one file it is given.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.shapes import ModelShape

SUPPORTED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "mixtral",
    "qwen3_moe",
)
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")
_DEFAULT_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}
_DEFAULT_KV_HEADS = {"mistral": 8, "mixtral": 8, "gemma2": 4, "gemma3_text": 4}
_DEFAULT_LENGTH = 32768


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises PlanError when it cannot be read or is no object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise PlanError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path} holds a {type(config).__name__}, not a model configuration")
    return config


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape a config.json describes.

    A multimodal config is read through its `text_config` and the picture tower left out, which a
    note says. Raises PlanError naming the key that is missing, wrong or not supported.
    """
    notes: tuple[str, ...] = ()
    if isinstance(config.get("text_config"), Mapping):
        outer = config.get("model_type")
        inner = dict(config["text_config"])
        inner.setdefault("model_type", {"gemma3": "gemma3_text"}.get(str(outer), outer))
        if "tie_word_embeddings" in config:
            inner.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
        config = inner
        notes = (f"only the text part of {outer} is counted, without its other towers",)
    model_type = config.get("model_type")
    if model_type not in SUPPORTED:
        raise PlanError(
            f"{name}: model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    return _Reader(config, name, str(model_type), notes).shape()


class _Reader:
    def __init__(
        self, config: Mapping[str, Any], name: str, model_type: str, notes: tuple[str, ...]
    ) -> None:
        self.config = config
        self.name = name
        self.model_type = model_type
        self.notes = notes

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise PlanError(f"{self.name}: the configuration has no {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"{self.name}: {key} must be a positive integer, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PlanError(f"{self.name}: {key} must be true or false, not {value!r}")
        return value

    def shape(self) -> ModelShape:
        kind = self.model_type
        hidden = self.integer("hidden_size")
        layers = self.integer("num_hidden_layers")
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", _DEFAULT_KV_HEADS.get(kind, heads))
        if heads % kv_heads:
            raise PlanError(
                f"{self.name}: num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        if self.config.get("head_dim") is None and kind not in _DEFAULT_HEAD_DIM and hidden % heads:
            raise PlanError(
                f"{self.name}: hidden_size {hidden} is no multiple of num_attention_heads "
                f"{heads} and there is no head_dim"
            )
        attention_bias = self.flag("attention_bias", False)
        phi = kind == "phi"
        norms = {"phi": 1, "gemma2": 4, "gemma3_text": 4}.get(kind, 2)
        experts, per_token, size, moe_layers = self.experts(layers)
        return ModelShape(
            name=self.name,
            model_type=kind,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.integer("head_dim", _DEFAULT_HEAD_DIM.get(kind, hidden // heads)),
            intermediate_size=self.integer("intermediate_size"),
            vocab_size=self.integer("vocab_size"),
            max_position_embeddings=self.integer("max_position_embeddings", _DEFAULT_LENGTH),
            tied=self.flag("tie_word_embeddings", kind in _TIED_BY_DEFAULT),
            qkv_bias=kind == "qwen2" or phi or attention_bias,
            o_bias=phi or (attention_bias and kind != "qwen2"),
            mlp_bias=phi or self.flag("mlp_bias", False),
            head_bias=phi,
            norm_bias=phi,
            qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
            gated_mlp=not phi,
            norms_per_layer=norms,
            windows=self.windows(layers),
            num_experts=experts,
            experts_per_token=per_token,
            expert_size=size,
            moe_layers=moe_layers,
            notes=self.notes,
        )

    def windows(self, layers: int) -> tuple[int | None, ...]:
        """`layer_types` is the authority where there is one; else the family's own rule."""
        if self.config.get("sliding_window") is None:
            return ()
        window = self.integer("sliding_window")
        types = self.config.get("layer_types")
        kind = self.model_type
        if types is not None:
            if not isinstance(types, list) or len(types) != layers:
                raise PlanError(f"{self.name}: layer_types must list {layers} layers")
            sliding = [t == "sliding_attention" for t in types]
        elif kind in ("qwen2", "qwen3", "qwen3_moe"):
            if not self.flag("use_sliding_window", False):
                return ()
            first = self.config.get("max_window_layers", layers)
            sliding = [i >= int(first) for i in range(layers)]
        elif kind == "gemma2":
            sliding = [i % 2 == 0 for i in range(layers)]
        elif kind == "gemma3_text":
            pattern = self.integer("sliding_window_pattern", 6)
            sliding = [(i + 1) % pattern != 0 for i in range(layers)]
        else:
            sliding = [kind in ("mistral", "mixtral", "phi3")] * layers
        return tuple(window if s else None for s in sliding) if any(sliding) else ()

    def experts(self, layers: int) -> tuple[int, int, int, tuple[int, ...]]:
        """(experts, experts a token, their size, the layers that have them)."""
        if self.model_type == "mixtral":
            count = self.integer("num_local_experts", 8)
            return (
                count,
                self.integer("num_experts_per_tok", 2),
                self.integer("intermediate_size"),
                tuple(range(layers)),
            )
        if self.model_type != "qwen3_moe":
            return 0, 0, 0, ()
        step = self.integer("decoder_sparse_step", 1)
        dense = set(self.config.get("mlp_only_layers") or [])
        chosen = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
        key = "num_experts" if "num_experts" in self.config else "num_local_experts"
        return (
            self.integer(key),
            self.integer("num_experts_per_tok"),
            self.integer("moe_intermediate_size"),
            chosen,
        )
