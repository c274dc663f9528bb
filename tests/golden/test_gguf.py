"""GGUF: every type's values against the gguf package, the permutation of q and k, Llama 3's rope
factors, and what is refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from tiny_gguf import permuted, write_gguf, write_random_blocks

from headrace.engine.config import EngineConfig
from headrace.engine.errors import CheckpointError
from headrace.engine.loading.gguf import SUPPORTED_TYPES, dequantized, open_gguf, unpermute
from headrace.engine.loading.gguf_file import read_gguf
from headrace.engine.loading.source import open_checkpoint
from headrace.engine.runner import load_runner
from headrace.engine.tokenizer import load_tokenizer

POOL = 1 << 22


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_dequantized_values_equal_the_gguf_package(kind: str, tmp_path: Path) -> None:
    """All bits random, so that scales and minimums take every value (NaN among them)."""
    path = write_random_blocks(tmp_path / "random.gguf", kind, rows=6, columns=512)
    file = read_gguf(path)
    with np.errstate(invalid="ignore"):
        ours = dequantized(file, file.tensors["blk.0.ffn_up.weight"])
        tensor = gguf.GGUFReader(path).tensors[0]
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert ours.shape == (6, 512)
    np.testing.assert_array_equal(ours.float().numpy(), theirs.astype(np.float32))


def test_unpermute_undoes_the_converter() -> None:
    weight = torch.randn(6 * 16, 8)
    assert torch.equal(unpermute(permuted(weight, 6), 6), weight)
    assert not torch.equal(permuted(weight, 6), weight)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_computes_what_the_folder_computes(family: str, tmp_path: Path) -> None:
    """The same weights by both roads: float32 files give the same logits to the last bit."""
    path = write_gguf(tmp_path / "model.gguf", family, seed=3)
    folder = tiny.write_checkpoint(tmp_path / "folder", family, seed=3)
    tokens = [(7 * index) % 256 for index in range(40)]
    ours, theirs = (
        load_runner(EngineConfig(str(model), kv_cache_memory_bytes=POOL, num_threads=1))
        for model in (path, folder)
    )
    assert ours.dtype == theirs.dtype == "float32"
    assert torch.equal(ours.logits(tokens), theirs.logits(tokens))
    assert ours.eos_token_ids == (tiny.EOS,)
    assert ours.vocab_size == tiny.VOCAB_SIZE


def test_rope_factors_stored_as_a_tensor_are_llama3_scaling(tmp_path: Path) -> None:
    """GGUF files of Llama 3.x carry no rope type but a tensor that divides the frequencies."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = tiny.write_checkpoint(tmp_path / "folder", seed=4, rope_parameters=scaling)
    from headrace.engine.layers.rope import inverse_frequencies
    from headrace.engine.loading.huggingface import open_folder
    from headrace.engine.models.config import RopeConfig

    scaled, _ = inverse_frequencies(open_folder(folder).config.rope, 16)
    plain, _ = inverse_frequencies(RopeConfig("default", 10000.0), 16)
    factors = (plain / scaled).numpy()
    assert factors.max() > 7.9 and factors.min() == 1.0
    path = write_gguf(tmp_path / "model.gguf", seed=4, extra={"rope_freqs.weight": factors})
    tokens = list(range(50))
    ours, theirs = (
        load_runner(EngineConfig(str(model), kv_cache_memory_bytes=POOL, num_threads=1))
        for model in (path, folder)
    )
    torch.testing.assert_close(ours.logits(tokens), theirs.logits(tokens), atol=1e-4, rtol=0)


def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", quantization="Q8_0").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 11, 23, 200, 5000, len(whole) // 2, len(whole) - 40):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"truncated|not a GGUF file"):
            open_gguf(cut)


def test_any_one_byte_of_the_header_that_is_damaged_is_refused_or_harmless(tmp_path: Path) -> None:
    """Counts, lengths, types, dimensions: 255 in each byte of the first two kilobytes."""
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"
    refused = 0
    for position in range(0, 2000, 5):
        path.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        try:
            open_gguf_checked(path)
        except CheckpointError as error:
            assert str(error)
            refused += 1
    assert refused > 50


def open_gguf_checked(path: Path) -> None:
    open_checkpoint(path)
    load_tokenizer(path)


INTEGER, FLOAT = 4, 6


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("llama.attention.head_count", INTEGER, "num_attention_heads is 0"),
        ("llama.attention.head_count_kv", FLOAT, "num_key_value_heads is 0.0"),
        ("llama.embedding_length", FLOAT, "hidden_size is 0.0"),
        ("llama.block_count", INTEGER, "num_hidden_layers is 0"),
        ("general.alignment", INTEGER, r"general\.alignment is 0"),
        ("general.alignment", FLOAT, r"general\.alignment is 0\.0"),
    ],
)
def test_a_number_that_cannot_be_one_is_refused_by_its_key(
    key: str, kind: int, message: str, tmp_path: Path
) -> None:
    """The value of `key` is written over with a zero of that type."""
    path = write_gguf(tmp_path / "model.gguf", metadata={"general.alignment": 32})
    content = path.read_bytes()
    place = key.encode() + struct.pack("<I", INTEGER)
    at = content.index(place) + len(key)
    path.write_bytes(content[:at] + struct.pack("<II", kind, 0) + content[at + 8 :])
    with pytest.raises(CheckpointError, match=message):
        open_gguf_checked(path)


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    key = struct.pack("<Q", 1) + b"a"
    nested = struct.pack("<IQ", 9, 1) * 50_000
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 9) + nested)
    with pytest.raises(CheckpointError, match=r"deep\.gguf"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope type 'longrope' is not supported"),
        ({"llama.expert_count": 8}, "mixture of experts is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8 differs from head_dim 16"),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(
    metadata: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


def test_an_unsupported_type_is_refused_with_the_tensor_s_name(tmp_path: Path) -> None:
    path = write_random_blocks(tmp_path / "model.gguf", "IQ4_XS", rows=4, columns=256)
    file = read_gguf(path)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has type IQ4_XS"):
        dequantized(file, file.tensors["blk.0.ffn_up.weight"])


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'mamba' is not supported"):
        open_gguf(tmp_path / "model.gguf")
