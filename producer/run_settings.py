"""What decides a run's lines beside its input, the model's name and the sampling parameters: how
the local worker holds the model, the model's files, and where failed lines go.

A resume with others is refused (`bulk.sidecar`). Starts nothing; knows no Redis.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_DECIDES_ANSWERS = (
    "--dtype",
    "--device",
    "--quantization",
    "--kv-cache-dtype",
    "--max-model-len",
    "--deterministic",
)
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def run_settings(
    output: Path,
    errors: Path,
    local_model: str | None,
    worker_arguments: Sequence[str],
    environment: Mapping[str, str],
) -> dict[str, str]:
    """By what they are called in messages. `local_model` None: others serve it, as they like."""
    folder = output.resolve().parent
    settings = {"error file": os.path.relpath(errors.resolve(), folder)}
    if local_model is None:
        return settings
    for name in _DECIDES_ANSWERS:
        value = _given(name, worker_arguments)
        if value is None:
            variable = "HEADRACE_" + name.removeprefix("--").replace("-", "_").upper()
            value = environment.get(variable)
        if value is not None:
            settings[f"worker's {name}"] = value
    path = Path(local_model).expanduser()
    if path.exists():
        settings["content of the model's files"] = _digest(path)
    return settings


def _given(name: str, arguments: Sequence[str]) -> str | None:
    """The last value of an option; "on" for a flag."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == name:
            following = arguments[index + 1 : index + 2]
            value = following[0] if following and not following[0].startswith("--") else "on"
        elif argument.startswith(f"{name}="):
            value = argument.removeprefix(f"{name}=")
    return value


def _digest(model: Path) -> str:
    """Of a file, or of a folder's files: their names, sizes, and 64 samples of each, which tells
    other weights of the same shape apart without reading gigabytes."""
    files = [model] if model.is_file() else sorted(f for f in model.iterdir() if f.is_file())
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode(errors="surrogateescape"))
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
