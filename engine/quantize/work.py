"""The work folder beside the output: one file a layer, so that a killed run goes on where it was.

Each file is there whole or not at all. The folder remembers what it belongs to; another model,
recipe or text is refused. The finished model is put together in it and renamed to its place.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.engine.errors import EngineError
from headrace.engine.loading.huggingface import SafetensorsSource
from headrace.engine.quantize.layerwise import PartReport
from headrace.engine.quantize.tensor_file import Header, data_bytes, header_of, write_tensors

SHARD_BYTES = 5 * 10**9
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer's tensors as the checkpoint will hold them, and what was found in making them."""

    source: SafetensorsSource
    header: Header
    reports: list[PartReport]
    seconds: float


class WorkFolder:
    def __init__(self, output: Path) -> None:
        if output.name in ("", ".."):
            raise EngineError(f"-o {output} is no name for a new folder; give one")
        self.output = output
        self.path = output.with_name(output.name + ".work")

    @contextmanager
    def opened(self, identity: Mapping[str, Any], restart: bool) -> Iterator[None]:
        """Make or take up the folder and hold its lock. Raises EngineError when the output exists,
        another run holds the lock, or the folder belongs to something else."""
        if self.output.exists():
            raise EngineError(
                f"{self.output} exists already; name another output with -o, or remove it"
            )
        if not self.output.parent.is_dir():
            raise EngineError(f"{self.output.parent} is no folder; make it, or choose another -o")
        self.path.mkdir(exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise EngineError(f"another run is writing {self.output}") from error
            try:
                if restart:
                    self._clear()
                self._check(identity)
                yield
            finally:
                self._drop_if_empty()

    def layer(self, index: int) -> StoredLayer | None:
        """What an earlier run, or this one, has finished."""
        path = self._layer_path(index)
        return _stored(path) if path.is_file() else None

    def save_layer(
        self, index: int, tensors: Mapping[str, Tensor], reports: list[PartReport], seconds: float
    ) -> StoredLayer:
        """Write the layer; returns what was written, as a later run finds it."""
        values = {"reports": [asdict(report) for report in reports], "seconds": seconds}
        ordered = dict(sorted(tensors.items()))
        metadata = {"headrace": json.dumps(values)}
        path = self._layer_path(index)
        write_tensors(path, header_of(ordered), ordered.values(), metadata)
        return _stored(path)

    @contextmanager
    def finished(self) -> Iterator[Path]:
        """An empty folder to put the model into; it becomes the output when the block ends, and the
        work folder goes."""
        part = self.path / "output"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        yield part
        for file in part.iterdir():
            _sync(file)
        _sync(part)
        if self.output.exists():
            raise EngineError(f"{self.output} has come to exist meanwhile; remove it and run again")
        part.rename(self.output)
        _sync(self.output.parent)
        shutil.rmtree(self.path)

    def _layer_path(self, index: int) -> Path:
        return self.path / f"layer-{index:05d}.safetensors"

    def _drop_if_empty(self) -> None:
        """A run that ended before its first layer leaves nothing behind."""
        if self.path.is_dir() and not any(self.path.glob("layer-*.safetensors")):
            shutil.rmtree(self.path)

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _check(self, identity: Mapping[str, Any]) -> None:
        path = self.path / "identity.json"
        if not path.is_file():
            part = path.with_name(path.name + ".part")
            part.write_text(json.dumps(identity, indent=1))
            _sync(part)
            part.replace(path)
            return
        known = json.loads(path.read_text())
        wanted = json.loads(json.dumps(identity))
        differing = [key for key in {**known, **wanted} if known.get(key) != wanted.get(key)]
        if differing:
            raise EngineError(
                f"{self.path} holds the beginning of another run (other {', '.join(differing)});"
                " --restart begins anew, or choose another -o"
            )


def write_model(folder: Path, header: Header, tensors: Iterable[Tensor]) -> int:
    """model.safetensors, or shards with their index; returns the bytes of the tensors."""
    shards: list[dict[str, Any]] = [{}]
    for name, entry in header.items():
        if shards[-1] and data_bytes({**shards[-1], name: entry}) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = entry
    remaining = iter(tensors)
    total = data_bytes(header)
    if len(shards) == 1:
        write_tensors(folder / "model.safetensors", header, remaining, {})
        return total
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        own = (next(remaining) for _ in range(len(shard)))
        write_tensors(folder / file, shard, own, {})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def check_space(folder: Path, needed: int) -> None:
    """Raises EngineError unless the disk has room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EngineError(
            f"{folder} has {free / 1e9:.2f} GB free; the finished layers and the model take"
            f" {needed / 1e9:.2f} GB: make room, or choose another -o"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stored(path: Path) -> StoredLayer:
    with safe_open(path, framework="pt") as file:
        found = json.loads(file.metadata()["headrace"])
        names = list(file.keys())
    source = SafetensorsSource(dict.fromkeys(names, path))
    shapes = source.shapes()
    header = {name: (_DTYPES[source.types[name]], shapes[name]) for name in sorted(names)}
    reports = [PartReport(**values) for values in found["reports"]]
    return StoredLayer(source, header, reports, found["seconds"])
