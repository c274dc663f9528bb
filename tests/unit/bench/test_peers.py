"""Peers: what runs is measured, what can't run stays in the table with its reason."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import gguf
import psutil
import pytest
import tiny
import tiny_gguf
import torch
from safetensors.torch import load_file

from headrace.engine.loading.source import open_checkpoint
from headrace.worker.bench import beside_peers, report, workloads
from headrace.worker.bench.compare import System, compare
from headrace.worker.bench.peers import install
from headrace.worker.bench.peers.weights import as_gguf, as_int8_folder
from headrace.worker.bench.subject import Subject

ECHO = """
import subprocess
import sys
import time
from headrace.worker.bench.peers.protocol import Run, serve

TICK = "import time\\nwhile True: print(time.monotonic(), flush=True); time.sleep(0.01)"

def tick(path):
    '''A process under this one that is never idle, as the threads of some engines are.'''
    subprocess.Popen([sys.executable, "-c", TICK], stdout=open(path, "w"))

def load(options):
    print("what a library prints is not the protocol's")
    if options.extra.get("broken"):
        raise SystemExit("no such device")
    change = int(options.extra.get("change", "0"))
    if "ticks" in options.extra:
        tick(options.extra["ticks"])
    def run(requests):
        time.sleep(float(options.extra.get("sleep", "0")))
        outputs = [[r.id] * r.max_tokens for r in requests]
        for output in outputs[:change]:
            output[-1] += 1
        return Run(0.5, outputs, details={"ended": time.monotonic()})
    return "echo 1 " + options.model, run

serve(load)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A peer that needs no engine: a real process that speaks the protocol."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    return script


