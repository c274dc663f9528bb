"""Public models by name, each with the dimensions of its published config.json.

Facts only: typing a name here or pointing at the checkpoint's folder gives the same plan. Names are
matched without case, owner or the suffix of a fine-tuned variant (`Qwen/Qwen2-7B-Instruct`).
"""

import difflib
import re
from typing import Any

from headrace.engine.planner.config import shape_from_config
from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.shapes import ModelShape


def _config(
    model_type: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    length: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
        **more,
    }


_TIED = {"tie_word_embeddings": True}
_QWEN3 = {"head_dim": 128}
_QWEN3_TIED = {"head_dim": 128, "tie_word_embeddings": True}
_QWEN3_MOE = {"head_dim": 128, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
_GEMMA2 = {"head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True}

_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2-0.5B": _config("qwen2", 896, 24, 14, 2, 4864, 151936, 131072, **_TIED),
    "Qwen2-1.5B": _config("qwen2", 1536, 28, 12, 2, 8960, 151936, 131072, **_TIED),
    "Qwen2-7B": _config("qwen2", 3584, 28, 28, 4, 18944, 152064, 131072),
    "Qwen2-72B": _config("qwen2", 8192, 80, 64, 8, 29568, 152064, 131072),
    "Qwen2.5-0.5B": _config("qwen2", 896, 24, 14, 2, 4864, 151936, 32768, **_TIED),
    "Qwen2.5-1.5B": _config("qwen2", 1536, 28, 12, 2, 8960, 151936, 131072, **_TIED),
    "Qwen2.5-3B": _config("qwen2", 2048, 36, 16, 2, 11008, 151936, 32768, **_TIED),
    "Qwen2.5-7B": _config("qwen2", 3584, 28, 28, 4, 18944, 152064, 131072),
    "Qwen2.5-14B": _config("qwen2", 5120, 48, 40, 8, 13824, 152064, 131072),
    "Qwen2.5-32B": _config("qwen2", 5120, 64, 40, 8, 27648, 152064, 131072),
    "Qwen2.5-72B": _config("qwen2", 8192, 80, 64, 8, 29568, 152064, 131072),
    "Qwen3-0.6B": _config("qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, **_QWEN3_TIED),
    "Qwen3-1.7B": _config("qwen3", 2048, 28, 16, 8, 6144, 151936, 40960, **_QWEN3_TIED),
    "Qwen3-4B": _config("qwen3", 2560, 36, 32, 8, 9728, 151936, 40960, **_QWEN3_TIED),
    "Qwen3-8B": _config("qwen3", 4096, 36, 32, 8, 12288, 151936, 40960, **_QWEN3),
    "Qwen3-14B": _config("qwen3", 5120, 40, 40, 8, 17408, 151936, 40960, **_QWEN3),
    "Qwen3-32B": _config("qwen3", 5120, 64, 64, 8, 25600, 151936, 40960, **_QWEN3),
    "Qwen3-30B-A3B": _config(
        "qwen3_moe",
        2048,
        48,
        32,
        4,
        6144,
        151936,
        40960,
        num_experts=128,
        num_experts_per_tok=8,
        **_QWEN3_MOE,
    ),
    "Llama-2-7B": _config("llama", 4096, 32, 32, 32, 11008, 32000, 4096),
    "Llama-2-13B": _config("llama", 5120, 40, 40, 40, 13824, 32000, 4096),
    "Llama-2-70B": _config("llama", 8192, 80, 64, 8, 28672, 32000, 4096),
    "Llama-3-8B": _config("llama", 4096, 32, 32, 8, 14336, 128256, 8192),
    "Llama-3-70B": _config("llama", 8192, 80, 64, 8, 28672, 128256, 8192),
    "Llama-3.1-8B": _config("llama", 4096, 32, 32, 8, 14336, 128256, 131072),
    "Llama-3.1-70B": _config("llama", 8192, 80, 64, 8, 28672, 128256, 131072),
    "Llama-3.1-405B": _config("llama", 16384, 126, 128, 8, 53248, 128256, 131072),
    "Llama-3.2-1B": _config("llama", 2048, 16, 32, 8, 8192, 128256, 131072, head_dim=64, **_TIED),
    "Llama-3.2-3B": _config("llama", 3072, 28, 24, 8, 8192, 128256, 131072, head_dim=128, **_TIED),
    "Llama-3.3-70B": _config("llama", 8192, 80, 64, 8, 28672, 128256, 131072),
    "Mistral-7B-v0.1": _config(
        "mistral", 4096, 32, 32, 8, 14336, 32000, 32768, sliding_window=4096
    ),
    "Mistral-7B-v0.2": _config("mistral", 4096, 32, 32, 8, 14336, 32000, 32768),
    "Mistral-7B-v0.3": _config("mistral", 4096, 32, 32, 8, 14336, 32768, 32768),
    "Mistral-Nemo-12B": _config("mistral", 5120, 40, 32, 8, 14336, 131072, 131072, head_dim=128),
    "Mixtral-8x7B": _config(
        "mixtral", 4096, 32, 32, 8, 14336, 32000, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "SmolLM2-135M": _config("llama", 576, 30, 9, 3, 1536, 49152, 8192, **_TIED),
    "SmolLM2-360M": _config("llama", 960, 32, 15, 5, 2560, 49152, 8192, **_TIED),
    "SmolLM2-1.7B": _config("llama", 2048, 24, 32, 32, 8192, 49152, 8192, **_TIED),
    "Gemma-2-2B": _config("gemma2", 2304, 26, 8, 4, 9216, 256000, 8192, **_GEMMA2),
    "Gemma-2-9B": _config("gemma2", 3584, 42, 16, 8, 14336, 256000, 8192, **_GEMMA2),
    "Phi-2": _config("phi", 2560, 32, 32, 32, 10240, 51200, 2048),
    "Phi-3-mini-4k": _config("phi3", 3072, 32, 32, 32, 8192, 32064, 4096, sliding_window=2047),
    "Phi-4": _config("phi3", 5120, 40, 40, 10, 17920, 100352, 16384),
}
_VARIANT = re.compile(
    r"(-(it|instruct|chat|base|hf|pt|\d{4}|instruct-2407|base-2407|thinking-2507|instruct-2507))+$"
)
_ALIASES = {
    "mistral-nemo": "mistral-nemo-12b",
    "meta-llama-3-8b": "llama-3-8b",
    "meta-llama-3-70b": "llama-3-70b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
    "meta-llama-3.1-405b": "llama-3.1-405b",
}
_BY_KEY = {name.lower(): name for name in _CONFIGS}


def names() -> tuple[str, ...]:
    return tuple(_CONFIGS)


def find(name: str) -> ModelShape | None:
    """The shape of a public name, or None. `-Instruct-v0.3` and an owner in front are ignored."""
    key = name.rsplit("/", 1)[-1].lower().replace("_", "-").replace(":", "-")
    version = re.search(r"-v0\.\d$", key)
    stem = key[: version.start()] if version else key
    stem = _VARIANT.sub("", stem) + (version.group() if version else "")
    stem = _ALIASES.get(stem, stem)
    found = _BY_KEY.get(stem)
    return shape(found) if found else None


def shape(name: str) -> ModelShape:
    """The shape of a name exactly as `names()` spells it."""
    return shape_from_config(_CONFIGS[name], name)


def all_shapes() -> tuple[ModelShape, ...]:
    return tuple(shape(name) for name in _CONFIGS)


def unknown(name: str) -> PlanError:
    """The error for a name that is no file and no known model, with the nearest ones."""
    key = name.rsplit("/", 1)[-1].lower()
    near = difflib.get_close_matches(key, _BY_KEY, n=3, cutoff=0.6)
    hint = f" Did you mean {', '.join(_BY_KEY[k] for k in near)}?" if near else ""
    return PlanError(
        f"{name!r} is no folder, config.json, .gguf file, known model or size such as 7B.{hint} "
        "Give the path of the model's config.json for any other model."
    )


def smaller_siblings(name: str) -> list[ModelShape]:
    """Smaller models of the same family (`Qwen2.5-`), the largest first; none for other names."""
    if name not in _CONFIGS:
        return []
    family = re.split(r"-\d+(?:\.\d+)?[bBmM]", name)[0]
    own = shape(name).num_params
    same = [shape(n) for n in _CONFIGS if re.split(r"-\d+(?:\.\d+)?[bBmM]", n)[0] == family]
    smaller = [s for s in same if s.num_params < 0.9 * own]
    return sorted(smaller, key=lambda s: -s.num_params)
