"""Which file reads which `model_type`."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.engine.errors import CheckpointError
from headrace.engine.models import llama, mistral, qwen2, qwen3
from headrace.engine.models.config import ConfigReader, ModelConfig

_READERS: dict[str, Callable[[ConfigReader], ModelConfig]] = {
    "llama": llama.read,
    "mistral": mistral.read,
    "qwen2": qwen2.read,
    "qwen3": qwen3.read,
}


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a parsed config.json; CheckpointError names what is not supported."""
    reader = ConfigReader(values)
    model_type = reader.text("model_type")
    read = _READERS.get(model_type)
    if read is None:
        architecture = ", ".join(values.get("architectures") or []) or model_type
        raise CheckpointError(
            f"architecture {architecture!r} (model_type {model_type!r}) is not supported;"
            f" supported: {', '.join(sorted(_READERS))}"
        )
    config = read(reader)
    reader.finish()
    return config
