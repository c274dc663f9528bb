"""Fail-over: real Redis, a replica, three Sentinels; clients and workers find the new primary."""

import subprocess
import time
from pathlib import Path

import pytest
import redis
from queue_support import QUEUE, balance, finish_all, success
from redis_support import RedisServer, find_binary, free_port
from tcp_proxy import wait_until

from headrace.producer import Client, RedisUnavailable
from headrace.producer.sentinel import parse
from headrace.worker.lease import RedisSource
from headrace.worker.source import FinishCode, SourceUnavailable


class Sentinels:
    """Three of them watching `primary` under the name `main`, quick to act."""

    def __init__(self, primary: int, folder: Path) -> None:
        self.ports = [free_port() for _ in range(3)]
        self.processes = []
        for port in self.ports:
            config = folder / f"sentinel-{port}.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\nloglevel warning\n"
                f"sentinel monitor main 127.0.0.1 {primary} 2\n"
                "sentinel down-after-milliseconds main 500\n"
                "sentinel failover-timeout main 3000\n"
                "sentinel parallel-syncs main 1\n"
            )
            self.processes.append(
                subprocess.Popen(
                    [find_binary(), str(config), "--sentinel"],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )

    def see_each_other(self) -> bool:
        try:
            with redis.Redis(port=self.ports[0]) as sentinel:
                state = sentinel.sentinel_master("main")
            return state["num-other-sentinels"] == 2 and state["num-slaves"] == 1
        except redis.exceptions.RedisError:
            return False

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{p}" for p in self.ports) + "/main"

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def insist(call):
    end = time.monotonic() + 40
    while True:
        try:
            return call()
        except SourceUnavailable:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_fail_over_loses_no_replicated_job_and_nobody_needs_a_new_url(tmp_path: Path) -> None:
    primary, replica = RedisServer(), RedisServer()
    with replica.client() as admin:
        admin.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: admin.info("replication")["master_link_status"] == "up")
    sentinels = Sentinels(primary.port, tmp_path)
    try:
        wait_until(sentinels.see_each_other, 30)
        client = Client(sentinels.url, queue=QUEUE, retry_for=40)
        source = RedisSource.from_url(sentinels.url, [QUEUE])
        source.start()
        jobs = client.submit_many([f"p{i}" for i in range(50)])
        claimed = source.claim(20, 1.0)
        finish_all(source, claimed[:5])
        client.redis.wait(1, 5000)
        primary.kill()
        late = client.submit("sent during the fail-over")
        assert insist(lambda: finish_all(source, claimed[5:])) == [FinishCode.COMMITTED] * 15
        while some := insist(lambda: source.claim(64, 0.5)):
            insist(lambda some=some: source.finish([success(j) for j in some]))
        assert all(client.result(job.id, 5).ok for job in [*jobs, late])
        assert balance(client) == 0
        insist(source.heartbeat)
        with replica.client() as admin:
            assert admin.info("replication")["role"] == "master"
            assert admin.exists(f"rq:worker:{source.name}")
        source.unregister()
        source.close()
    finally:
        sentinels.stop()
        primary.stop()
        replica.stop()


def test_a_replica_is_waited_for_and_then_said_to_be_read_only() -> None:
    primary, replica = RedisServer(), RedisServer()
    try:
        with replica.client() as admin:
            admin.replicaof("127.0.0.1", primary.port)
            wait_until(lambda: admin.info("replication")["master_link_status"] == "up")
            client = Client(replica.url, queue=QUEUE, retry_for=0.5)
            with pytest.raises(RedisUnavailable, match="read only"):
                client.submit("x")
            client = Client(replica.url, queue=QUEUE, retry_for=20)
            admin.replicaof("NO", "ONE")
            assert client.submit("x").id
    finally:
        primary.stop()
        replica.stop()


def test_a_sentinel_url_is_read_with_logins_database_and_options() -> None:
    found = parse(
        "redis+sentinel://app:p%40ss@a:1,b,[::1]:7/main/3"
        "?ssl=1&ssl_ca_certs=/ca.pem&sentinel_username=s&sentinel_password=x%26y&client_name=me"
    )
    assert found.addresses == (("a", 1), ("b", 26379), ("::1", 7))
    assert found.service == "main"
    tls = {"ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert found.server == {
        **tls,
        "db": 3,
        "username": "app",
        "password": "p@ss",
        "client_name": "me",
    }
    assert found.sentinel == {**tls, "username": "s", "password": "x&y"}
    assert parse("rediss+sentinel://a:1/main").sentinel == {"ssl": True}


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis+sentinel://a:1", "SERVICE"),
        ("redis+sentinel:///main", "SERVICE"),
        ("redis+sentinel://a:one/main", "'one' is no port"),
        ("redis+sentinel://a:1/main/first", "'first' is no database"),
        ("redis+sentinel://a:1/main?health_check_interval=often", "health_check_interval=often"),
    ],
)
def test_a_sentinel_url_that_cannot_be_read_is_refused_by_name(url: str, told: str) -> None:
    with pytest.raises(RedisUnavailable, match=told):
        parse(url)
