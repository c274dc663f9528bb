"""Folders, GGUF files, sizes and names; damaged ones are named."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.engine.planner import catalog
from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.gguf_header import read_gguf
from headrace.engine.planner.kv import kv_bytes_per_token
from headrace.engine.planner.resolve import resolve
from headrace.engine.planner.weights import weight_bytes

DATA = Path(__file__).parents[2] / "data" / "planner"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def write_safetensors(path: Path, header: dict[str, Any], missing: int = 0) -> None:
    """A file with that header and a hole where its data would be, `missing` bytes too short."""
    text = json.dumps(header).encode()
    end = max(info["data_offsets"][1] for info in header.values())
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end - missing)


def float_header(dtype: str, size: int) -> dict[str, Any]:
    """The tensors of CONFIG, one after the other."""
    shapes = {"model.embed_tokens.weight": (128, 64), "model.norm.weight": (64,)}
    for i in range(2):
        prefix = f"model.layers.{i}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (64, 64),
            prefix + "self_attn.k_proj.weight": (32, 64),
            prefix + "self_attn.v_proj.weight": (32, 64),
            prefix + "self_attn.o_proj.weight": (64, 64),
            prefix + "mlp.gate_proj.weight": (96, 64),
            prefix + "mlp.up_proj.weight": (96, 64),
            prefix + "mlp.down_proj.weight": (64, 96),
            prefix + "input_layernorm.weight": (64,),
            prefix + "post_attention_layernorm.weight": (64,),
        }
    header, at = {}, 0
    for name, dims in shapes.items():
        length = int(np.prod(dims)) * size
        header[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [at, at + length]}
        at += length
    return header


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors", float_header("BF16", 2))
    return tmp_path


def test_a_folder_gives_the_bytes_of_its_files(folder: Path) -> None:
    model = resolve(str(folder))
    assert model.stored is not None
    assert model.stored.scheme.name == "bf16"
    assert model.quantized is None
    assert model.stored.num_params == model.shape.num_params
    assert model.stored.weights.total == 2 * model.shape.num_params
    assert model.stored.weights == weight_bytes(model.shape, model.stored.scheme)


def test_a_tied_head_in_the_file_is_not_counted(folder: Path) -> None:
    header = float_header("BF16", 2)
    end = max(info["data_offsets"][1] for info in header.values())
    size = 128 * 64 * 2
    header["lm_head.weight"] = {
        "dtype": "BF16",
        "shape": [128, 64],
        "data_offsets": [end, end + size],
    }
    write_safetensors(folder / "model.safetensors", header)
    model = resolve(str(folder))
    assert model.stored is not None
    assert model.stored.weights.total == 2 * model.shape.num_params


def test_files_that_disagree_with_the_config_are_noted(folder: Path) -> None:
    config = {**CONFIG, "intermediate_size": 192}
    (folder / "config.json").write_text(json.dumps(config))
    assert "the files hold" in resolve(str(folder)).shape.notes[0]


@pytest.mark.parametrize("name", sorted(p.stem for p in DATA.glob("*.json")))
def test_bytes_of_gptq_and_awq_are_exact(name: str, tmp_path: Path) -> None:
    """What GPTQModel wrote, to the byte: from the formula, and read off the header."""
    fixture = json.loads((DATA / f"{name}.json").read_text())
    written = sum(
        info["data_offsets"][1] - info["data_offsets"][0] for info in fixture["header"].values()
    )
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fixture["config"]))
    model = resolve(str(config))
    assert model.quantized is not None
    assert weight_bytes(model.shape, model.quantized).total == written
    write_safetensors(tmp_path / "model.safetensors", fixture["header"])
    model = resolve(str(tmp_path))
    assert model.stored is not None
    assert model.stored.weights.total == written


def gguf_fixture(path: Path, missing: int = 0) -> Path:
    """The Q4_K_M file of llama-quantize: its header, and a hole for 334,464 bytes of data."""
    header = (DATA / "gguf-Q4_K_M-mixed.header").read_bytes()
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(-(-len(header) // 32) * 32 + 334_464 - missing)
    return path


def test_bytes_of_a_gguf_mixture_are_exact(tmp_path: Path) -> None:
    """q, k, o, gate and up in Q4_K, v, down and the tied embedding in Q6_K, norms in F32."""
    model = resolve(str(gguf_fixture(tmp_path / "m.gguf")))
    assert model.stored is not None
    assert model.quantized is not None
    assert model.quantized.name == "gguf-q4_k_m"
    assert model.stored.num_params == model.shape.num_params
    assert model.stored.weights == weight_bytes(model.shape, model.quantized)


def test_a_truncated_gguf_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"truncated: tensor .* download it again"):
        resolve(str(gguf_fixture(tmp_path / "m.gguf", missing=1)))


@pytest.mark.parametrize("keep", [0, 3, 23, 24, 40, 500, 5000])
def test_a_gguf_cut_inside_its_header_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes((DATA / "gguf-Q4_K_M-mixed.header").read_bytes()[:keep])
    with pytest.raises(PlanError, match=r"truncated|too short"):
        resolve(str(path))


def test_a_file_of_another_kind_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(PlanError, match="no GGUF file"):
        resolve(str(path))


def write_gguf(path: Path, architecture: str = "qwen2", biases: bool = True) -> None:
    """A small F16 model through the gguf package's own writer, with a long token list."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list([f"token {i}" for i in range(5000)])
    writer.add_token_scores([0.0] * 5000)
    half = np.zeros
    tensors = {
        "token_embd.weight": (5000, 64),
        "output.weight": (5000, 64),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
    }
    vectors = {"output_norm.weight": 64, "blk.0.attn_norm.weight": 64, "blk.0.ffn_norm.weight": 64}
    if biases:
        vectors |= {"blk.0.attn_q.bias": 64, "blk.0.attn_k.bias": 32, "blk.0.attn_v.bias": 32}
    for name, dims in tensors.items():
        writer.add_tensor(name, half(dims, np.float16))
    for name, size in vectors.items():
        writer.add_tensor(name, half(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_of_the_reference_writer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    reference = gguf.GGUFReader(path)
    header = read_gguf(path)
    assert {t.name: (t.num_params, t.num_bytes) for t in header.tensors} == {
        t.name: (int(t.n_elements), int(t.n_bytes)) for t in reference.tensors
    }
    model = resolve(str(path))
    assert (model.shape.num_params, model.shape.tied) == (
        sum(int(t.n_elements) for t in reference.tensors),
        False,
    )
    assert model.shape.notes == ()
    assert model.shape.qkv_bias


def test_an_unknown_gguf_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "mamba", biases=False)
    with pytest.raises(PlanError, match="'mamba' is not supported"):
        resolve(str(path))


def test_a_missing_part_of_a_split_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(PlanError, match=r"m-00002-of-00002.gguf is missing"):
        resolve(str(path))


def test_a_truncated_safetensors_file_is_named(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", float_header("BF16", 2), missing=1)
    with pytest.raises(PlanError, match=r"truncated.*download it again"):
        resolve(str(folder))


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(PlanError, match=r"lacks b.safetensors"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[]", "not a model configuration"), ("\xff", "cannot be read")],
)
def test_an_unreadable_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=message):
        resolve(str(path))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "quip"}, "'quip'"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "unknown weight scheme"),
        ({"quant_method": "gptq", "bits": "four"}, "not supported"),
        ({"quant_method": "awq", "bits": 3}, "'awq' with 3 bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "0 groups"),
    ],
)
def test_a_wrong_quantization_config_is_named(
    tmp_path: Path, quantization: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    with pytest.raises(PlanError, match=message):
        resolve(str(path))


@pytest.mark.parametrize("text", ["7B", "13b", "0.5B", "350M", "70B", "1T"])
def test_a_size_gives_a_decoder_of_that_size(text: str) -> None:
    """To 1 %, with the guess named, and no KV scaled from a multi-head model."""
    model = resolve(text)
    unit = {"m": 1e6, "b": 1e9, "t": 1e12}[text[-1].lower()]
    assert model.shape.num_params == pytest.approx(float(text[:-1]) * unit, rel=0.01)
    assert model.assumed
    assert "names no architecture" in model.shape.notes[0]
    assert model.shape.num_groups > 1


def test_a_size_says_how_far_kv_may_be_off() -> None:
    """Among 7B models KV is 56 KiB a token (Qwen2-7B) to 512 (Llama-2-7B)."""
    note = resolve("7B").shape.notes[1]
    assert "56 KiB for Qwen2-7B" in note
    assert "512 KiB for Llama-2-7B" in note
    assert kv_bytes_per_token(catalog.shape("Llama-2-7B")) == 512 * 1024


@pytest.mark.parametrize("text", ["0B", "999999T", "Qwen2-14B", "nothing.gguf", "no/such.json"])
def test_what_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        resolve(text)


def test_a_misspelt_name_gets_its_neighbours() -> None:
    with pytest.raises(PlanError, match="Did you mean Qwen2-7B"):
        resolve("Qwen2-7")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no config.json and no .gguf file"):
        resolve(str(tmp_path))
