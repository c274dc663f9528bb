"""`headrace run` over a real Redis and a worker that answers with the prompt."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from bulk_support import (
    custom_ids,
    echo_worker,
    environment,
    headrace,
    read_lines,
    start_headrace,
    text_of,
    wait_for,
    write_lines,
)
from redis_support import RedisServer

from headrace.producer.bulk.ledger import Ledger
from headrace.producer.bulk.lines import LineParser
from headrace.producer.bulk.reader import scan
from headrace.producer.bulk.sidecar import Fingerprint

BAD_LINES: list[object] = [
    b"no json",
    b'{"prompt": "\xff"}',
    [1, 2],
    {"custom_id": "x", "url": "/v1/nonsense", "body": {}},
    {"prompt": "again", "custom_id": "first"},
    {"prompt": "x", "stream": True},
    b'{"prompt": "' + b"x" * 2_000 + b'"}',
]
LIMIT = ("--max-line-bytes", "1000")


@pytest.fixture
def url(redis_url: str) -> str:
    with redis.Redis.from_url(redis_url) as connection:
        connection.config_set("appendonly", "no")
    return redis_url


def test_every_line_ends_exactly_once_in_the_output_or_the_error_file(
    url: str, tmp_path: Path
) -> None:
    lines: list[object] = [{"prompt": "hello", "custom_id": "first"}]
    lines += BAD_LINES
    lines += [{"prompt": f"p{i}"} for i in range(300)]
    lines += [{"messages": [{"role": "user", "content": "chat"}], "custom_id": "chat"}]
    lines += [{"prompt": "fail:invalid_request", "custom_id": "refused"}]
    source = write_lines(tmp_path / "in.jsonl", lines)
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    with echo_worker(url):
        done = headrace("run", source, "-o", out, "--redis-url", url, "--json", *LIMIT)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["total"], told["succeeded"], told["failed"]) == (310, 302, 8)
    assert sorted(custom_ids(out)) == sorted(
        ["first", "chat", *(f"line-{n}" for n in range(9, 309))]
    )
    for entry in read_lines(out):
        number = entry["custom_id"].removeprefix("line-")
        expected = {"first": "hello", "chat": "chat"}.get(number) or f"p{int(number) - 9}"
        assert text_of(entry) == expected
    failed = read_lines(errors)
    by_line = {e["error"]["line"]: e["error"]["code"] for e in failed if e["error"]}
    assert by_line == {
        2: "invalid_json_line",
        3: "invalid_json_line",
        4: "invalid_json_line",
        5: "unsupported_url",
        6: "duplicate_custom_id",
        7: "unsupported_parameter",
        8: "line_too_long",
    }
    (refused,) = [entry for entry in failed if entry["custom_id"] == "refused"]
    assert refused["error"] is None and refused["response"]["status_code"] == 400
    assert len(failed) == 8


def test_jobs_are_deleted_from_redis_once_their_lines_are_on_disk(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(500)])
    with echo_worker(url):
        done = headrace(
            "run", source, "-o", tmp_path / "o.jsonl", "--redis-url", url, "--max-jobs", "100"
        )
    assert done.returncode == 0, done.stderr
    with redis.Redis.from_url(url) as connection:
        left = [key for key in connection.scan_iter("rq:*") if b":job:" in key or b"results" in key]
        assert left == []


def test_at_most_max_jobs_are_in_redis(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(2000)])
    most = 0
    with echo_worker(url, seconds_per_claim=0.02, most=16), redis.Redis.from_url(url) as connection:
        run = start_headrace(
            "run", source, "-o", tmp_path / "o.jsonl", "--redis-url", url, "--max-jobs", "64"
        )
        while run.poll() is None:
            pattern = "rq:job:*"
            most = max(most, sum(1 for _ in connection.scan_iter(pattern, count=10_000)))
        run.communicate()
    assert run.returncode == 0
    # Those whose lines wait for the next group's fsync are there beside the 64 in flight.
    assert 0 < most <= 64 + 256


def test_ordered_output_is_in_input_order_though_work_is_sorted(url: str, tmp_path: Path) -> None:
    prompts = [f"{'zyx'[i % 3]}-{i}" for i in range(600)]
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    out = tmp_path / "o.jsonl"
    with echo_worker(url, most=32):
        done = headrace("run", source, "-o", out, "--redis-url", url, "--ordered")
    assert done.returncode == 0, done.stderr
    assert [text_of(entry) for entry in read_lines(out)] == prompts


def test_shared_beginnings_are_enqueued_side_by_side(url: str, tmp_path: Path) -> None:
    """Three prompts' families interleave in the file; in the queue they are together."""
    source = write_lines(
        tmp_path / "in.jsonl", [{"prompt": f"{'abc'[i % 3]} {i:03}"} for i in range(90)]
    )
    out = tmp_path / "o.jsonl"
    with echo_worker(url, most=1):
        done = headrace("run", source, "-o", out, "--redis-url", url)
    assert done.returncode == 0, done.stderr
    texts = [text_of(entry) for entry in read_lines(out)]
    assert texts == sorted(texts)


