"""A Hugging Face folder: config.json, one or many safetensors, generation_config.json.

Weights are memory-mapped; of the tokenizer only its size and its end of text are looked at.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.engine.errors import CheckpointError
from headrace.engine.loading.checkpoint import Checkpoint, fingerprint_files, token_ids
from headrace.engine.models.registry import read_config

_DTYPES = ("F32", "F16", "BF16", "I64", "I32", "I8", "U8", "F8_E4M3")
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class SafetensorsSource:
    """Tensors of one or many safetensors files, mapped on first use."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """`files`: which file holds each tensor."""
        self._files = files
        self._handles = {path: _open(path) for path in sorted(set(files.values()))}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}
        for name, path in files.items():
            part = self._handles[path].get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise CheckpointError(
                    f"{path.name}: {name} has dtype {part.get_dtype()};"
                    f" supported: {', '.join(_DTYPES)}"
                )
            self._shapes[name] = tuple(part.get_shape())
            self.types[name] = part.get_dtype()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[self._files[name]].get_tensor(name)
        return tensor


def open_folder(path: Path) -> Checkpoint:
    """Read the folder's configuration and map its weights; CheckpointError names what is wrong."""
    values = _read_json(path / "config.json")
    config = read_config(values)
    generation = _read_optional(path / "generation_config.json")
    source = SafetensorsSource(files := _weight_files(path))
    tokenizer_size, tokenizer_eos = _tokenizer_facts(path)
    eos = [
        *token_ids(generation.get("eos_token_id"), "generation_config.json: eos_token_id"),
        *token_ids(values.get("eos_token_id"), "config.json: eos_token_id"),
        *tokenizer_eos,
    ]
    return Checkpoint(
        name=path.name,
        config=config,
        tensors=source,
        num_token_ids=tokenizer_size,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        default_sampling=_default_sampling(generation),
        fingerprint=fingerprint_files({*files.values(), path / "config.json"}),
        quantization=values.get("quantization_config") or values.get("compression_config"),
        types=source.types,
    )


def _weight_files(path: Path) -> dict[str, Path]:
    """Which file holds each tensor: by the index when there is one, else one model.safetensors."""
    index_path = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index_path}: weight_map is missing")
        files = {name: path / str(file) for name, file in weight_map.items()}
        for name, file in files.items():
            if not file.is_file():
                raise CheckpointError(f"{path}: {file.name} is missing (it holds {name})")
        present: dict[str, Path] = {}
        for file in sorted(set(files.values())):
            present.update(dict.fromkeys(_open(file).keys(), file))
        lost = [name for name, file in files.items() if present.get(name) != file]
        if lost:
            raise CheckpointError(f"{files[lost[0]]}: tensor {lost[0]} is missing")
        return present
    if not single.is_file():
        others = [file.name for pattern in ("*.bin", "*.pth") for file in path.glob(pattern)]
        found = f"; {others[0]} cannot be read, convert it to safetensors" if others else ""
        raise CheckpointError(f"{path}: model.safetensors is missing{found}")
    return dict.fromkeys(_open(single).keys(), single)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error


def _tokenizer_facts(path: Path) -> tuple[int | None, list[int]]:
    """How many ids tokenizer.json knows, and the id of tokenizer_config.json's eos_token."""
    tokenizer = _read_optional(path / "tokenizer.json")
    if not tokenizer:
        return None, []
    added = {
        entry["content"]: entry["id"]
        for entry in tokenizer.get("added_tokens") or []
        if isinstance(entry, dict) and {"content", "id"} <= entry.keys()
    }
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, dict):
        ids = [*vocabulary.values(), *added.values()]
    else:
        ids = [len(vocabulary) - 1, *added.values()]
    size = max(ids, default=-1) + 1
    eos = _read_optional(path / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text in added:
        return size or None, [added[text]]
    if isinstance(vocabulary, dict) and text in vocabulary:
        return size or None, [vocabulary[text]]
    return size or None, []


def _default_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Recommended settings; none when the file says that sampling is off."""
    if generation.get("do_sample") is False:
        return {}
    return {key: generation[key] for key in _SAMPLING_KEYS if generation.get(key) is not None}


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: an object is needed")
    return values
