"""`headrace quantize` from model to model: what it writes is loaded by our own engine and, but for
the packed weights, by Transformers; killed runs go on."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.loading.source import open_checkpoint
from headrace.engine.models.decoder import head_spec, layer_specs
from headrace.engine.quant.choose import choose_scheme
from headrace.engine.quant.scheme import FloatSource
from headrace.engine.quantize.cli import quantize
from headrace.engine.quantize.work import check_space
from headrace.engine.runner import load_runner
from headrace.engine.tokenizer import load_tokenizer

TEXT = Path(__file__).parents[2] / "data" / "text.txt"
LENGTH = 64
SMALL = ("--samples", "24", "--sequence-length", str(LENGTH), "--threads", "1")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(model: Path, output: Path, *options: str) -> Result:
    return CliRunner().invoke(quantize, [str(model), "-o", str(output), *SMALL, *options])


def made(model: Path, output: Path, *options: str) -> dict[str, Any]:
    found = run(model, output, *options, "--json")
    assert found.exit_code == 0, found.output
    report = json.loads((output / "quantization_report.json").read_text())
    assert json.loads(found.stdout)["parts"] == report["parts"]
    return report


def engine_perplexity(folder: Path) -> float:
    """The text in the same sequences, through the serving path."""
    tokens = load_tokenizer(folder).encode(TEXT.read_text(), add_special_tokens=False)
    runner = load_runner(
        EngineConfig(str(folder), dtype="float32", kv_cache_memory_bytes=1 << 22, num_threads=1)
    )
    total, count = 0.0, 0
    for start in range(0, len(tokens), LENGTH):
        part = tokens[start : start + LENGTH]
        if len(part) > 1:
            logprobs = torch.log_softmax(runner.logits(part)[:-1], dim=-1)
            total -= float(logprobs.gather(1, torch.tensor(part[1:])[:, None]).sum())
            count += len(part) - 1
    return math.exp(total / count)


def float_folder(folder: Path, target: Path) -> Path:
    """The written model with its weights as plain floats, for Transformers."""
    checkpoint = open_checkpoint(folder)
    layers = [spec for layer in layer_specs(checkpoint.config) for spec in layer]
    head = head_spec(checkpoint.config)
    floats = FloatSource(choose_scheme(checkpoint, None, layers, head), [*layers, head])
    target.mkdir()
    save_file(
        {name: floats.load(name).float().contiguous() for name in floats.shapes()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (target / "config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", ("--to", "int4")),
        ("mistral", ("--to", "int4", "--method", "awq")),
        ("qwen2", ("--to", "int3", "--method", "awq")),
        ("qwen2", ("--to", "int4", "--asymmetric", "--order", "columns")),
        ("qwen3", ("--to", "int8", "--method", "gptq")),
        ("llama", ("--to", "int4", "--method", "rtn")),
    ],
)
def test_a_written_model_runs_as_reported(family, options, tmp_path) -> None:
    """In our engine and, its weights as floats, in Transformers; biases and norms included."""
    model = tiny.write_checkpoint(tmp_path / "model", family, tie_word_embeddings=family == "qwen2")
    output = tmp_path / "made"
    report = made(model, output, *options, "--text", str(TEXT))
    found = report["perplexity"]
    assert found["before"] == pytest.approx(engine_perplexity(model), rel=1e-3)
    # INT8 activations are the run's, not the weights'.
    tolerance = 0.03 if "int8" in options else 1e-3
    assert found["after"] == pytest.approx(engine_perplexity(output), rel=tolerance)
    written = sum(tensor.nbytes for tensor in load_file(output / "model.safetensors").values())
    assert report["bytes_total"] == written
    assert len(report["parts"]) == 14
    worse = [part for part in report["parts"] if part["error"] > 1.0001 * part["nearest_error"]]
    assert not worse
    tokens = load_tokenizer(output).encode("A record is a letter.", add_special_tokens=False)
    runner = load_runner(
        EngineConfig(
            str(output),
            dtype="float32",
            quantization="float",
            kv_cache_memory_bytes=1 << 22,
            num_threads=1,
        )
    )
    oracle = AutoModelForCausalLM.from_pretrained(
        float_folder(output, tmp_path / "floats"), dtype=torch.float32
    )
    with torch.inference_mode():
        theirs = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(runner.logits(tokens), theirs, atol=2e-3, rtol=0)
    assert not (tmp_path / "made.work").exists()


def test_transformers_reads_the_config_and_tokenizer(tmp_path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    made(model, tmp_path / "gptq", "--to", "int4")
    made(model, tmp_path / "awq", "--to", "int4", "--method", "awq")
    made(model, tmp_path / "int8", "--to", "int8", "--method", "rtn")
    for name, method in (("gptq", "gptq"), ("awq", "awq"), ("int8", "compressed-tensors")):
        config = AutoConfig.from_pretrained(tmp_path / name)
        assert config.quantization_config["quant_method"] == method
        assert config.dtype == torch.bfloat16
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs.encode("naïve 日本") == load_tokenizer(tmp_path / name).encode("naïve 日本")
        for file in ("generation_config.json", "tokenizer_config.json"):
            assert (tmp_path / name / file).read_bytes() == (model / file).read_bytes()
    tensors = load_file(tmp_path / "gptq" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_gguf_file_becomes_a_whole_folder(tmp_path) -> None:
    """Blocks dequantized, rows put back in order, tokenizer and template written out."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    source = tiny_gguf.write_gguf(
        tmp_path / "tiny.gguf",
        quantization="Q8_0",
        metadata={"tokenizer.chat_template": template},
    )
    report = made(source, tmp_path / "made", "--to", "int4", "--text", str(TEXT))
    found = report["perplexity"]
    assert found["after"] == pytest.approx(engine_perplexity(tmp_path / "made"), rel=1e-3)
    ours, theirs = load_tokenizer(source), AutoTokenizer.from_pretrained(tmp_path / "made")
    for text in ("The harbour wakes.", "naïve café 日本語 😀", "<|im_start|>user\n"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(
            text, add_special_tokens=False
        )
    assert theirs.chat_template == template
    again = load_tokenizer(tmp_path / "made")
    assert again.eos_token_ids == ours.eos_token_ids
    assert again.adds_bos == ours.adds_bos
    assert AutoConfig.from_pretrained(tmp_path / "made").architectures == ["LlamaForCausalLM"]


def test_a_killed_run_goes_on_and_writes_the_same_bytes(tmp_path) -> None:
    """SIGKILL in the middle of the layers, twice; the files are those of a run in one go."""
    model = tiny.write_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6)
    made(model, tmp_path / "whole", "--to", "int4", "--text", str(TEXT))
    output = tmp_path / "killed"
    command = [
        *(sys.executable, "-m", "headrace.producer.cli", "quantize", str(model), "--to", "int4"),
        *("-o", str(output), "--text", str(TEXT), *SMALL),
    ]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    work = tmp_path / "killed.work"
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    while not (work / "layer-00001.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not output.exists()
    (work / "layer-00005.safetensors.part").write_bytes(b"torn")
    report = made(model, output, "--to", "int4", "--text", str(TEXT))
    assert report["resumed_layers"] >= 2
    assert not work.exists()
    for file in sorted((tmp_path / "whole").iterdir()):
        if file.name != "quantization_report.json":
            assert (output / file.name).read_bytes() == file.read_bytes(), file.name
    whole = json.loads((tmp_path / "whole" / "quantization_report.json").read_text())
    assert whole["parts"] == report["parts"]
    assert whole["perplexity"] == report["perplexity"]


def test_another_run_s_layers_are_refused(tmp_path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "llama")
    output = tmp_path / "made"
    limited = subprocess.run(
        [
            *(sys.executable, "-m", "headrace.producer.cli", "quantize", str(model)),
            *("--to", "int8", "-o", str(output), *SMALL),
        ],
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
        capture_output=True,
        text=True,
    )
    assert limited.returncode == 2
    assert "writing failed (File too large)" in limited.stderr
    assert "keeps the finished layers" in limited.stderr
    assert not output.exists()
    other = run(model, output, "--to", "int4")
    assert other.exit_code == 2
    assert "beginning of another run (other recipe); --restart" in other.output
    report = made(model, output, "--to", "int4", "--restart")
    assert report["resumed_layers"] == 0


def nothing_written(folder: Path, name: str) -> bool:
    return not (folder / name).exists() and not (folder / f"{name}.work").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"too short", "9 tokens are too few: at least 2 sequences of 64"),
        (b"\xff\xfe\x00bad", "cannot be read as UTF-8"),
        (None, "does not exist"),
    ],
)
def test_unusable_calibration_text_is_refused(text, message, tmp_path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "llama")
    file = tmp_path / "text.txt"
    if text is not None:
        file.write_bytes(text)
    found = run(model, tmp_path / "made", "--to", "int4", "--calibration", str(file))
    assert found.exit_code == 2
    assert message in found.output
    assert nothing_written(tmp_path, "made")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 5}', "line 2: text, prompt or messages is needed"),
        ("{", "line 2: no JSON"),
        ("[1]", "line 2: an object is needed"),
    ],
)
def test_a_bad_line_of_calibration_is_named(line, message, tmp_path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "llama")
    file = tmp_path / "text.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    found = run(model, tmp_path / "made", "--to", "int4", "--calibration", str(file))
    assert found.exit_code == 2
    assert message in found.output


