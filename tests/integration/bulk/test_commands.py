"""The commands that talk to a running service."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from bulk_support import (
    HEADRACE,
    echo_worker,
    environment,
    headrace,
    read_lines,
    start_headrace,
    text_of,
    write_lines,
)

from headrace.producer import Client
from headrace.producer.commands.doctor import _given

SERVICE_COMMANDS = ["status", "submit", "results", "cancel", "explain", "dead", "validate"]


def parsed(done: "subprocess.CompletedProcess[str]") -> list[dict[str, object]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_file_goes_in_and_its_results_come_out(redis_url: str, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        [{"prompt": f"p{i}", "custom_id": f"c{i}"} for i in range(600)]
        + [{"prompt": "fail:invalid_request", "custom_id": "bad"}],
    )
    env = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_QUEUE": "echo"}
    sent = headrace("submit", source, "--json", **env)
    assert sent.returncode == 0, sent.stderr
    batch = json.loads(sent.stdout)["batch"]
    assert json.loads(sent.stdout)["requests"] == 601
    told = headrace("status", batch, "--json", **env)
    assert json.loads(told.stdout)["state"] == "running"
    early = headrace("results", batch, **env)
    assert (early.returncode, early.stdout) == (1, "")
    with echo_worker(redis_url):
        followed = headrace("results", batch, "--follow", **env)
        assert followed.returncode == 1, "one of them failed"
        entries = parsed(followed)
        assert sorted(str(e["custom_id"]) for e in entries) == sorted(
            ["bad", *(f"c{i}" for i in range(600))]
        )
        again = headrace("results", batch, "-o", tmp_path / "o.jsonl", **env)
        assert again.returncode == 1
        assert len(read_lines(tmp_path / "o.jsonl")) == 601, "nothing is consumed by reading"
    told = headrace("status", batch, **env)
    assert "completed, 601 of 601 done (600 succeeded, 1 failed" in told.stdout


def test_submitting_a_batch_again_adds_nothing_twice(redis_url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(5)])
    for _ in range(2):
        sent = headrace(
            "submit", source, "--batch", "mine", "--queue", "q", HEADRACE_REDIS_URL=redis_url
        )
        assert sent.stdout == "mine\n", sent.stderr
    with Client(redis_url) as client:
        assert client.batch("mine").total == 5


def test_another_file_under_a_batchs_id_is_refused_before_anything_is_written_over(
    redis_url: str, tmp_path: Path
) -> None:
    first = write_lines(tmp_path / "first.jsonl", [{"prompt": f"p{i}"} for i in range(5)])
    other = write_lines(tmp_path / "other.jsonl", [{"prompt": f"p{i}"} for i in range(7)])
    env = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_QUEUE": "q"}
    assert headrace("submit", first, "--batch", "mine", **env).returncode == 0
    with Client(redis_url) as client:
        before = client.batch("mine")
        refused = headrace("submit", other, "--batch", "mine", **env)
        assert refused.returncode == 2
        assert "batch mine was sent from first.jsonl with other lines" in refused.stderr
        assert "Choose another --batch for other.jsonl" in refused.stderr
        assert client.batch("mine") == before
        client.submit("p", batch="bare", queue="q")
    assert headrace("submit", other, "--batch", "bare", **env).returncode == 0


def test_submit_sends_nothing_of_a_file_with_bad_lines_unless_told(
    redis_url: str, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, "garbage"])
    env = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_QUEUE": "q"}
    refused = headrace("submit", source, **env)
    assert refused.returncode == 2 and "line 2" in refused.stderr
    with redis.Redis.from_url(redis_url) as connection:
        assert connection.keys("*job*") == []
    sent = headrace("submit", source, "--on-bad-line", "skip", "--json", **env)
    assert json.loads(sent.stdout)["requests"] == 1


def test_one_prompt_in_one_answer_out(redis_url: str) -> None:
    env = {"HEADRACE_REDIS_URL": redis_url}
    with echo_worker(redis_url):
        job = headrace("submit", "--prompt", "hello there", **env).stdout.strip()
        answer = headrace("results", job, "--follow", "--text", **env)
        assert (answer.returncode, answer.stdout) == (0, "hello there\n")
        assert headrace("status", job, **env).stdout == "succeeded\n"
        (entry,) = parsed(headrace("results", job, **env))
        assert text_of(entry) == "hello there"
        failing = headrace("submit", "--prompt", "fail:invalid_request", **env).stdout.strip()
        failed = headrace("results", failing, "--follow", **env)
        assert failed.returncode == 1
        assert '"status_code":400' in failed.stdout


def test_cancel_ends_jobs_and_batches_and_says_what_they_did(
    redis_url: str, tmp_path: Path
) -> None:
    env = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_QUEUE": "q"}
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(3)])
    headrace("submit", source, "--batch", "b", **env)
    job = headrace("submit", "--prompt", "x", **env).stdout.strip()
    done = headrace("cancel", job, "b", "--json", **env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {job: "was_queued", "b": "batch cancelled: 3 of 3 cancelled"}
    assert headrace("cancel", "nobody", **env).returncode == 1
    entries = parsed(headrace("results", "b", **env))
    assert [e["error"]["code"] for e in entries] == ["batch_cancelled"] * 3  # type: ignore[index]


def test_status_and_explain_tell_where_a_job_stands(redis_url: str) -> None:
    env = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_QUEUE": "echo"}
    jobs = [headrace("submit", "--prompt", f"p{i}", **env).stdout.strip() for i in range(2)]
    told = json.loads(headrace("explain", jobs[1], "--json", **env).stdout)
    assert (told["state"], told["position"], told["jobs_ahead"]) == ("queued", 2, 1)
    assert "no live worker" in headrace("explain", jobs[1], **env).stdout
    with echo_worker(redis_url):
        headrace("results", jobs[1], "--follow", **env)
        told = json.loads(headrace("status", "--json", **env).stdout)
        assert told["workers"][0]["model"] == "echo"
        assert told["queues"][0]["queued"] == 0
        assert "echo: 0 queued, 0 running" in headrace("status", **env).stdout
    for command in ("explain", "status", "results"):
        unknown = headrace(command, "nobody", **env)
        assert unknown.returncode == 2 and "no job nobody" in unknown.stderr


def test_doctor_says_what_to_set(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as connection:
        connection.config_set("maxmemory-policy", "allkeys-lru")
    try:
        done = headrace("doctor", "--json", HEADRACE_REDIS_URL=redis_url)
    finally:
        with redis.Redis.from_url(redis_url) as connection:
            connection.config_set("maxmemory-policy", "noeviction")
    assert done.returncode == 1, done.stderr
    checks = json.loads(done.stdout)
    said = " ".join(check["found"] for check in checks if check["state"] == "warning")
    assert "maxmemory-policy noeviction" in said and "appendonly yes" in said
    assert {"redis", "clock", "keys", "workers", "machine", "engine", "model"} <= {
        check["name"] for check in checks
    }


def test_doctor_calls_a_redis_that_is_not_there_a_problem() -> None:
    (check,) = _given("redis://:s3cret@127.0.0.1:1", repair=False)
    assert (check.name, check.state) == ("redis", "problem")
    assert "s3cret" not in check.found


@pytest.mark.parametrize("arguments", [["status"], ["submit", "--prompt", "x"], ["results", "x"]])
def test_a_password_is_never_shown(arguments: list[str]) -> None:
    url = "redis://:s3cret@127.0.0.1:1"
    process = start_headrace(*arguments, HEADRACE_REDIS_URL=url)
    try:
        out, told = process.communicate(timeout=3)
    except subprocess.TimeoutExpired:
        process.kill()
        out, told = process.communicate()
    assert "s3cret" not in out + told
    assert "Traceback" not in told


@pytest.mark.parametrize("command", SERVICE_COMMANDS)
def test_commands_on_a_service_import_no_torch_and_nothing_of_the_worker(command: str) -> None:
    """The promise of 0.4 s rests on it. Measured by what is imported, which no load disturbs."""
    look = (
        "import sys; from headrace.producer.cli import main\n"
        f"try: main(['{command}', '--help'], prog_name='headrace')\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'numpy', 'transformers', 'headrace.worker', 'headrace.engine')\n"
        "print(sorted(name for name in sys.modules if name.startswith(heavy)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", look], env=environment(), capture_output=True, text=True
    )
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


def test_every_option_of_every_command_has_its_variable() -> None:
    import click

    from headrace.producer.cli import main

    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        if command.context_settings.get("auto_envvar_prefix") == f"HEADRACE_{name.upper()}":
            continue
        commands = command.commands.values() if isinstance(command, click.Group) else [command]
        for one in commands:
            for option in one.params:
                if isinstance(option, click.Option) and option.name not in ("help", "version"):
                    variables = option.envvar
                    assert variables, f"{name} {option.name}"
                    assert str(variables).startswith("HEADRACE_")


def test_help_lists_only_what_is_installed_and_an_unknown_word_is_an_error() -> None:
    shown = headrace("--help").stdout
    for name in ("run", "validate", "submit", "worker", "exporter", "doctor", "demo"):
        assert f"\n  {name} " in shown
    assert headrace("nonsense").returncode == 2


def test_output_to_a_closed_pipe_is_no_traceback(redis_url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(300)])
    env = environment(HEADRACE_REDIS_URL=redis_url, HEADRACE_QUEUE="echo")
    with echo_worker(redis_url):
        headrace(
            "submit", source, "--batch", "b", HEADRACE_REDIS_URL=redis_url, HEADRACE_QUEUE="echo"
        )
        process = subprocess.Popen(
            [*HEADRACE, "results", "b", "--follow"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read()
        process.wait()
    assert b"Traceback" not in told
