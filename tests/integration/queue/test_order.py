"""Who is served first: priorities with ageing, tenants by tokens, deadlines."""

import time

from queue_support import QUEUE, Clock, balance, finish_all, new_client, new_source
from tcp_proxy import wait_until


def order(source, count: int) -> list[str]:
    """Job ids as one slot after the other becomes free."""
    ids = []
    while len(ids) < count:
        jobs = source.claim(1, 1.0)
        finish_all(source, jobs)
        ids += [j.job_id for j in jobs]
    return ids


def test_high_goes_before_normal_before_low(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    for priority in ("low", "normal", "high"):
        for i in range(3):
            client.submit(f"{priority}{i}", job_id=f"{priority}{i}", priority=priority)
    expected = [f"{p}{i}" for p in ("high", "normal", "low") for i in range(3)]
    assert order(source, 9) == expected
    source.unregister()


def test_one_claim_takes_from_several_classes(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit("n", job_id="n")
    client.submit("h", job_id="h", priority="high")
    assert [j.job_id for j in source.claim(5, 1.0)] == ["h", "n"]
    source.unregister()


def test_a_low_job_that_waited_long_enough_goes_first(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url, ageing=300.0)
    clock = Clock(client)
    clock.drive(client, source)
    client.submit("old", job_id="old", priority="low")
    clock.advance(301)
    client.submit("n", job_id="n")
    client.submit("h", job_id="h", priority="high")
    assert [j.job_id for j in source.claim(1, 0.0)] == ["h"]
    # One class up after 300 s: level with normal, and older.
    assert [j.job_id for j in source.claim(1, 0.0)] == ["old"]
    client.submit("old2", job_id="old2", priority="low")
    clock.advance(700)
    client.submit("h2", job_id="h2", priority="high")
    # Two classes up after 600 s: level with high, and older. So was n by then.
    assert {j.job_id for j in source.claim(2, 0.0)} == {"n", "old2"}
    source.unregister()


def test_tenants_share_by_tokens_not_by_jobs(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    for i in range(40):
        client.submit("x", job_id=f"big{i}", tenant="big", max_tokens=900)
    for i in range(40):
        client.submit("x", job_id=f"small{i}", tenant="small", max_tokens=100)
    first = order(source, 30)
    tokens = {"big": 0, "small": 0}
    for job_id in first:
        tenant = job_id.rstrip("0123456789")
        tokens[tenant] += 900 if tenant == "big" else 100
    assert abs(tokens["big"] - tokens["small"]) <= 1000
    source.unregister()


def test_a_flood_of_one_tenant_does_not_delay_another(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many(["x"] * 200, tenant="flood", max_tokens=10)
    client.submit("x", job_id="single", tenant="quiet", max_tokens=10)
    client.submit("x", job_id="untenanted", max_tokens=10)
    assert {"single", "untenanted"} <= set(order(source, 4))
    source.unregister()


def test_idling_saves_no_credit_and_debts_are_kept(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many(["x"] * 20, tenant="a", max_tokens=100)
    client.submit_many(["x"] * 5, tenant="late", max_tokens=100, start_at=time.time() + 3600)
    order(source, 10)
    client.submit_many(["x"] * 20, tenant="b", max_tokens=100)
    ids_of_b = {j.decode() for j in client.redis.lrange(f"rq:queue:{QUEUE}@b", 0, -1)}
    next_ten = order(source, 10)
    # b starts level with a, not with a's 1,000 tokens of credit.
    assert 4 <= len(ids_of_b & set(next_ten)) <= 6
    source.unregister()


def test_tenants_without_work_are_dropped_and_their_registries_still_age_out(
    redis_url: str,
) -> None:
    client, source = new_client(redis_url, result_ttl=1), new_source(redis_url)
    client.submit_many(["x"] * 3, tenant="a", priority="low")
    finish_all(source, source.claim(3, 1.0))
    source.reap()
    assert client.redis.zcard(f"rq:x:tenants:{QUEUE}") == 0
    name = f"rq:finished:{QUEUE}.low@a"
    wait_until(lambda: source.reap() or client.redis.zcard(name) == 0)
    assert balance(client) == 0
    source.unregister()


def test_a_job_whose_deadline_is_near_passes_the_others_and_leaves_a_counted_ghost(
    redis_url: str,
) -> None:
    client, source = new_client(redis_url), new_source(redis_url, deadline_horizon=30.0)
    client.submit_many([f"p{i}" for i in range(50)])
    urgent = client.submit("urgent", deadline=time.time() + 10)
    relaxed = client.submit("relaxed", deadline=time.time() + 1000)
    claimed = source.claim(2, 1.0)
    assert claimed[0].job_id == urgent.id
    assert claimed[0].deadline is not None
    assert client.redis.hget("rq:x:ghost", QUEUE) == b"1"
    assert balance(client) == 0
    finish_all(source, claimed)
    rest = order(source, 50)
    assert rest[-1] == relaxed.id
    assert int(client.redis.hget("rq:x:ghost", QUEUE) or 0) == 0
    assert client.redis.ttl(f"rq:job:{urgent.id}") > 0
    assert balance(client) == 0
    source.unregister()


def test_a_running_job_that_crashes_keeps_its_deadline(redis_url: str) -> None:
    from queue_support import crash

    client, source = new_client(redis_url), new_source(redis_url)
    clock = Clock(client)
    clock.drive(client, source)
    sent = client.submit("x", deadline=clock.now + 100)
    source.claim(1, 0.0)
    crash(source)
    source.reap()
    clock.advance(101)
    source.reap()
    assert client.results([sent.id])[sent.id].failure.code == "expired"
    assert balance(client) == 0
    source.unregister()


def test_conservation_holds_over_lists_of_all_classes_and_tenants(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    for tenant in (None, "a", "b"):
        for priority in ("high", "normal", "low"):
            client.submit_many(["x"] * 4, tenant=tenant, priority=priority)
    assert balance(client) == 0
    jobs = source.claim(20, 1.0)
    assert balance(client) == 0
    finish_all(source, jobs[:10])
    client.cancel_many([j.job_id for j in jobs[10:15]])
    assert balance(client) == 0
    source.unregister()
