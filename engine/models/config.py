"""What a checkpoint says about its model, read strictly: a value that is missing, of the wrong type
or not supported raises CheckpointError by name. Nothing here knows torch or files.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from headrace.engine.errors import CheckpointError

logger = logging.getLogger(__name__)

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")

# Keys that say nothing about the forward pass of a dense decoder.
_HARMLESS = frozenset(
    (
        *("architectures", "auto_map", "_name_or_path", "name_or_path", "transformers_version"),
        *("torch_dtype", "dtype", "model_type", "tokenizer_class", "pretraining_tp", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "initializer_range"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "is_llama_config"),
        *("output_hidden_states", "output_attentions", "return_dict", "max_window_layers"),
        *("rope_interleaved", "_attn_implementation", "_attn_implementation_autoset"),
        *("problem_type", "id2label", "label2id", "task_specific_params"),
    )
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and, if scaled, how.

    `frequency_factors` (head_dim / 2 values) divide the frequencies: GGUF files store Llama 3's
    scaling so. Fields that a type does not use stay None.
    """

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The switches of the decoder core.

    `sliding_windows` has one entry a layer: None for full attention, else how many tokens a query
    sees, itself included. `dtype` is the type that the weights are stored in.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, element_size: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size


@dataclass(slots=True)
class ConfigReader:
    """Typed reading of a config.json's values; remembers which keys were read."""

    values: Mapping[str, Any]
    used: set[str] = field(default_factory=set)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"config: {key} is {value!r}; an integer is needed")
        if value <= 0:
            raise CheckpointError(f"config: {key} is {value}; it must be positive")
        return value

    def optional_integer(self, key: str) -> int | None:
        self.used.add(key)
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"config: {key} is {value!r}; a number is needed")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config: {key} is {value!r}; true or false is needed")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"config: {key} is {value!r}; a string is needed")
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        self.used.add(key)
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"config: {key} is {value!r}; an object is needed")
        return value

    def text_list(self, key: str, length: int) -> list[str] | None:
        self.used.add(key)
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise CheckpointError(f"config: {key} is {value!r}; a list of strings is needed")
        if len(value) != length:
            raise CheckpointError(f"config: {key} has {len(value)} entries for {length} layers")
        return value

    def only(self, key: str, *allowed: object) -> None:
        """Refuse a present `key` whose value is none of `allowed` (None always is)."""
        self.used.add(key)
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(f"config: {key} = {value!r} is not supported")

    def finish(self) -> None:
        """Say which keys nobody read."""
        for key in ("quantization_config", "compression_config"):  # `quant.stored` reads them
            self.mapping(key)
        unknown = sorted(set(self.values) - self.used - _HARMLESS)
        if unknown:
            logger.warning("config.json: not used: %s", ", ".join(unknown))

    def _value(self, key: str, default: object) -> object:
        self.used.add(key)
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"config: {key} is missing")
        return default


def read_rope(reader: ConfigReader, default_theta: float = 10000.0) -> RopeConfig:
    """The rope settings, from Transformers 5's `rope_parameters` or the older `rope_theta` and
    `rope_scaling` (whose type is called `rope_type` or `type`)."""
    parameters = reader.mapping("rope_parameters")
    scaling = reader.mapping("rope_scaling")
    values = dict(parameters or scaling or {})
    theta = values.pop("rope_theta", None)
    if theta is None:
        theta = reader.number("rope_theta", default_theta)
    reader.used.add("rope_theta")
    legacy_type = values.pop("type", None)
    rope_type = values.pop("rope_type", legacy_type) or "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"config: rope type {rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})"
        )
    rope = ConfigReader(values)
    rope.only("partial_rotary_factor", 1.0, 1)
    max_positions = reader.integer("max_position_embeddings")
    reader.only("partial_rotary_factor", 1.0, 1)

    def optional(key: str) -> float | None:
        return None if values.get(key) is None else rope.number(key)

    if rope_type == "default":
        factors = values.get("frequency_factors")
        return RopeConfig(
            "default", float(theta), frequency_factors=None if factors is None else tuple(factors)
        )
    factor = rope.number("factor") if rope_type != "yarn" else optional("factor")
    original = rope.optional_integer("original_max_position_embeddings")
    if rope_type == "linear":
        return RopeConfig("linear", float(theta), factor=cast(float, factor))
    if rope_type == "dynamic":
        return RopeConfig(
            "dynamic",
            float(theta),
            factor=cast(float, factor),
            original_max_position_embeddings=max_positions,
        )
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            float(theta),
            factor=cast(float, factor),
            original_max_position_embeddings=original or max_positions,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    original = original or max_positions
    return RopeConfig(
        "yarn",
        float(theta),
        factor=factor if factor is not None else max_positions / original,
        original_max_position_embeddings=original,
        attention_factor=optional("attention_factor"),
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def read_sliding_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: a window only with `use_sliding_window`; `layer_types` says which layers, else
    those from `max_window_layers` on. Source: Transformers' Qwen2Config."""
    window = reader.optional_integer("sliding_window")
    types = reader.text_list("layer_types", num_layers)
    if not reader.boolean("use_sliding_window", False):
        window = None
    if types is None:
        first = reader.integer("max_window_layers", num_layers) if window else num_layers
        return tuple(window if index >= first else None for index in range(num_layers))
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(f"config: layer type {unknown[0]!r} is not supported")
    if "sliding_attention" in types and window is None:
        raise CheckpointError("config: layer_types asks for sliding_attention without a window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_decoder(
    reader: ConfigReader,
    *,
    sliding_windows: tuple[int | None, ...] | None = None,
    default_head_dim: int | None = None,
    default_eps: float | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """The part that all families read alike; each family's file adds its switches."""
    reader.only("hidden_act", "silu")
    num_layers = reader.integer("num_hidden_layers")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    hidden_size = reader.integer("hidden_size")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config: {num_heads} attention heads cannot share {num_kv_heads} key-value heads"
        )
    head_dim = reader.optional_integer("head_dim") or default_head_dim
    if head_dim is None:
        if hidden_size % num_heads:
            raise CheckpointError("config: head_dim is missing and hidden_size is no multiple")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(f"config: head_dim {head_dim} is odd; rope needs pairs")
    return ModelConfig(
        model_type=reader.text("model_type"),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=reader.integer("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps", default_eps),
        rope=read_rope(reader),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        sliding_windows=sliding_windows or (None,) * num_layers,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=_stored_dtype(reader),
    )


def _stored_dtype(reader: ConfigReader) -> str:
    value = reader.values.get("dtype") or reader.values.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(f"config: dtype {name!r} is not supported")
    return name
