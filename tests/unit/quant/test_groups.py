"""Integers in groups: our packing, rounding at load, and GPTQ and AWQ files packed here by another
road (bit by bit in numpy), with odd sizes and every order of columns."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights import Given

from headrace.engine.config import EngineConfig
from headrace.engine.quant.awq import AWQ, AWQConfig
from headrace.engine.quant.bitsandbytes import LoadedCodes
from headrace.engine.quant.gptq import GPTQ, GPTQConfig
from headrace.engine.quant.grouped import apply_grouped
from headrace.engine.quant.integer import Integer, round_to_nearest
from headrace.engine.quant.method import LinearSpec, weight_bytes
from headrace.engine.quant.packed import multiply, unpacked, whole
from headrace.engine.quant.packing import BITS, pack_rows, unpack_rows
from headrace.engine.runner import load_runner

CPU = torch.device("cpu")
ODD_SIZES = [(64, 96, 32), (96, 160, 64), (192, 64, 64)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [1, 31, 32, 100, 576])
def test_packed_rows_come_back(bits: int, columns: int) -> None:
    values = torch.randint(0, 2**bits, (7, columns), dtype=torch.uint8)
    packed = pack_rows(values, bits)
    assert packed.shape == (7, -(-columns // 32) * 4 * bits)
    assert torch.equal(unpack_rows(packed, columns, bits), values)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(64, 576, 128), (96, 100, 32), (192, 64, 64)]
)
def test_rounding_is_to_the_nearest_step(
    bits: int, symmetric: bool, rows: int, columns: int, group: int
) -> None:
    """Half a step at most, half a step more at the ends (scales are float16); 576 and 100 columns
    end in a short group."""
    weight = torch.randn(rows, columns)
    matrix = round_to_nearest(weight, bits, group, symmetric)
    values = whole(matrix)
    scales = matrix.scales.float()[:, torch.arange(columns) // group]
    assert ((values - weight).abs() <= 1.01 * scales).all()
    assert ((values - weight).abs() <= 0.501 * scales).float().mean() > 0.9
    torch.testing.assert_close(unpacked(matrix, 0, rows), values, rtol=1e-6, atol=1e-6)
    x = torch.randn(20, columns)
    for batch in (1, 20):
        y = multiply(matrix, None, x[:batch])
        torch.testing.assert_close(y, x[:batch] @ values.T, rtol=1e-4, atol=1e-4)


def test_zero_points_help_lopsided_groups() -> None:
    weight = torch.rand(64, 128) + 1
    errors = [
        (whole(round_to_nearest(weight, 4, 32, symmetric)) - weight).abs().mean()
        for symmetric in (True, False)
    ]
    assert errors[1] < errors[0]


def test_a_group_of_zeros_stays_zeros() -> None:
    weight = torch.randn(4, 96)
    weight[:, 32:64] = 0
    for symmetric in (True, False):
        values = whole(round_to_nearest(weight, 4, 32, symmetric))
        assert values[:, 32:64].abs().max() == 0


def test_int4_takes_at_most_35_percent_of_bfloat16() -> None:
    spec = LinearSpec(("a",), 576, (1536,))
    source = Given({"a.weight": torch.randn(1536, 576)})
    for group in (32, 64, 128):
        for symmetric in (True, False):
            weights = Integer(4, group, symmetric).create_weights(spec, source, torch.float32, CPU)
            assert weight_bytes(weights) <= 0.35 * 2 * 1536 * 576


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("columns", [64, 96, 320])
def test_codes_are_the_nearest_ones(kind: str, double: bool, columns: int) -> None:
    if double and columns % 64:
        pytest.skip("scales in bytes need whole blocks")
    weight = torch.randn(30, columns)
    spec = LinearSpec(("a", "b"), columns, (10, 20))
    method = LoadedCodes(kind, double)
    source = Given({"a.weight": weight[:10], "b.weight": weight[10:]})
    weights = method.create_weights(spec, source, torch.float32, CPU)
    values = method.dequantize(weights)
    group = 64 if columns % 64 == 0 else 32
    peak = weight.view(30, -1, group).abs().amax(2).repeat_interleave(group, 1)
    gaps = 0.35 if kind == "fp4" else 0.31  # the widest gap between two codes, and some for scales
    assert ((values - weight).abs() <= gaps / 2 * peak + 0.02).all()
    torch.testing.assert_close(unpacked(weights.matrix, 0, 30), values, rtol=1e-6, atol=1e-6)


def words_of(values: Tensor, bits: int) -> Tensor:
    """uint8 [values, columns] as a stream of bits along the first dimension, lowest first."""
    array: NDArray[np.uint8] = values.numpy()
    stream = np.unpackbits(array[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    stream = np.ascontiguousarray(stream.transpose(1, 0, 2)).reshape(array.shape[1], -1)
    packed = np.packbits(stream, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(packed.T))


def gptq_tensors(
    part: str, rows: int, columns: int, bits: int, group: int, order: Tensor, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """A layer in GPTQ's second version, and its float weight [rows, columns]; `order`: which group
    place each column takes."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    values = torch.randint(0, 2**bits, (columns, rows), generator=generator, dtype=torch.uint8)
    middle = 2 ** (bits - 1)  # zero points lie near it, or no one could tell the versions apart
    near = (max(middle - 2, 0), min(middle + 2, 2**bits))
    zeros = torch.randint(*near, (groups, rows), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(groups, rows, generator=generator) + 0.5).half() / 2**bits
    group_of = (order // group).int()
    weight = (values.float() - zeros[group_of.long()].float()) * scales[group_of.long()].float()
    tensors = {
        f"{part}.qweight": words_of(values, bits),
        f"{part}.qzeros": words_of(zeros.T.contiguous(), bits).T.contiguous(),
        f"{part}.scales": scales,
        f"{part}.g_idx": group_of,
    }
    return tensors, weight.T


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns", "group"), ODD_SIZES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_with_any_order_of_columns(
    bits: int, rows: int, columns: int, group: int, shuffled: bool
) -> None:
    """Three parts in one layer, two with the same order and one with its own: those with differing
    orders are not fused. 160 columns are no multiple of 64."""
    orders = [torch.arange(columns)] * 3
    if shuffled:
        first, last = torch.randperm(columns), torch.randperm(columns)
        orders = [first, first, last]
    tensors: dict[str, Tensor] = {}
    weights = []
    for index, order in enumerate(orders):
        found, weight = gptq_tensors(f"p{index}", rows, columns, bits, group, order, index)
        tensors.update(found)
        weights.append(weight)
    spec = LinearSpec(("p0", "p1", "p2"), columns, (rows, rows, rows))
    method = GPTQ(GPTQConfig(bits, group, False, 2, {}), 2)
    shapes = method.tensor_shapes(spec)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    loaded = method.create_weights(spec, Given(tensors), torch.float32, CPU)
    assert len(loaded.pieces) == (2 if shuffled and columns > group else 1)
    expected = torch.cat(weights)
    assert torch.equal(method.dequantize(loaded), expected)
    x = torch.randn(20, columns)
    for batch in (1, 20):
        torch.testing.assert_close(
            apply_grouped(loaded, x[:batch]), x[:batch] @ expected.T, rtol=1e-4, atol=1e-3
        )


