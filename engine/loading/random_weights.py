"""A checkpoint in memory, random weights in a real model's shapes: for measuring, without files.

Tensors are made where they are used and only when they are loaded; the same seed gives the same
values on the same kind of device. Knows no tokenizer: every id may be sampled, none ends a text.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.engine.loading.checkpoint import Checkpoint
from headrace.engine.models.decoder import tensor_shapes
from headrace.engine.models.registry import read_config


class RandomTensors:
    """Normal values scaled by the inputs of a layer, so that activations keep their size."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._seed = seed

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str) -> Tensor:
        shape = self._shapes[name]
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little"))
        values = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
        if len(shape) > 1:
            return values.mul_(1 / math.sqrt(shape[-1]) if "embed" not in name else 1.0)
        values.mul_(0.1)
        return values.add_(1.0) if name.endswith("norm.weight") else values


def random_checkpoint(
    values: Mapping[str, Any], device: torch.device | str = "cpu", seed: int = 0
) -> Checkpoint:
    """A checkpoint of config.json's `values`, its weights made on `device` in the type that they
    name. CheckpointError: an architecture or a setting that is not supported."""
    config = read_config(values)
    described = json.dumps(values, sort_keys=True, default=str) + f" {seed}"
    return Checkpoint(
        name=f"random-{config.model_type}",
        config=config,
        tensors=RandomTensors(
            tensor_shapes(config), getattr(torch, config.dtype), torch.device(device), seed
        ),
        fingerprint=hashlib.blake2b(described.encode(), digest_size=16).hexdigest(),
    )