def test_chats_and_batch_lines_calibrate(tmp_path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "llama")
    file = tmp_path / "text.jsonl"
    messages = [{"role": "user", "content": "x" * 200}]
    lines = [
        {"messages": messages},
        {"body": {"messages": messages}},
        {"text": "y" * 40},
        {"prompt": "z" * 40},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = made(model, tmp_path / "made", "--to", "int4", "--calibration", str(file))
    framed = len(load_tokenizer(model).render_chat(messages, add_generation_prompt=False))
    framed -= len("<|im_start|>") - 1 + len("<|im_end|>") - 1 + len("<|bos|>") - 1
    assert report["calibration"]["available_tokens"] == 2 * framed + 80


def test_perplexity_on_the_calibration_text_is_refused(tmp_path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "llama")
    options = ("--to", "int4", "--calibration", str(TEXT), "--text", str(TEXT))
    found = run(model, tmp_path / "made", *options)
    assert found.exit_code == 2
    assert "share a passage" in found.output
    assert nothing_written(tmp_path, "made")


def test_models_that_cannot_be_quantized_are_refused(tmp_path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "llama")
    made(model, tmp_path / "made", "--to", "int4", "--method", "rtn")
    again = run(tmp_path / "made", tmp_path / "twice", "--to", "int3")
    assert again.exit_code == 2
    assert "quantized already (gptq)" in again.output
    taken = run(model, tmp_path / "made", "--to", "int3")
    assert taken.exit_code == 2
    assert "exists already" in taken.output
    unknown = run(model, tmp_path / "other", "--to", "int5")
    assert unknown.exit_code == 2
    assert "int2, int3, int4, int8" in unknown.output
    lost = run(model, tmp_path / "no" / "folder", "--to", "int4")
    assert lost.exit_code == 2
    assert "is no folder" in lost.output
    nameless = run(model, Path("/"), "--to", "int4")
    assert nameless.exit_code == 2
    assert "no name for a new folder" in nameless.output
    (model / "tokenizer.json").unlink()
    silent = run(model, tmp_path / "other", "--to", "int4")
    assert silent.exit_code == 2
    assert "tokenizer.json is missing" in silent.output
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    damaged = run(model, tmp_path / "other", "--to", "int4", "--method", "rtn")
    assert damaged.exit_code == 2
    assert "model.layers.1.mlp.up_proj.weight missing" in damaged.output
    assert nothing_written(tmp_path, "other")


def test_weights_that_are_no_numbers_are_refused(tmp_path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    found = run(model, tmp_path / "made", "--to", "int4")
    assert found.exit_code == 2
    assert "not finite" in found.output
    assert nothing_written(tmp_path, "made")


def test_a_full_disk_is_noticed_before_the_work(tmp_path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(EngineError, match="GB free; the finished layers and the model take"):
        check_space(tmp_path, 2 * free)