@pytest.mark.parametrize("mode", ["fail", "skip", "quarantine"])
def test_on_bad_line(url: str, tmp_path: Path, mode: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, "nonsense", {"prompt": "b"}])
    out, errors = tmp_path / "o.jsonl", tmp_path / "o.errors.jsonl"
    with echo_worker(url):
        done = headrace(
            "run", source, "-o", out, "--redis-url", url, "--on-bad-line", mode, "--json"
        )
    assert done.returncode == {"fail": 2, "skip": 0, "quarantine": 1}[mode], done.stderr
    told = json.loads(done.stdout)
    if mode == "fail":
        assert not out.exists() and "line 2" in done.stderr
        assert (told["error"]["code"], told["error"]["line"]) == ("invalid_json_line", 2)
        with redis.Redis.from_url(url) as connection:
            assert connection.keys("rq:job:*") == []
    else:
        assert sorted(custom_ids(out)) == ["line-1", "line-3"]
        assert errors.exists() is (mode == "quarantine")
        assert (told["skipped"], told["failed"]) == ((1, 0) if mode == "skip" else (0, 1))


def test_the_same_command_again_does_nothing_twice_and_retries_on_request(
    url: str, tmp_path: Path
) -> None:
    lines = [{"prompt": f"p{i}"} for i in range(10)]
    lines += [{"prompt": "retryable:overloaded", "custom_id": "again"}]
    lines += [{"prompt": "fail:invalid_request", "custom_id": "never"}]
    source = write_lines(tmp_path / "in.jsonl", lines)
    out, errors = tmp_path / "o.jsonl", tmp_path / "o.errors.jsonl"
    command = ("run", source, "-o", out, "--redis-url", url)
    with echo_worker(url):
        assert headrace(*command).returncode == 1
        first = out.read_bytes()
        assert sorted(custom_ids(errors)) == ["again", "never"]
        assert headrace(*command).returncode == 1
        assert out.read_bytes() == first
        assert headrace(*command, "--retry-errors").returncode == 1
        assert out.read_bytes().startswith(first)
        assert sorted(custom_ids(out)) == sorted(["again", *(f"line-{n}" for n in range(1, 11))])
        assert custom_ids(errors) == ["never"]


