"""What a folder must hold: damaged, incomplete and unsupported checkpoints are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.config import EngineConfig
from headrace.engine.errors import CheckpointError, EngineError
from headrace.engine.loading.huggingface import open_folder
from headrace.engine.loading.source import open_checkpoint, resolve_model
from headrace.engine.runner import ModelRunner, load_runner
from headrace.engine.tokenizer import load_tokenizer

POOL = 1 << 22


def load(model: Path, **settings: Any) -> ModelRunner:
    settings.setdefault("kv_cache_memory_bytes", POOL)
    return load_runner(EngineConfig(str(model), num_threads=1, **settings))


def edit(folder: Path, **values: Any) -> None:
    """Replace keys of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_checkpoint(tmp_path / "Tiny-Model")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, r"tensor model\.layers\.1\.mlp\.up_proj\.weight missing")


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    extra = "model.layers.0.self_attn.q_norm.weight"
    rewrite(folder, lambda weights: weights.update({extra: torch.ones(16)}))
    refused(folder, r"tensor model\.layers\.0\.self_attn\.q_norm\.weight unexpected")


def test_a_misshapen_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(65)}))
    refused(folder, r"model\.norm\.weight has shape \[65\]; the config needs \[64\]")


def test_an_unsupported_dtype_is_named(folder: Path) -> None:
    wrong = torch.ones(64, dtype=torch.float64)
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": wrong}))
    refused(folder, r"model\.norm\.weight has dtype F64")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    refused(folder, "not a whole safetensors file")


def test_a_missing_shard_is_named_with_a_tensor_it_holds(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "m", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, r"model-00002-of-00003\.safetensors is missing \(it holds ")


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "m", shards=2)
    path = folder / "model-00001-of-00002.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight" if "model.norm.weight" in weights else next(iter(weights))]
    save_file(weights, path)
    refused(folder, r"model-00001-of-00002\.safetensors: tensor \S+ is missing")


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"model\.safetensors is missing; pytorch_model\.bin cannot be read")
    (folder / "config.json").unlink()
    refused(folder, r"config\.json is missing")


def test_garbage_in_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    refused(folder, r"config\.json cannot be read")
    (folder / "config.json").write_text("[]")
    refused(folder, "an object is needed")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]},
            "'Mamba2ForCausalLM'",
        ),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization method 'hqq'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'; an integer is needed"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be positive"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; true or false"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    edit(folder, **values)
    refused(folder, message)


def test_more_layers_in_the_config_than_in_the_file_are_missing_tensors(folder: Path) -> None:
    edit(folder, num_hidden_layers=3)
    refused(folder, r"tensors model\.layers\.2\.input_layernorm\.weight, .* and 4 more missing")


def test_a_tied_head_that_is_stored_once_more_is_no_surprise(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "m", tie_word_embeddings=True)
    before = load(folder).logits([1, 2, 3])
    wrong = torch.zeros(tiny.VOCAB_SIZE, 64)
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": wrong}))
    assert torch.equal(load(folder).logits([1, 2, 3]), before)