@pytest.mark.parametrize(("rows", "columns", "group"), ODD_SIZES)
def test_awq_of_odd_sizes(rows: int, columns: int, group: int) -> None:
    groups = -(-columns // group)
    values = torch.randint(0, 16, (columns, rows), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (groups, rows), dtype=torch.uint8)
    scales = torch.rand(groups, rows).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(matrix: Tensor) -> Tensor:
        shuffled = matrix.view(len(matrix), -1, 8)[:, :, order].flatten(1)
        return words_of(shuffled.T.contiguous(), 4).T.contiguous()

    tensors = {"a.qweight": packed(values), "a.qzeros": packed(zeros), "a.scales": scales}
    spec = LinearSpec(("a",), columns, (rows,))
    method = AWQ(AWQConfig(group))
    assert method.tensor_shapes(spec) == {k: tuple(v.shape) for k, v in tensors.items()}
    loaded = method.create_weights(spec, Given(tensors), torch.float32, CPU)
    group_of = torch.arange(columns) // group
    expected = (values.float() - zeros[group_of].float()) * scales[group_of].float()
    assert torch.equal(method.dequantize(loaded), expected.T)
    x = torch.randn(3, columns)
    torch.testing.assert_close(apply_grouped(loaded, x), x @ expected, rtol=1e-4, atol=1e-3)


def test_a_quantized_head_is_run_quantized(tmp_path: Path) -> None:
    """`lm_head: true`: the head's tensors are a layer's, and logits stop at the vocabulary."""
    folder = tiny.write_checkpoint(tmp_path / "model", vocab_size=288)
    weights = load_file(folder / "model.safetensors")
    columns = weights["lm_head.weight"].shape[1]
    tensors, weight = gptq_tensors("lm_head", 288, columns, 4, 32, torch.randperm(columns), 1)
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in folder.iterdir():
        (plain / path.name).write_bytes(path.read_bytes())
    save_file({**weights, "lm_head.weight": weight.contiguous()}, plain / "model.safetensors")
    del weights["lm_head.weight"]
    save_file({**weights, **tensors}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "checkpoint_format": "gptq_v2",
        "lm_head": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = list(range(40))
    ours, theirs = (
        load_runner(EngineConfig(str(model), kv_cache_memory_bytes=1 << 22, num_threads=1))
        for model in (folder, plain)
    )
    assert ours.quantization == "gptq"
    assert ours.logits(tokens).shape == (40, tiny.VOCAB_SIZE)
    torch.testing.assert_close(ours.logits(tokens), theirs.logits(tokens), rtol=0, atol=1e-3)
