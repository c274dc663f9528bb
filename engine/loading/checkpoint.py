"""A checkpoint on disk, whatever its format: configuration, named tensors, token ids that end a
text, and the sampling defaults it recommends. Tensors carry Transformers' names in every format.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from headrace.engine.errors import CheckpointError
from headrace.engine.models.config import ModelConfig

_SAMPLE_BYTES = 1 << 16
_SAMPLES_PER_FILE = 64
_MAX_NAMED = 5


class TensorSource(Protocol):
    """Named tensors of a checkpoint; nothing is read before `load`."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def load(self, name: str) -> Tensor:
        """The tensor as stored; quantized GGUF types come dequantized, float32."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`num_token_ids`: how many ids the tokenizer knows (embeddings may have padding rows beyond),
    None without a tokenizer. `default_sampling`: generation_config's values under the names of
    SamplingParams. `fingerprint`: 32 hexadecimal digits of the files' sizes and sampled content.
    `quantization`: config.json's quantization_config; `types`: each tensor's, as the file calls it.
    """

    name: str
    config: ModelConfig
    tensors: TensorSource
    num_token_ids: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    quantization: Mapping[str, Any] | None = None
    types: Mapping[str, str] = field(default_factory=dict)


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str] = (),
) -> None:
    """Raise CheckpointError unless `found` holds exactly the `expected` names and shapes; names in
    `ignored` may be there or not."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"checkpoint: {_listed(missing)} missing")
    unexpected = sorted(set(found) - set(expected) - set(ignored))
    if unexpected:
        raise CheckpointError(f"checkpoint: {_listed(unexpected)} unexpected; no layer takes it")
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise CheckpointError(
                f"checkpoint: {name} has shape {list(found[name])}; the config needs {list(shape)}"
            )


def fingerprint_files(paths: Iterable[Path], *parts: str) -> str:
    """Digest of `parts`, the files' names and sizes, and evenly spaced samples of their bytes: the
    same files give the same digest in milliseconds, however large they are."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\0")
    for path in sorted(paths):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            stride = max(size // _SAMPLES_PER_FILE, _SAMPLE_BYTES)
            for start in range(0, size, stride):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def token_ids(value: object, key: str) -> list[int]:
    """An id or a list of ids, as config files give `eos_token_id`."""
    if value is None:
        return []
    ids: list[int] = []
    for token in value if isinstance(value, list) else [value]:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise CheckpointError(f"{key} is {value!r}; a token id or a list of them is needed")
        ids.append(token)
    return ids


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    more = len(names) - _MAX_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{rest}"