def test_a_float_type_is_a_quantization_too(folder: Path) -> None:
    """So that what `headrace verify --fallback` prints is what a worker takes."""
    runner = load(folder, quantization="bf16", dtype="auto")
    assert (runner.dtype, runner.quantization) == ("bfloat16", "none")
    with pytest.raises(EngineError, match="'fp32' contradicts dtype bfloat16"):
        load(folder, quantization="fp32", dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_weights_are_widened_exactly(dtype: str, tmp_path: Path) -> None:
    stored = load(tiny.write_checkpoint(tmp_path / "a", dtype=dtype), dtype="float32")
    wide = tiny.write_checkpoint(tmp_path / "b")
    rewrite(
        wide,
        lambda weights: weights.update(
            {k: v.to(getattr(torch, dtype)).float() for k, v in weights.items()}
        ),
    )
    assert torch.equal(stored.logits([5, 6, 7]), load(wide).logits([5, 6, 7]))


def test_padding_rows_of_the_embedding_have_no_logits(tmp_path: Path) -> None:
    """The tokenizer knows 260 ids; Qwen pads embeddings to a round number in the same way."""
    folder = tiny.write_checkpoint(tmp_path / "m", vocab_size=320)
    runner = load(folder)
    assert runner.vocab_size == tiny.VOCAB_SIZE
    assert runner.logits([1, 2]).shape == (2, tiny.VOCAB_SIZE)


def test_end_of_text_is_the_union_of_all_that_name_one(tmp_path: Path) -> None:
    """generation_config, config and the tokenizer may each know an id that the others lack."""
    folder = tiny.write_checkpoint(
        tmp_path / "m", generation_config={"eos_token_id": [7, 8]}, eos_token_id=9
    )
    assert load(folder).eos_token_ids == (7, 8, 9, tiny.EOS)


def test_generation_config_gives_sampling_defaults(tmp_path: Path) -> None:
    recommended = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    folder = tiny.write_checkpoint(
        tmp_path / "m", generation_config={**recommended, "do_sample": True, "max_length": 99}
    )
    assert load(folder).default_sampling == recommended


def test_the_fingerprint_changes_with_one_weight_and_with_nothing_else(tmp_path: Path) -> None:
    first, again = (
        open_folder(tiny.write_checkpoint(tmp_path / name)).fingerprint for name in ("a", "b")
    )
    other = tiny.write_checkpoint(tmp_path / "c")
    rewrite(other, lambda weights: weights["model.norm.weight"].neg_())
    assert first == again != open_folder(other).fingerprint


def test_the_pool_is_what_the_flag_says(folder: Path) -> None:
    """Two layers, two heads of 16, keys and values, float32: 512 bytes a token, 8 KiB a block."""
    runner = load(folder, kv_cache_memory_bytes=1 << 20)
    assert runner.num_blocks == (1 << 20) // 8192 - 1
    assert runner.kv_cache_bytes == 1 << 20


def test_a_pool_that_is_too_small_says_what_it_needs(folder: Path) -> None:
    with pytest.raises(EngineError, match="a block of 16 tokens takes 8192 bytes"):
        load(folder, kv_cache_memory_bytes=9000)
    with pytest.raises(EngineError, match="holds 112 tokens, fewer than max_model_len 200"):
        load(folder, kv_cache_memory_bytes=8 * 8192, max_model_len=200)
    assert load(folder, kv_cache_memory_bytes=8 * 8192).max_model_len == 112


def test_settings_that_this_machine_cannot_serve_are_refused(folder: Path) -> None:
    for settings, message in (
        ({"quantization": "nope"}, "quantization 'nope'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"max_model_len": 1025}, "beyond the 1024 positions"),
        ({"max_model_len": 1}, "no room for a prompt and an answer"),
        ({"device": "cuda:99999999999999999999"}, "device 'cuda:9+' is not supported"),
        ({"kv_cache_memory_bytes": 1 << 47}, "131,072.0 GiB for the KV cache cannot be had"),
        ({"kv_cache_memory_bytes": 1024}, "1024 bytes hold no KV cache"),
        ({"block_size": 1 << 16}, "a block of 65536 tokens takes 33554432 bytes"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype 'int3' is not one of"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ):
        with pytest.raises(EngineError, match=message):
            load(folder, **settings)


DAMAGED = {
    "config.json": ["[]", "{", "null", "\0" * 64, "[" * 100_000, '{"model_type": ["llama"]}'],
    "generation_config.json": ['{"eos_token_id": {"a": 1}}', '{"eos_token_id": "x"}', "[]"],
    "model.safetensors": ["", "x", "\0" * 64, "not at all" * 100],
    "model.safetensors.index.json": [
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"model.norm.weight": null}}',
        '{"weight_map": {"model.norm.weight": "absent.safetensors"}}',
    ],
    "tokenizer.json": [
        "",
        "[]",
        "{}",
        '{"model": "x"}',
        '{"model": {"vocab": {"a": "b"}}}',
        '{"added_tokens": 5}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
        "[" * 100_000,
    ],
    "tokenizer_config.json": ["[]", "x", '{"chat_template": [5]}'],
}


@pytest.mark.parametrize(
    ("file", "content"), [(file, content) for file, some in DAMAGED.items() for content in some]
)
def test_a_folder_with_one_damaged_file_is_refused_with_its_name_and_nothing_else_is_raised(
    folder: Path, file: str, content: str
) -> None:
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(folder)
        load_tokenizer(folder)
    told = str(refused.value)
    assert any(name in told for name in (folder.name, file, "config", "tensor")), told
    assert "\n" not in told.strip()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_where_a_file_should_be_is_refused_by_name(folder: Path, file: str) -> None:
    (folder / file).unlink()
    (folder / file).mkdir()
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        open_checkpoint(folder)
        load_tokenizer(folder)


def test_names_that_mean_no_model_say_why(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, message in (
        (str(tmp_path / "absent"), "does not exist"),
        ("absent.gguf", "does not exist"),
        (str(tmp_path / "notes.txt"), "not a folder and not a .gguf file"),
        ("", "the model's name is empty"),
        ("~nobody-of-that-name/model", "home directory"),
        ("/" + "x" * 5000, "File name too long"),
        (str(tmp_path / "loop"), "does not exist"),
        ("no-such-model", "no folder, no .gguf file, no hub id"),
    ):
        with pytest.raises(CheckpointError, match=message):
            resolve_model(name)


def test_the_model_s_name_is_its_folder_in_lower_case(folder: Path) -> None:
    assert load(folder).model_name == "tiny-model"
    assert load(folder, served_model_name="Mine").model_name == "Mine"