def test_a_resume_that_does_not_match_is_refused_with_what_differs(
    url: str, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    out = tmp_path / "o.jsonl"
    command = ("run", source, "-o", out, "--redis-url", url)
    with echo_worker(url):
        assert headrace(*command, "--max-tokens", "5").returncode == 0
        refused = headrace(*command, "--max-tokens", "6")
        assert refused.returncode == 2
        assert "max_tokens=5 then, max_tokens=6 now" in refused.stderr
        write_lines(source, [{"prompt": "b"}])
        refused = headrace(*command, "--max-tokens", "5")
        assert refused.returncode == 2 and "the input file's content" in refused.stderr
        assert text_of(read_lines(out)[0]) == "a"
        assert headrace(*command, "--restart").returncode == 0
        assert [text_of(entry) for entry in read_lines(out)] == ["b"]


def test_a_file_that_is_not_ours_is_not_touched(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    out = tmp_path / "precious.jsonl"
    out.write_text("precious\n")
    for arguments in (("-o", out), ("-o", source), ("-o", tmp_path / "no" / "folder")):
        done = headrace("run", source, *arguments, "--redis-url", url, "--local-worker")
        assert done.returncode == 2, done.stderr
    assert out.read_text() == "precious\n"
    assert read_lines(source) == [{"prompt": "a"}]


def test_a_torn_last_line_is_run_again(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(20)])
    out = tmp_path / "o.jsonl"
    command = ("run", source, "-o", out, "--redis-url", url)
    with echo_worker(url):
        assert headrace(*command).returncode == 0
        whole = out.read_bytes()
        out.write_bytes(whole[:-40])
        assert headrace(*command).returncode == 0
    assert sorted(custom_ids(out)) == sorted(f"line-{n}" for n in range(1, 21))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        ('{"prompt":"x"}'.encode("utf-16"), "unreadable"),
    ],
)
def test_unusable_input_ends_with_2_and_writes_nothing(
    tmp_path: Path, content: bytes, code: str
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "o.jsonl"
    source.write_bytes(content)
    done = headrace("run", source, "-o", out, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == code
    assert list(tmp_path.iterdir()) == [source]


def test_a_file_of_bad_lines_only_ends_with_2_and_starts_nothing(tmp_path: Path) -> None:
    """Neither a Redis nor a worker is needed to say so; the lines are quarantined all the same."""
    source = write_lines(tmp_path / "in.jsonl", ["garbage", "\x00\x01", b"\xff\xfe\xfa", "[]"])
    for _ in range(2):
        done = headrace("run", source, "-o", tmp_path / "o.jsonl", PATH="/nonexistent")
        assert done.returncode == 2, done.stderr
        errors = read_lines(tmp_path / "o.errors.jsonl")
        assert [entry["error"]["line"] for entry in errors] == [1, 2, 3, 4]


def test_redis_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    done = headrace("run", source, "-o", tmp_path / "o.jsonl", "--redis-url", "redis://127.0.0.1:1")
    assert done.returncode == 2
    assert "Redis does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_is_resumable(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(400)])
    out = tmp_path / "o.jsonl"
    command = ("run", source, "-o", out, "--redis-url", url)
    with echo_worker(url, seconds_per_claim=0.1, most=8):
        run = start_headrace(*command)
        wait_for(lambda: out.exists() and out.stat().st_size > 0, "the first lines")
        os.killpg(run.pid, signal.SIGINT)
        _, told = run.communicate()
        assert run.returncode == 130, told
        assert "run the same command again" in told
        some = len(read_lines(out))
        assert 0 < some < 400
        with redis.Redis.from_url(url) as connection:
            waiting = connection.keys("rq:job:*")
            assert len(waiting) <= 8, "what waited was taken back"
    with echo_worker(url):
        assert headrace(*command).returncode == 0
    assert sorted(custom_ids(out)) == sorted(f"line-{n}" for n in range(1, 401))


def test_killed_and_typed_again_on_a_service_every_line_is_there_once(
    url: str, tmp_path: Path
) -> None:
    """The jobs of the killed run are still in Redis: they are taken up, not sent again."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(1000)])
    out = tmp_path / "o.jsonl"
    command = ("run", source, "-o", out, "--redis-url", url)
    with echo_worker(url, seconds_per_claim=0.05, most=8), redis.Redis.from_url(url) as connection:
        for _ in range(3):
            size = out.stat().st_size if out.exists() else 0
            run = start_headrace(*command)
            wait_for(lambda size=size: out.exists() and out.stat().st_size > size, "new lines")
            run.kill()
            run.communicate()
        accepted = int(connection.hget("rq:x:n:echo", "accepted") or 0)
        assert accepted == 1000
    with echo_worker(url):
        assert headrace(*command).returncode == 0
    assert sorted(custom_ids(out)) == sorted(f"line-{n}" for n in range(1, 1001))


def test_redis_that_goes_away_in_the_middle_is_waited_for(tmp_path: Path) -> None:
    """Longer than a client's own patience; with every write synced nothing may be lost."""
    server = RedisServer(appendonly="yes", appendfsync="always")
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(300)])
    out = tmp_path / "o.jsonl"
    try:
        with echo_worker(server.url, seconds_per_claim=0.05, most=8, lease_seconds=3):
            run = start_headrace("run", source, "-o", out, "--redis-url", server.url)
            wait_for(lambda: out.exists() and out.stat().st_size > 0, "the first lines")
            server.kill()
            time.sleep(4)
            assert run.poll() is None
            before = len(read_lines(out))
            assert before < 300
            server.start()
            _, told = run.communicate()
    finally:
        server.stop()
    assert run.returncode == 0, told
    assert sorted(custom_ids(out)) == sorted(f"line-{n}" for n in range(1, 301))


