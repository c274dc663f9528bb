"""Lost replies, full memory, restarts: nothing lost, nothing twice."""

import contextlib
import shutil
import threading
import time

import pytest
import redis
from queue_support import (
    QUEUE,
    Clock,
    balance,
    crash,
    failure,
    finish_all,
    new_client,
    new_source,
    success,
)
from redis_support import RedisServer
from tcp_proxy import TcpProxy, wait_until

from headrace.producer import Client, QueueFull, RedisUnavailable
from headrace.worker.source import FinishCode, OutcomeKind, Released, SourceUnavailable


@pytest.fixture
def proxy(redis_server: RedisServer, redis_url: str):
    proxy = TcpProxy(redis_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def own_server():
    servers = []

    def start(**settings: str) -> RedisServer:
        servers.append(RedisServer(**settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def insist(call):
    """As the worker's loop does."""
    end = time.monotonic() + 20
    while True:
        try:
            return call()
        except SourceUnavailable:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_lost_enqueue_reply_enqueues_once(redis_url: str, proxy: TcpProxy) -> None:
    client = new_client(proxy.url)
    client.submit("warm")
    proxy.lose_replies(2, to=b"EVALSHA")
    jobs = client.submit_many([f"p{i}" for i in range(10)])
    assert proxy.lost == 2
    ids = client.redis.lrange(f"rq:queue:{QUEUE}", 0, -1)
    assert len(ids) == 11
    assert {j.id.encode() for j in jobs} < set(ids)
    assert balance(client) == 0


def test_a_lost_claim_reply_gives_the_same_jobs_again_uncharged(
    redis_url: str, proxy: TcpProxy
) -> None:
    client, source = new_client(redis_url), new_source(proxy.url)
    client.submit_many([f"p{i}" for i in range(10)])
    source.claim(1, 1.0)
    proxy.lose_replies(1, to=b"EVALSHA")
    claimed = insist(lambda: source.claim(5, 1.0))
    assert proxy.lost == 1
    assert len(claimed) == 5
    assert {j.fence for j in claimed} == {1}
    assert client.redis.zcard(f"rq:x:lease:{QUEUE}") == 6
    assert client.redis.llen(f"rq:queue:{QUEUE}") == 4
    finish_all(source, source.held)
    assert balance(client) == 0
    source.unregister()


def test_a_claim_reply_lost_for_good_costs_a_lease_and_no_job(
    redis_url: str, proxy: TcpProxy
) -> None:
    client, source, other = new_client(redis_url), new_source(proxy.url), new_source(redis_url)
    sent = client.submit_many(["a", "b"])
    proxy.lose_replies(1, to=b"EVALSHA")
    proxy.refuse_after_loss = True
    with pytest.raises(SourceUnavailable):
        source.claim(2, 0.0)
    assert proxy.lost == 1
    for member in client.redis.zrange(f"rq:x:lease:{QUEUE}", 0, -1):
        client.redis.zadd(f"rq:x:lease:{QUEUE}", {member: 0})
    assert other.reap() == 2
    assert sorted(j.job_id for j in other.claim(2, 1.0)) == sorted(j.id for j in sent)
    other.unregister()


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_finish_reply_writes_one_result_and_is_ours(
    redis_url: str, proxy: TcpProxy, lost: int
) -> None:
    client, source = new_client(redis_url), new_source(proxy.url)
    jobs = client.submit_many([f"p{i}" for i in range(10)], batch="n")
    claimed = source.claim(10, 1.0)
    finish_all(source, claimed[:1])
    proxy.lose_replies(lost, to=b"EVALSHA")
    codes = insist(lambda: finish_all(source, claimed[1:]))
    assert proxy.lost == lost
    assert set(codes) == {FinishCode.OURS_EARLIER}
    assert all(client.redis.xlen(f"rq:results:{j.id}") == 1 for j in jobs)
    assert client.batch("n").succeeded == 10
    assert len(client.completed("n").items) == 10
    assert balance(client) == 0
    source.unregister()


def test_lost_replies_to_retry_release_cancel_and_reap_change_nothing_twice(
    redis_url: str, proxy: TcpProxy
) -> None:
    client, source = new_client(proxy.url), new_source(proxy.url)
    client.submit_many([f"p{i}" for i in range(6)])
    claimed = source.claim(6, 1.0)
    finish_all(source, claimed[:1])

    def losing(call):
        proxy.lose_replies(1, to=b"EVALSHA")
        return insist(call)

    losing(lambda: source.finish([failure(claimed[1], OutcomeKind.RETRY)]))
    assert client.redis.hget(f"rq:job:{claimed[1].job_id}", "att") == b"1"
    losing(lambda: source.release([Released(claimed[2])]))
    losing(lambda: client.cancel(claimed[3].job_id))
    losing(lambda: source.heartbeat())
    losing(lambda: source.checkpoint([(claimed[4], b"c")]))
    crash(source)
    losing(source.reap)
    assert client.redis.hget(f"rq:job:{claimed[4].job_id}", "crashes") == b"1"
    ids = client.redis.lrange(f"rq:queue:{QUEUE}", 0, -1)
    assert ids == [claimed[2].job_id.encode()]
    assert client.redis.hget(f"rq:x:n:{QUEUE}", "cancelled") == b"1"
    assert proxy.lost == 6
    assert balance(client) == 0
    source.unregister()


def test_when_redis_is_away_a_worker_says_so_and_loses_nothing(
    redis_url: str, proxy: TcpProxy
) -> None:
    client, source = new_client(redis_url), new_source(proxy.url)
    sent = client.submit("x")
    claimed = source.claim(1, 1.0)
    proxy.refuse = True
    proxy.cut()
    for call in (
        lambda: source.finish([success(claimed[0])]),
        lambda: source.claim(1, 0.1),
        source.heartbeat,
        source.reap,
        lambda: source.release([Released(claimed[0])]),
    ):
        with pytest.raises(SourceUnavailable):
            call()
    proxy.refuse = False
    assert insist(lambda: finish_all(source, claimed)) == [FinishCode.COMMITTED]
    assert sent.result(5).ok
    source.unregister()


def test_a_waiting_client_survives_a_cut_connection(redis_url: str, proxy: TcpProxy) -> None:
    client, source = new_client(proxy.url), new_source(redis_url)
    sent = client.submit("x")
    found = []
    thread = threading.Thread(target=lambda: found.append(sent.result(timeout=30)))
    thread.start()
    time.sleep(0.2)
    proxy.cut()
    finish_all(source, source.claim(1, 1.0))
    thread.join(20)
    assert [r.text for r in found] == ["an answer"]
    source.unregister()


def test_redis_restarted_from_its_append_only_file_loses_no_job(own_server) -> None:
    server = own_server(appendonly="yes", appendfsync="always")
    client, source = new_client(server.url), new_source(server.url)
    jobs = client.submit_many([f"p{i}" for i in range(40)], batch="n")
    claimed = source.claim(20, 1.0)
    finish_all(source, claimed[:10])
    server.kill()
    waiting = threading.Thread(target=lambda: client.submit("while it is away"))
    waiting.start()
    time.sleep(0.2)
    server.start()
    waiting.join(20)
    assert insist(lambda: finish_all(source, claimed[10:])) == [FinishCode.COMMITTED] * 10
    insist(source.heartbeat)
    while some := insist(lambda: source.claim(64, 0.2)):
        finish_all(source, some)
    assert all(client.result(j.id, 1).ok for j in jobs)
    assert balance(client) == 0
    source.unregister()


def test_a_full_redis_refuses_submitters_and_lets_workers_go_on(own_server) -> None:
    server = own_server(maxmemory="0")
    client, source = new_client(server.url), new_source(server.url)
    jobs = client.submit_many([f"p{i}" for i in range(50)], batch="n")
    first = source.claim(20, 1.0)
    with server.client() as admin:
        admin.config_set("maxmemory", 100_000)
        keys_before = admin.dbsize()
        with pytest.raises(QueueFull, match="more memory"):
            client.with_settings(memory_watermark=2.0).submit("y" * 500, job_id="refused")
        with pytest.raises(QueueFull, match="watermark"):
            new_client(server.url).submit("z")
        assert admin.dbsize() == keys_before
        assert not admin.exists("rq:job:refused")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            admin.set("proof", "the server does refuse writes")
        # Leases, results, put-backs, cancels and reaping go on.
        assert source.heartbeat() == []
        assert set(finish_all(source, first[:10])) == {FinishCode.COMMITTED}
        source.checkpoint([(first[10], b"progress")])
        source.release([Released(first[10])])
        assert client.cancel(first[11].job_id).cancelled
        assert client.cancel(jobs[40].id).cancelled
        clock = Clock(client)
        clock.drive(client, source)
        clock.advance(120)
        assert source.reap() == 8
        while some := source.claim(64, 0.2):
            assert set(finish_all(source, some)) == {FinishCode.COMMITTED}
        assert client.batch("n").done == 50
        assert balance(client) == 0
        admin.config_set("maxmemory", 0)
    client.submit("there is room again")
    source.unregister()


def test_a_redis_that_cannot_write_its_disk_is_waited_for_and_costs_no_job_a_crash(
    own_server,
) -> None:
    """As with a full disk, Redis answers and refuses every write (MISCONF)."""
    server = own_server(save="3600 100000")
    client, source = new_client(server.url, retry_for=0.3), new_source(server.url, lease=1.0)
    other = new_source(server.url)
    jobs = client.submit_many([f"p{i}" for i in range(8)])
    claimed = source.claim(6, 1.0)
    with server.client() as admin:
        shutil.rmtree(server.directory)
        admin.bgsave()
        wait_until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
        for call in (
            lambda: source.finish([success(claimed[0])]),
            lambda: source.claim(1, 0.0),
            source.heartbeat,
            source.reap,
            lambda: source.release([Released(claimed[1])]),
            lambda: source.checkpoint([(claimed[1], b"progress")]),
        ):
            with pytest.raises(SourceUnavailable, match="MISCONF"):
                call()
        with pytest.raises(RedisUnavailable, match="MISCONF"):
            client.submit("while the disk is full")
        time.sleep(2.0)
        admin.config_set("stop-writes-on-bgsave-error", "no")
    # The leases have lapsed and nobody has taken the jobs back: whoever renews keeps them.
    assert source.heartbeat() == []
    assert other.reap() == 0
    assert set(finish_all(source, claimed)) == {FinishCode.COMMITTED}
    finish_all(other, other.claim(8, 1.0))
    assert all(client.result(job.id, 1).ok for job in jobs)
    assert balance(client) == 0
    for each in (source, other):
        each.unregister()
    # It would not end by itself: it can't save.
    server.kill()


def test_a_master_with_too_few_replicas_is_waited_for(own_server) -> None:
    server = own_server(min_replicas_to_write="1")
    client = new_client(server.url, retry_for=0.3)
    with pytest.raises(RedisUnavailable, match="NOREPLICAS"):
        client.submit("x")
    with server.client() as admin:
        threading.Timer(0.3, admin.config_set, ("min-replicas-to-write", 0)).start()
        assert new_client(server.url, retry_for=20.0).submit("x").id


def test_a_script_of_others_that_never_ends_is_waited_for(own_server) -> None:
    server = own_server(lua_time_limit="100")
    client = new_client(server.url, retry_for=20.0)
    client.submit("warm")
    with server.client() as admin:

        def spin() -> None:
            with contextlib.suppress(redis.exceptions.RedisError), server.client() as other:
                other.eval("while true do end", 0)

        spinning = threading.Thread(target=spin)
        spinning.start()
        wait_until(lambda: is_busy(admin))
        with pytest.raises(RedisUnavailable, match="BUSY"):
            new_client(server.url, retry_for=0.3).submit("y")
        threading.Timer(0.3, admin.script_kill).start()
        assert client.submit("z").id
        spinning.join(20)


def is_busy(admin: redis.Redis) -> bool:
    try:
        admin.ping()
    except redis.exceptions.ResponseError as error:
        return "BUSY" in str(error)
    return False


def test_a_wrong_password_is_said_at_once(own_server) -> None:
    server = own_server(requirepass="secret")
    client = Client(f"redis://:wrong@127.0.0.1:{server.port}/0", queue=QUEUE)
    started = time.monotonic()
    with pytest.raises(RedisUnavailable, match="password"):
        client.submit("x")
    assert time.monotonic() - started < 5


def test_an_acl_user_with_our_keys_alone_can_submit_and_work(own_server) -> None:
    server = own_server()
    with server.client() as admin:
        admin.execute_command(
            "ACL",
            "SETUSER",
            "app",
            "on",
            ">pw",
            "~rq:*",
            "resetchannels",
            "&rq:*",
            "+@all",
            "-@dangerous",
            "+info",
        )
        admin.execute_command("ACL", "SETUSER", "app", "+client")
    url = f"redis://app:pw@127.0.0.1:{server.port}/0"
    client, source = new_client(url), new_source(url)
    sent = client.submit("x")
    finish_all(source, source.claim(1, 1.0))
    source.reap()
    assert sent.result(1).ok
    with pytest.raises(RedisUnavailable, match="may not"):
        client.run(_read_foreign())
    source.unregister()


def _read_foreign():
    from headrace.producer.scripts import Commands

    return (yield Commands((("GET", "other"),)))


def test_a_flushed_script_cache_is_no_error(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit("x")
    client.redis.script_flush()
    claimed = source.claim(1, 1.0)
    client.redis.script_flush()
    assert finish_all(source, claimed) == [FinishCode.COMMITTED]
    source.unregister()
