"""deploy/redis/users.conf: with these rights and no others everything works, and none is to spare.

A real server reads the file; clients, the command line, a worker process and the exporter log in as
its users. Redis' own log of refusals (ACL LOG) must stay empty, its command statistics tell which
rights were used.
"""

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rq
from click.testing import CliRunner
from redis_support import RedisServer
from serving import WorkerProcess, wait_until

from headrace.producer import Client, cli, dead, health
from headrace.producer.errors import RedisUnavailable, ResultTimeout
from headrace.producer.redis_info import inspect_server
from headrace.worker.depth import DepthReader

ROOT = Path(__file__).resolve().parents[3]
USERS = ROOT / "deploy/redis/users.conf"
PASSWORD = "of-your-own"

LIBRARY = "producer/lua/lib.lua"
SCRIPTS = {
    "producer": ("enqueue", "cancel", "forget", "collect"),
    "worker": ("claim", "heartbeat", "finish", "release", "reap", "checkpoint", "cancel"),
    "exporter": ("depth",),
    "operator": ("enqueue", "cancel", "forget", "collect", "census", "repair", "requeue"),
}
SELDOM = {"ping", "select", "unwatch", "discard"}
"""A connection that was idle, another database, a dependent that changed meanwhile."""


def granted() -> dict[str, set[str]]:
    """User -> commands, as the file says."""
    users = {}
    for line in USERS.read_text().splitlines():
        if line.startswith("user "):
            _, name, *rules = line.split()
            users[name] = {rule[1:] for rule in rules if rule.startswith("+")}
    return users


def commands_of(script: str) -> set[str]:
    """What a script may call; the library's part is the same for all that write."""
    found = set()
    for folder in ("producer", "worker"):
        path = ROOT / folder / "lua" / f"{script}.lua"
        if path.exists():
            text = re.sub(r"--.*", "", path.read_text())
            found |= {name.lower() for name in re.findall(r"call\(\s*'([A-Z]+)'", text)}
    return found


def in_scripts(user: str) -> set[str]:
    library = {"time"} if user == "exporter" else commands_of("lib") | {"lpush", "rpush"}
    return library.union(*(commands_of(script) for script in SCRIPTS[user]))


@pytest.mark.parametrize("user", SCRIPTS)
def test_every_command_of_a_users_scripts_is_granted(user: str) -> None:
    assert in_scripts(user) <= granted()[user]
    rules = USERS.read_text()
    assert "+@" not in rules, "commands, not categories that grow with the next Redis"
    assert "allkeys" not in rules
    assert "~*" not in rules


class Users:
    """A server with the file's users, and who used what."""

    def __init__(self, folder: Path) -> None:
        file = folder / "users.conf"
        file.write_text(USERS.read_text().replace("CHANGE-ME", PASSWORD))
        self.server = RedisServer(include=str(file), appendonly="yes")
        self.admin = self.server.client()
        self.admin.config_resetstat()
        self.admin.execute_command("ACL", "LOG", "RESET")

    def url(self, user: str) -> str:
        return f"redis://{user}:{PASSWORD}@127.0.0.1:{self.server.port}/0"

    def refusals(self) -> list[str]:
        """But for what is asked and done without: settings that would save memory, and what
        redis-py tells newer servers about itself."""
        return [
            f"{entry['username']}: {entry['object']}"
            for entry in self.admin.acl_log()
            if not entry["object"].startswith(("client", "config"))
        ]

    def used(self) -> set[str]:
        """Commands that ran since the last look."""
        found = {name.removeprefix("cmdstat_") for name in self.admin.info("commandstats")}
        self.admin.config_resetstat()
        return found


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Users]:
    users = Users(tmp_path)
    yield users
    users.admin.close()
    users.server.stop()


def test_all_of_it_runs_with_these_rights_and_none_is_to_spare(
    users: Users, model: Path, tmp_path: Path
) -> None:
    used: dict[str, set[str]] = {}
    worker = WorkerProcess(
        users.url("worker"),
        model,
        tmp_path / "worker.log",
        *("--lease-seconds", "4", "--checkpoint-every", "16"),
    )
    try:
        worker.wait_ready()
        client = Client(users.url("producer"), queue="tiny")
        work(client)
        # RQ's dependents go through the outbox; who enqueues them so is no user of the file.
        queue = rq.Queue("tiny", connection=users.server.client(), serializer="json")
        function = "headrace.worker.jobs.generate"
        first = queue.enqueue(function, {"prompt": [1], "max_tokens": 2})
        second = queue.enqueue(function, {"prompt": [1], "max_tokens": 2}, depends_on=first)
        assert client.result(second.id, 60).ok
        worker.signal(signal.SIGTERM)
        assert worker.exit_status() == 0, worker.log.read_text()
    finally:
        worker.end()
    used["worker"] = users.used()
    read(client)
    used["producer"] = users.used()
    reader = DepthReader(users.url("exporter"))
    users.admin.script_flush()
    assert reader.read().queues["tiny"].finished
    used["exporter"] = users.used()
    operate(users)
    used["operator"] = users.used() | used["producer"]
    assert users.refusals() == ["producer: zrevrange"], "the one that was asked for"
    for user, commands in granted().items():
        spare = commands - used[user] - in_scripts(user) - SELDOM
        assert not spare, f"{user} never needs {spare}"


def work(client: Client) -> None:
    """Everything that a worker and a client do with each other."""
    client.create_batch("b", {"made": "by a test"})
    jobs = client.submit_many(
        [{"prompt": [i, 1]} for i in range(4)], batch="b", max_tokens=40, ignore_eos=True
    )
    tenants = client.submit_many(["x", "y"], tenant="one", priority="high", max_tokens=2)
    assert all(job.result(60) for job in [*jobs, *tenants])
    long = client.submit("long", max_tokens=2000, ignore_eos=True)
    wait_until(lambda: long.status().value == "running", "it runs")
    assert client.cancel(long.id).cancelled
    assert [worker.state for worker in client.workers()] == ["ready"]
    # With an idle worker, so that the blocking peek has been seen.
    assert client.completed("b").cursor == 4


def read(client: Client) -> None:
    """What else a producer may ask, with nobody there to answer."""
    ids = [job_id for job_id, _ in client.completed("b", trim=True).items]
    assert len(client.results(ids)) == 4
    client.submit_many(["a", "b"], batch="c")
    waiting = client.submit("later", start_at=time.time() + 600)
    assert client.explain(waiting.id).reason
    assert client.explain(client.submit("behind").id).reason
    assert client.cancel(waiting.id).cancelled
    assert client.cancel_batch("c").state == "cancelled"
    assert client.batch("b").done == 4
    assert client.forget(ids) == 4
    with pytest.raises(ResultTimeout):
        client.result(client.submit("nobody is there").id, timeout=0.1)
    with pytest.raises(RedisUnavailable, match="may not"):
        client.run(dead.list_dead("tiny"))


def operate(users: Users) -> None:
    with Client(users.url("operator"), queue="tiny") as client:
        assert client.run(dead.list_dead("tiny")) == []
        assert client.run(health.census("tiny", client.settings)).balance == 0
        assert inspect_server(client.redis).usable
        client.run(health.repair(client.run(health.examine()), client.settings))
        job_id = client.submit("x").id
    for command in (["status"], ["dead", "list"], ["explain", job_id]):
        ran = CliRunner().invoke(cli.main, [*command, "--redis-url", users.url("operator")])
        assert ran.exit_code == 0, ran.output
