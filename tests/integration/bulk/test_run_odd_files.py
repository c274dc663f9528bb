"""`headrace run` with inputs and outputs that are no plain, writable files of one's own."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from bulk_support import (
    HEADRACE,
    custom_ids,
    echo_worker,
    environment,
    headrace,
    read_lines,
    wait_for,
)
from bulk_support import write_lines as written

LINES: list[object] = [{"prompt": "a"}, {"prompt": "b"}]


def nested(levels: int) -> str:
    """Written by hand: Python's own json gives up before the deepest of them."""
    inner = '{"a": ' * levels + "1" + "}" * levels
    return f'{{"prompt": "x", "metadata": {inner}}}'


def test_an_output_or_error_file_that_is_none_is_refused_and_never_waited_for(
    redis_url: str, tmp_path: Path
) -> None:
    source = written(tmp_path / "in.jsonl", [*LINES, "no json"])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    good = tmp_path / "out.jsonl"
    missing = tmp_path / "no" / "folder.jsonl"
    for arguments in (
        ("-o", pipe),
        ("-o", "/dev/null"),
        ("-o", "/dev/stdout"),
        ("-o", good, "--errors", pipe),
        ("-o", good, "--errors", missing),
        ("-o", good, "--errors", "/dev/null"),
        ("-o", good, "--errors", tmp_path),
    ):
        done = headrace("run", source, *arguments, "--redis-url", redis_url, "--local-worker")
        assert done.returncode == 2 and "Traceback" not in done.stderr, (arguments, done.stderr)
    assert read_lines(good) == []


