"""What the launchers ask of the device before they choose a tile. No tensor is touched here."""

from functools import lru_cache

import torch

INTERPRETED = (9, 0)
"""Capability that tiles are chosen for when no GPU is there (Triton's interpreter)."""


@lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability (major, minor) of `device`."""
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors of `device`; 1 under the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