def test_what_cannot_run_is_listed_beside_what_can(echo: Path, tmp_path: Path) -> None:
    """Four systems: a reference, one with two of five outputs different, one that dies while it
    loads and one that was never installed. Four rows come back."""
    path = tmp_path / "work.jsonl"
    workloads.write([workloads.BenchRequest(i, [1, 2, 3], i + 1) for i in range(5)], path)
    argv = (sys.executable, str(echo))
    systems = [
        System("reference", "float32", argv),
        System("other", "bfloat16", argv, {"change": "2"}, model="its own form"),
        System("broken", "bfloat16", argv, {"broken": "1"}),
        System("absent", "bfloat16", ("/nonexistent",), missing="could not be installed: no wheel"),
    ]
    measured = compare(
        systems, model="m", workload="work", workload_path=path, threads=1, repeats=2
    )
    rows = [
        beside_peers.peer_row(row, system, measured[0], 1)
        for row, system in zip(measured, systems, strict=True)
    ]
    assert [row["system"] for row in rows] == ["reference", "other", "broken", "absent"]
    assert [row["exact_of_64"] for row in rows] == [5, 3, None, None]
    assert [row["median_s"] for row in rows] == [0.5, 0.5, None, None]
    assert rows[0]["times_s"] == [0.5, 0.5]
    assert rows[0]["output_tokens"] == 1 + 2 + 3 + 4 + 5
    assert (rows[0]["version"], rows[1]["version"]) == ("echo 1 m", "echo 1 its own form")
    assert "no such device" in rows[2]["error"]
    assert rows[3]["error"] == "could not be installed: no wheel"
    table = beside_peers.markdown_table(rows)
    assert "not run: could not be installed: no wheel" in table
    assert "3/5" in table
    beside_peers.plot(rows, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 1000
    report.write(tmp_path / "peers.json", {"rows": rows})
    assert json.loads((tmp_path / "peers.json").read_text())["rows"][2]["median_s"] is None


def test_a_system_stands_still_with_all_it_started_while_another_runs(
    echo: Path, tmp_path: Path
) -> None:
    path, ticks = tmp_path / "work.jsonl", tmp_path / "ticks"
    workloads.write([workloads.BenchRequest(0, [1, 2, 3], 1)], path)
    argv = (sys.executable, str(echo))
    systems = [
        System("busy", "float32", argv, {"ticks": str(ticks), "sleep": "0.6"}),
        System("measured", "float32", argv, {"sleep": "0.6"}),
    ]
    try:
        busy, measured = compare(
            systems, model="m", workload="work", workload_path=path, threads=1, repeats=1
        )
        ended = measured.details["ended"]
        seen = [float(line) for line in ticks.read_text().splitlines()[:-1]]
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if "print(time.monotonic(), flush=True)" in " ".join(process.info["cmdline"] or ()):
                process.kill()
    assert any(busy.details["ended"] - 0.5 < at < busy.details["ended"] for at in seen)
    assert [at for at in seen if ended - 0.5 < at < ended] == []


def test_peers_that_are_not_installed_are_systems_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All six, and a dtype that a peer does not have becomes one that it has."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    subject = Subject("m", tmp_path, None, ("float32",), 2, {})
    systems = beside_peers.peer_systems(install.PEERS, subject, install_missing=False)
    assert [s.name for s in systems] == [peer.title for peer in install.PEERS]
    assert all("not installed" in s.missing for s in systems)
    assert {s.dtype for s in systems} == {"float32", "bfloat16"}
    assert all(s.argv[0].startswith(str(tmp_path / "peers")) for s in systems)


def test_every_peer_has_a_script_that_compiles() -> None:
    folder = Path(install.__file__).parent
    for peer in install.PEERS:
        source = (folder / f"{peer.module}.py").read_text()
        compile(source, peer.module, "exec")
        assert "serve(load)" in source


def test_requirements_are_filtered_by_normalized_name() -> None:
    wanted = [
        "torch==2.13.0",
        "TorchAudio==2.13.0; platform_machine == 'x86_64'",
        "torch_vision>=1",
        "numpy",
        "ray>=2; extra == 'ray'",
        "msgspec[foo]>=0.1; python_version >= '3.10'",
    ]
    without = frozenset({"torch", "torchaudio", "torch-vision"})
    assert install.filtered(wanted, without) == [
        "numpy",
        "msgspec[foo]>=0.1; python_version >= '3.10'",
    ]


def test_an_environment_that_fails_says_why_and_is_not_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is there but broken: the reason is in its own words; nothing is marked."""
    peer = install.Peer("p", "P", "vllm_cpu", first=("anything",))
    python = install.python_of(peer, tmp_path)
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no space left on device\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(install.NotInstalled, match="no space left on device"):
        install.install(peer, tmp_path)
    assert not install.is_installed(peer, tmp_path)
    monkeypatch.setattr(install, "source_folder", lambda: None)
    with pytest.raises(install.NotInstalled, match="checkout"):
        install.install(peer, tmp_path)


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "BF16"), ("qwen2", "BF16"), ("qwen2", "Q8_0")]
)
def test_a_gguf_of_another_kind_has_the_dequantized_weights_of_its_source(
    tmp_path: Path, family: str, kind: Literal["BF16", "Q8_0"]
) -> None:
    """Read back by the engine's own loader: every matrix is the source's, rounded as `kind` does,
    and config and tokenizer facts are unchanged. Made once: the second call finds the file."""
    source = tiny_gguf.write_gguf(
        tmp_path / "m.gguf", family, quantization="Q4_1", intermediate_size=192
    )
    made = as_gguf(source, kind, tmp_path / "cache")
    before, after = open_checkpoint(source), open_checkpoint(made)
    assert after.config == replace(before.config, dtype=after.config.dtype)
    assert (after.config.dtype == "bfloat16") == (kind == "BF16")
    assert after.eos_token_ids == before.eos_token_ids
    shapes = before.tensors.shapes()
    assert after.tensors.shapes() == shapes
    for name, shape in shapes.items():
        exact = before.tensors.load(name).float()
        got = after.tensors.load(name).float()
        assert torch.equal(got, exact if len(shape) == 1 else _rounded(exact, kind)), name
    stamp = made.stat().st_mtime_ns
    assert as_gguf(source, kind, tmp_path / "cache").stat().st_mtime_ns == stamp
    assert not math.isnan(float(after.tensors.load(next(iter(shapes))).float().sum()))


def test_an_int8_folder_for_vllm_has_the_layers_rounded_to_nearest_a_channel(
    tmp_path: Path,
) -> None:
    """Layers are the nearest multiples of their channel's scale; the rest is the source's."""
    source = tmp_path / "m"
    tiny.write_checkpoint(source)
    made = as_int8_folder(source, tmp_path / "cache")
    exact = load_file(source / "model.safetensors")
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["quant_method"] == "compressed-tensors" and group["targets"] == ["Linear"]
    assert group["weights"]["num_bits"] == 8 and group["weights"]["strategy"] == "channel"
    assert group["input_activations"]["dynamic"] and group["input_activations"]["num_bits"] == 8
    got = load_file(made / "model.safetensors")
    for name, values in exact.items():
        scale = got.get(name + "_scale")
        if scale is None:
            assert torch.equal(got[name].float(), values.to(got[name].dtype).float()), name
            continue
        assert got[name].dtype == torch.int8 and scale.shape == (values.shape[0], 1)
        nearest = (values / scale.float()).round().clamp(-127, 127)
        assert (got[name].float() - nearest).abs().max() <= 1, name
        assert (got[name].float() == nearest).float().mean() > 0.99, name
    assert as_int8_folder(source, tmp_path / "cache") == made


def _rounded(values: torch.Tensor, kind: str) -> torch.Tensor:
    """By the gguf package."""
    stored = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(values.numpy(), stored)
    return torch.from_numpy(gguf.quants.dequantize(blocks, stored)).view(values.shape)
