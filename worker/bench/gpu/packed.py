"""Linear layers with packed weights beside a 16-bit one through cuBLAS, at few and many rows."""

from functools import partial

import torch
from torch.nn import functional

from headrace.kernels.dequantizing_matmul import dequantizing_matmul
from headrace.kernels.int8_dynamic_matmul import int8_dynamic_matmul
from headrace.kernels.packed_weights import BITS, PackedWeights, pack_tiles
from headrace.worker.bench.gpu.device import Device
from headrace.worker.bench.gpu.kernels import Bench
from headrace.worker.bench.gpu.record import Record

_TARGETS = {1: 2.5, 16: 2.0}
"""How many times faster than 16 bits INT4 is to be, by rows."""


def run(where: Device, record: Record) -> None:
    bench = Bench(where, record)
    shapes = ((64, 128),) if where.tiny else ((24576, 4096), (4096, 12288), (6144, 4096))
    for n, k in shapes:
        floats = bench.normal(n, k)
        for kind, group in (("int4", 128), ("int3", 128), ("code4", 64), ("int8", k)):
            weights = _random(where, kind, n, k, group)
            size = sum(
                part.numel() * part.element_size() for part in weights[:3] if part is not None
            )
            for rows in (1, 16, 256):
                if rows == 256 and (kind in ("int3", "code4") or where.tiny):
                    continue
                x = bench.normal(rows, k)
                bench.compare(
                    f"{kind} {n}x{k}, {rows} rows",
                    partial(dequantizing_matmul, x, weights),
                    partial(functional.linear, x, floats),
                    f"torch linear, {where.dtype_name}",
                    moved=size,
                    operations=2.0 * rows * n * k,
                    at_least=_TARGETS.get(rows) if kind == "int4" else None,
                )
            del weights
        scale = torch.rand(n, device=where.device)
        integers = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=where.device)
        for rows in (16,) if where.tiny else (16, 256):
            x = bench.normal(rows, k)
            bench.compare(
                f"int8 x int8 {n}x{k}, {rows} rows",
                partial(int8_dynamic_matmul, x, integers, scale),
                partial(functional.linear, x, floats),
                f"torch linear, {where.dtype_name}",
                moved=n * k,
                operations=2.0 * rows * n * k,
            )
        where.released()


def _random(where: Device, kind: str, n: int, k: int, group: int) -> PackedWeights:
    bits = BITS[kind]
    values = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, device=where.device)
    groups = -(-k // group)
    scales = torch.rand(groups, n, device=where.device).half() / k**0.5
    zeros = None
    if kind in ("int3", "int4"):
        zeros = torch.randint(0, 2**bits, (groups, n), dtype=torch.uint8, device=where.device)
    table = torch.randn(16, device=where.device) if kind == "code4" else None
    middle = 2 ** (bits - 1) if kind.startswith("int") else 0
    tiles = pack_tiles(values, bits)
    return PackedWeights(tiles, scales, zeros, kind, min(group, k), k, middle, table)