def test_an_input_under_another_name_is_not_written_over(redis_url: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", LINES)
    other = tmp_path / "out.jsonl"
    other.hardlink_to(source)
    for arguments in (("-o", other), ("-o", tmp_path / "o.jsonl", "--errors", other)):
        done = headrace("run", source, *arguments, "--redis-url", redis_url, "--restart")
        assert done.returncode == 2 and "written over" in done.stderr
    assert read_lines(source) == LINES


def test_an_input_may_be_a_pipe_of_the_shell(redis_url: str, tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    text = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)
    feeder = threading.Thread(target=pipe.write_bytes, args=(text,))
    feeder.start()
    with echo_worker(redis_url):
        done = headrace("run", pipe, "-o", out, "--redis-url", redis_url)
    feeder.join()
    assert done.returncode == 0, done.stderr
    assert sorted(custom_ids(out)) == ["line-1", "line-2"]
    for word in ("validate", "submit"):
        done = headrace(word, pipe, *(("--redis-url", redis_url) if word == "submit" else ()))
        assert done.returncode == 2 and "is a pipe or a device" in done.stderr


def test_a_full_disk_is_said_and_the_same_command_goes_on(redis_url: str, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the same short write, then an error."""
    source = written(tmp_path / "in.jsonl", [{"prompt": f"{i}" * 50} for i in range(300)])
    out = tmp_path / "out.jsonl"
    command = [*HEADRACE, "run", str(source), "-o", str(out), "--redis-url", redis_url]
    limited = ["/bin/bash", "-c", 'ulimit -f 40; trap "" XFSZ; exec "$@"', "-", *command]
    with echo_worker(redis_url):
        full = subprocess.run(limited, env=environment(), capture_output=True, text=True)
        assert full.returncode == 2, full.stderr
        assert f"cannot write {out}: File too large" in full.stderr
        assert "Traceback" not in full.stderr
        again = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert sorted(custom_ids(out)) == sorted(f"line-{n}" for n in range(1, 301))


def test_two_runs_do_not_share_an_error_file(redis_url: str, tmp_path: Path) -> None:
    """`a` and `a.jsonl` have the same one."""
    source = written(tmp_path / "in.jsonl", [*LINES, "no json"])
    with echo_worker(redis_url):
        first = headrace("run", source, "-o", tmp_path / "a", "--redis-url", redis_url)
        second = headrace("run", source, "-o", tmp_path / "a.jsonl", "--redis-url", redis_url)
        again = headrace("run", source, "-o", tmp_path / "a", "--redis-url", redis_url)
    assert first.returncode == 1, first.stderr
    assert second.returncode == 2 and "a.errors.jsonl" in second.stderr
    assert again.returncode == 1 and len(read_lines(tmp_path / "a.errors.jsonl")) == 1


def test_a_resume_with_another_error_file_is_refused(redis_url: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [*LINES, "no json"])
    command = ("run", source, "-o", tmp_path / "o.jsonl", "--redis-url", redis_url)
    with echo_worker(redis_url):
        assert headrace(*command, "--errors", tmp_path / "one.jsonl").returncode == 1
        refused = headrace(*command, "--errors", tmp_path / "two.jsonl")
        assert refused.returncode == 2
        assert "the error file (one.jsonl then, two.jsonl now)" in refused.stderr
        assert headrace(*command, "--errors", tmp_path / "one.jsonl").returncode == 1
    assert not (tmp_path / "two.jsonl").exists()


def test_deeply_nested_lines_fail_alone(redis_url: str, tmp_path: Path) -> None:
    deep = [101, 190, 240, 253, 254, 300, 1000]
    lines: list[object] = [nested(levels) for levels in [*deep, 100]]
    source = written(tmp_path / "in.jsonl", lines)
    with echo_worker(redis_url):
        done = headrace("run", source, "-o", tmp_path / "o.jsonl", "--redis-url", redis_url)
    assert done.returncode == 1, done.stderr
    assert custom_ids(tmp_path / "o.jsonl") == [f"line-{len(deep) + 1}"]
    failed = read_lines(tmp_path / "o.errors.jsonl")
    assert [entry["error"]["line"] for entry in failed] == list(range(1, len(deep) + 1))
    assert {entry["error"]["code"] for entry in failed} == {"invalid_request"}


@pytest.mark.parametrize(
    "option, value",
    [
        ("--seed", "9" * 23),
        ("--temperature", "nan"),
        ("--top-p", "inf"),
        ("--max-tokens", "9" * 40),
    ],
)
def test_a_parameter_that_no_request_could_carry_is_named_before_anything_runs(
    tmp_path: Path, option: str, value: str
) -> None:
    source = written(tmp_path / "in.jsonl", LINES)
    done = headrace("run", source, "-o", tmp_path / "o.jsonl", option, value)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    field = option.removeprefix("--").replace("-", "_")
    assert f"'{option}'" in done.stderr or f"{field}: " in done.stderr
    assert not (tmp_path / "o.jsonl").exists()


def test_a_file_that_cannot_be_written_is_named_without_a_traceback(
    redis_url: str, tmp_path: Path
) -> None:
    source = written(tmp_path / "in.jsonl", LINES)
    with echo_worker(redis_url):
        sent = headrace("submit", source, "--batch", "b", "--redis-url", redis_url)
    assert sent.returncode == 0, sent.stderr
    missing = tmp_path / "no" / "o.jsonl"
    done = headrace("results", "b", "-o", missing, "--redis-url", redis_url)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{missing}: No such file or directory" in done.stderr


def test_a_name_that_cannot_be_a_queues_is_said_once_before_anything_starts(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", LINES)
    model = tmp_path / "My Model (v2).gguf"
    model.touch()
    out = tmp_path / "o.jsonl"
    for arguments in (("--model", model), ("--served-model-name", "a b"), ("--queue", "q.low")):
        done = headrace("run", source, "-o", out, *arguments)
        assert done.returncode == 2 and "--served-model-name" in done.stderr, done.stderr
    assert not out.exists()


def test_a_run_under_nohup_outlives_its_terminal(redis_url: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [{"prompt": str(n)} for n in range(60)])
    out = tmp_path / "o.jsonl"
    command = ["nohup", *HEADRACE, "run", str(source), "-o", str(out), "--redis-url", redis_url]
    with echo_worker(redis_url, seconds_per_claim=0.1, most=4):
        run = subprocess.Popen(
            command, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        wait_for(lambda: out.exists() and out.stat().st_size > 0, "the first lines")
        run.send_signal(signal.SIGHUP)
        _, told = run.communicate()
    assert run.returncode == 0, told
    assert len(read_lines(out)) == 60


def test_a_run_goes_on_when_nobody_reads_its_messages(redis_url: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [{"prompt": str(n)} for n in range(20)])
    out = tmp_path / "o.jsonl"
    reading, writing = os.pipe()
    os.close(reading)
    command = [*HEADRACE, "run", str(source), "-o", str(out), "--redis-url", redis_url]
    with echo_worker(redis_url):
        done = subprocess.run(command, env=environment(), stderr=writing)
    os.close(writing)
    assert done.returncode == 0
    assert len(read_lines(out)) == 20
