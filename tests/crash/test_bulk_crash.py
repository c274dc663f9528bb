"""Killed in the middle of `headrace run`, by force: every line is there, exactly once.

Our own engine on a small random checkpoint, real processes, a private Redis.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import tiny
from bulk_support import (
    custom_ids,
    descendants,
    headrace,
    is_alive,
    read_lines,
    start_headrace,
    text_of,
    wait_for,
    write_lines,
)

LINES = 60
ENDS_WITHIN = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny.write_checkpoint(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "in.jsonl",
        [
            {"custom_id": f"r{i}", "prompt": f"line number {i}", "max_tokens": 40 + i % 7}
            for i in range(LINES)
        ],
    )


@pytest.fixture
def command(model: Path, source: Path, tmp_path: Path) -> list[str]:
    run = ["run", source, "-o", tmp_path / "out.jsonl", "--model", model, "--temperature", "0"]
    run += ["--ignore-eos", "--worker-log", tmp_path / "worker.log"]
    worker = ["--max-num-seqs", "2", "--num-threads", "1", "--kv-cache-memory", "16M"]
    worker += ["--dtype", "float32", "--port", "0", "--lease-seconds", "6"]
    return [*map(str, run), "--", *worker]


def worker_of(run: "subprocess.Popen[str]") -> psutil.Process | None:
    for process in descendants(run.pid):
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if "worker" in line and "--model" in line and "guard.py" not in " ".join(line[:5]):
            return process
    return None


def check_complete(out: Path) -> dict[str, str]:
    assert sorted(custom_ids(out)) == sorted(f"r{i}" for i in range(LINES))
    return {entry["custom_id"]: text_of(entry) for entry in read_lines(out)}


def wait_for_lines(run: "subprocess.Popen[str]", out: Path, count: int) -> None:
    def there() -> bool:
        if run.poll() is not None:
            raise AssertionError(f"it ended ({run.returncode}): {run.communicate()[1]}")
        return out.exists() and out.read_bytes().count(b"\n") >= count

    wait_for(there, f"{count} lines", 300)


def test_worker_killed_in_the_middle_of_a_run_every_line_is_there_once(
    command: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    run = start_headrace(*command, HEADRACE_MAX_CRASHES="10")
    wait_for_lines(run, out, 5)
    first = wait_for(lambda: worker_of(run), "the worker")
    first.kill()
    wait_for(lambda: (w := worker_of(run)) is not None and w.pid != first.pid, "another worker")
    _, told = run.communicate()
    assert run.returncode == 0, told
    assert "was killed by signal 9" in told
    check_complete(out)
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_run_killed_with_everything_under_it_and_typed_again_every_line_is_there_once(
    command: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    run = start_headrace(*command)
    wait_for_lines(run, out, 5)
    family = [psutil.Process(run.pid), *descendants(run.pid)]
    assert len(family) >= 5, "run, two guards, Redis and the worker"
    for process in family:
        process.kill()
    run.communicate()
    before = custom_ids(out)
    assert 5 <= len(before) < LINES
    # What a killed writer may leave: half a line.
    with out.open("a") as file:
        file.write('{"id":"batch_req_x","custom_id":"r59","resp')
    again = headrace(*command)
    assert again.returncode == 0, again.stderr
    assert f"{len(before)} of {LINES} lines have ended" in again.stderr
    check_complete(out)


def test_run_killed_alone_leaves_no_worker_and_no_redis_behind(
    command: list[str], tmp_path: Path
) -> None:
    """kill -9 gives `run` no chance to clean up; its children must notice by themselves."""
    out = tmp_path / "out.jsonl"
    run = start_headrace(*command)
    wait_for_lines(run, out, 1)
    family = descendants(run.pid)
    folders = [
        Path(process.cmdline()[1]).parent
        for process in family
        if process.cmdline()[1:] and process.cmdline()[1].endswith("redis.conf")
    ]
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    wait_for(lambda: not any(is_alive(p) for p in family), "all of them to end", ENDS_WITHIN)
    for folder in folders:
        wait_for(lambda folder=folder: not folder.exists(), f"{folder} to be removed", ENDS_WITHIN)


def test_ctrl_c_ends_everything_at_once_and_in_order(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run = start_headrace(*command)
    wait_for_lines(run, out, 3)
    family = descendants(run.pid)
    os.killpg(run.pid, signal.SIGINT)
    _, told = run.communicate()
    assert run.returncode == 130, told
    assert not any(is_alive(process) for process in family)
    assert "run the same command again" in told
    ids = custom_ids(out)
    assert 3 <= len(ids) == len(set(ids)) < LINES


def test_private_redis_killed_in_the_middle_nothing_is_lost(
    command: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    run = start_headrace(*command)
    wait_for_lines(run, out, 3)
    (server,) = [p for p in descendants(run.pid) if "redis-server" in p.name()]
    server.kill()
    _, told = run.communicate()
    assert run.returncode == 0, told
    assert "Redis had died" in told
    check_complete(out)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_model_that_cannot_load_is_said_once_and_nothing_is_lost(
    model: Path, source: Path, tmp_path: Path, damage: str
) -> None:
    broken = tmp_path / "broken"
    if damage == "truncated":
        tiny.write_checkpoint(broken)
        (weights,) = broken.glob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1000])
    done = headrace("run", source, "-o", tmp_path / "o.jsonl", "--model", broken, "--json")
    assert done.returncode == 2, done.stderr
    assert "the worker could not start" in done.stderr
    assert str(broken) in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "worker_failed"
    assert read_lines(tmp_path / "o.jsonl") == []
