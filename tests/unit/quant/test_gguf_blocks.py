"""GGUF's block types kept packed: compiled rows against the gguf package, and what they take."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.loading.source import open_checkpoint
from headrace.engine.models.decoder import head_spec, layer_specs
from headrace.engine.quant import packed
from headrace.engine.quant.choose import choose_scheme
from headrace.engine.quant.gguf_blocks import BLOCK_TYPES, BlockMatrix, BlockTable
from headrace.engine.runner import load_runner

DATA = Path(__file__).parents[2] / "data" / "gguf"


def random_blocks(kind: str, rows: int, columns: int) -> BlockMatrix:
    """All bits random but for the float16 scales, which are made finite and small."""
    rng = np.random.default_rng(7)
    quantization = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[quantization]
    blocks = rng.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    short = (0, 2) if kind in ("Q4_1", "Q5_1") else (0,)
    for place in places.get(kind, short):
        scales = rng.normal(size=len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return BlockMatrix(torch.from_numpy(blocks.reshape(rows, -1)), kind, columns)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize(("rows", "columns"), [(5, 256), (70, 768)])
def test_compiled_rows_equal_the_gguf_package(kind: str, rows: int, columns: int) -> None:
    matrix = random_blocks(kind, rows, columns)
    expected = matrix.unpack(0, rows)
    torch.testing.assert_close(packed.unpacked(matrix, 0, rows), expected, rtol=1e-6, atol=1e-6)
    assert packed._TRUSTED[matrix.kernel], "the compiled kernel was given up"
    x = torch.randn(9, columns)
    for batch in (1, 3, 9):
        y = packed.multiply(matrix, None, x[:batch])
        torch.testing.assert_close(y, x[:batch] @ expected.T, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
@torch.inference_mode()
def test_an_embedding_in_blocks_looks_up_its_rows(kind: str) -> None:
    matrix = random_blocks(kind, 40, 256)
    ids = torch.tensor([3, 39, 3, 0])
    rows = BlockTable(matrix, torch.float32)(ids)
    torch.testing.assert_close(rows, matrix.unpack(0, 40)[ids], rtol=1e-6, atol=1e-6)
    packed.unpacked(matrix, 0, 40).fill_(torch.nan)  # the scratch buffer is not the answer
    assert rows.isfinite().all()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K_M-mixed", "Q2_K", "Q5_0", "qwen2-Q8_0"])
def test_packed_files_compute_what_their_floats_compute(name: str) -> None:
    path = DATA / name / "model.gguf"
    tokens = [(7 * index) % 500 for index in range(40)]
    blocks, floats = (
        load_runner(
            EngineConfig(
                str(path),
                dtype="float32",
                quantization=quantization,
                kv_cache_memory_bytes=1 << 22,
                num_threads=1,
            )
        )
        for quantization in ("gguf", "float")
    )
    assert (blocks.quantization, floats.quantization) == ("gguf", "none")
    for chunk in (512, 3):
        torch.testing.assert_close(
            blocks.logits(tokens, chunk), floats.logits(tokens), atol=2e-4, rtol=0
        )


def test_a_tied_head_shares_the_embedding_s_blocks() -> None:
    checkpoint = open_checkpoint(DATA / "Q2_K" / "model.gguf")
    config = checkpoint.config
    assert config.tie_word_embeddings
    layers = [spec for layer in layer_specs(config) for spec in layer]
    head = head_spec(config)
    scheme = choose_scheme(checkpoint, "gguf", layers, head)
    cpu = torch.device("cpu")
    table = scheme.embed("model.embed_tokens.weight", torch.float32, cpu)
    weights = scheme.method_for(head).create_weights(head, scheme.source, torch.float32, cpu)
    assert isinstance(table, BlockTable)
    assert table.matrix.data.data_ptr() == weights.matrix.data.data_ptr()


def test_a_small_file_runs_as_floats_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engine.quant import choose

    checkpoint = open_checkpoint(DATA / "Q4_0" / "model.gguf")
    layers = [spec for layer in layer_specs(checkpoint.config) for spec in layer]
    head = head_spec(checkpoint.config)
    assert choose_scheme(checkpoint, None, layers, head).name == "none"
    monkeypatch.setattr(choose, "PACKED_ABOVE", choose.float_bytes(checkpoint) - 1)
    assert choose_scheme(checkpoint, None, layers, head).name == "gguf"


def test_a_file_of_floats_is_not_blocks() -> None:
    with pytest.raises(EngineError, match=r"'gguf' is not what model holds \(plain floats\)"):
        load_runner(EngineConfig(str(DATA / "F16" / "model.gguf"), quantization="gguf"))
