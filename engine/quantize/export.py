"""The files beside the weights: config.json, tokenizer, generation_config, from a folder or a GGUF
file alike, as Transformers and vLLM read them."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import processors

from headrace.engine.errors import EngineError
from headrace.engine.layers.rope import inverse_frequencies
from headrace.engine.loading import gguf_tokenizer
from headrace.engine.loading.gguf import config_values
from headrace.engine.loading.gguf_file import GGUFFile, read_gguf
from headrace.engine.models.config import RopeConfig

_COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.json", "chat_template.jinja", "LICENSE", "LICENSE.txt", "LICENSE.md"),
    *("NOTICE", "NOTICE.txt", "USE_POLICY.md"),
)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_metadata(folder: Path, model: Path, quantization: dict[str, Any], dtype: str) -> None:
    """Everything but the weights. `model`: the folder or GGUF file that was quantized; `dtype`: of
    the floats that are left."""
    if model.is_dir():
        values = json.loads((model / "config.json").read_bytes())
        for name in _COPIED:
            if (model / name).is_file():
                shutil.copyfile(model / name, folder / name)
    else:
        file = read_gguf(model)
        values = _config_of(file)
        _write_tokenizer(folder, file)
        generation = {key: values[key] for key in _IDS if values.get(key) is not None}
        _write_json(folder / "generation_config.json", generation)
    values["torch_dtype" if "torch_dtype" in values else "dtype"] = dtype
    values["quantization_config"] = quantization
    _write_json(folder / "config.json", values)
    if quantization["quant_method"] == "gptq":
        _write_json(folder / "quantize_config.json", quantization)


_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _config_of(file: GGUFFile) -> dict[str, Any]:
    """config.json as Transformers would have it: the metadata says no class and no token ids."""
    values = config_values(file)
    metadata = file.metadata
    ends = list(gguf_tokenizer.eos_token_ids(metadata))
    rope = values["rope_parameters"]
    factors = rope.pop("frequency_factors", None)
    if factors is not None:
        rope.update(_llama3_scaling(file, values["head_dim"], rope["rope_theta"], factors))
    values["rope_parameters"] = {key: value for key, value in rope.items() if value is not None}
    return {
        "architectures": [_ARCHITECTURES[values["model_type"]]],
        **values,
        "hidden_act": "silu",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "use_cache": True,
    }


def _llama3_scaling(
    file: GGUFFile, head_dim: int, theta: float, factors: list[float]
) -> dict[str, Any]:
    """GGUF stores Llama 3's scaling as a factor a frequency: the published settings that give those
    factors. Raises EngineError where none do."""
    plain, _ = inverse_frequencies(RopeConfig("default", theta), head_dim)
    for factor in _LLAMA3_FACTORS:
        scaled, _ = inverse_frequencies(
            RopeConfig("llama3", theta, factor=factor, **_LLAMA3), head_dim
        )
        found = (plain / scaled).tolist()
        if all(abs(a - b) < 1e-3 * abs(b) for a, b in zip(factors, found, strict=True)):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise EngineError(
        f"{file.path.name}: its rope frequency factors fit no published Llama 3 scaling, so no"
        " config.json can say them; quantize the model's original folder instead"
    )


def _write_tokenizer(folder: Path, file: GGUFFile) -> None:
    metadata = file.metadata
    tokenizer = gguf_tokenizer.build_tokenizer(metadata)
    special = {}
    for role, name in zip(_ROLES, ("bos", "eos", "unknown", "padding"), strict=True):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        token = None if index is None else tokenizer.id_to_token(index)
        if token is not None:
            special[role] = token
    adds_bos = gguf_tokenizer.adds_bos(metadata) and "bos_token" in special
    if adds_bos:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": adds_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    length = metadata.get(f"{metadata['general.architecture']}.context_length")
    if length is not None:
        values["model_max_length"] = length
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        values["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", values)


_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