def test_two_runs_cannot_share_an_output(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(50)])
    out = tmp_path / "o.jsonl"
    command = ("run", source, "-o", out, "--redis-url", url)
    with echo_worker(url, seconds_per_claim=0.2, most=1):
        first = start_headrace(*command)
        wait_for(lambda: out.exists() and out.stat().st_size > 0, "the first line")
        second = headrace(*command)
        assert second.returncode == 2 and "another run" in second.stderr
        first.send_signal(signal.SIGTERM)
        first.communicate()
    assert first.returncode == 130


def test_stdin_is_an_input(url: str, tmp_path: Path) -> None:
    with echo_worker(url):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "headrace.producer.cli", "run", "-", "-o", tmp_path / "o"],
            input=b'{"prompt": "from a pipe"}\n',
            env=environment(HEADRACE_REDIS_URL=url),
            capture_output=True,
        )
    assert done.returncode == 0, done.stderr
    assert [text_of(entry) for entry in read_lines(tmp_path / "o")] == ["from a pipe"]


def test_a_200_000_line_file_takes_less_than_300_mb(url: str, tmp_path: Path) -> None:
    """An earlier session answered 195,000 of the lines: the scan, the duplicates, what has ended
    and the last 5,000 jobs together stay in bounds. RSS is the kernel's own high-water mark."""
    source, out = tmp_path / "in.jsonl", tmp_path / "o.jsonl"
    with source.open("w") as file:
        for i in range(200_000):
            file.write(f'{{"custom_id": "request-{i}", "prompt": "{"word " * 40}{i}"}}\n')
    scanned = scan(source, LineParser())
    with Ledger(out, tmp_path / "o.errors.jsonl", Fingerprint(scanned.sha256, "echo")):
        pass
    with out.open("a") as file:
        for i in range(195_000):
            file.write(f'{{"custom_id": "request-{i}", "response": {{}}, "error": null}}\n')
    peak = 0
    with echo_worker(url):
        run = start_headrace("run", source, "-o", out, "--redis-url", url)
        while run.poll() is None:
            peak = max(peak, _peak_rss(run.pid))
            time.sleep(0.05)
        _, told = run.communicate()
    assert run.returncode == 0, told
    assert len(set(custom_ids(out))) == 200_000 == len(custom_ids(out))
    assert 20 * 2**20 < peak < 300 * 2**20


def _peak_rss(pid: int) -> int:
    """Bytes; 0 once the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) * 1024 if lines else 0
