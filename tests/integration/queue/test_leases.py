"""Claims, leases, fences, retries, crashes: who may write a job's one result."""

import random
import threading
import time

import pytest
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
from tcp_proxy import wait_until

from headrace.producer import JobFailed, JobState, dead
from headrace.producer.scripts import Script
from headrace.worker.lease_settings import LeaseSettings, backoff
from headrace.worker.source import FinishCode, OutcomeKind, Released


def test_a_claim_leases_in_order_and_no_more_than_asked(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many([f"p{i}" for i in range(200)])
    first = source.claim(3, 1.0)
    assert [j.job_id for j in first] == [j.id for j in jobs[:3]]
    assert len(source.claim(1000, 1.0)) == 128
    assert len({j.execution_id for j in source.held}) == 131
    assert client.redis.zcard(f"rq:x:lease:{QUEUE}") == 131
    assert client.redis.zcard(f"rq:wip:{QUEUE}") == 131
    assert balance(client) == 0
    source.unregister()


def test_a_claim_is_bounded_in_bytes_and_keeps_the_order(redis_url: str) -> None:
    """128 jobs of 16 MB would be a 2 GB reply; the bound is set low here."""
    client, source = new_client(redis_url), new_source(redis_url)
    script = source._scripts["claim"]
    text = script.text.replace("local ENOUGH = 8 * 1024 * 1024", "local ENOUGH = 10000")
    assert text != script.text
    source._scripts["claim"] = Script.from_text("claim", text)
    noise = random.Random(1)
    jobs = client.submit_many([noise.randbytes(3000).hex() for _ in range(12)])
    seen = []
    while len(seen) < 12:
        some = source.claim(128, 1.0)
        assert 1 <= len(some) <= 4
        seen += [j.job_id for j in some]
        finish_all(source, some)
    assert seen == [j.id for j in jobs]
    assert balance(client) == 0
    source.unregister()


def test_an_idle_claim_wakes_as_soon_as_a_job_comes(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    came = []
    thread = threading.Thread(target=lambda: came.extend(source.claim(1, 30.0)))
    thread.start()
    time.sleep(0.3)
    before = client.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    time.sleep(0.4)
    assert client.redis.info("commandstats")["cmdstat_evalsha"]["calls"] - before <= 3
    sent = client.submit("x")
    thread.join(10)
    assert [j.job_id for j in came] == [sent.id]
    assert client.redis.llen(f"rq:queue:{QUEUE}") == 0
    source.unregister()


def test_an_idle_claim_of_several_queues_polls_and_finds_a_job_in_any(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url, "a", "b")
    came = []
    thread = threading.Thread(target=lambda: came.extend(source.claim(1, 30.0)))
    thread.start()
    time.sleep(0.2)
    sent = client.submit("x", queue="b")
    thread.join(10)
    assert [(j.job_id, j.queue) for j in came] == [(sent.id, "b")]
    source.unregister()


def test_the_same_nonce_gives_the_same_jobs(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many(["a", "b", "c"])
    first = source.claim(2, 1.0)
    source._sequence -= 1
    assert source.claim(2, 1.0) == first
    assert [j.fence for j in first] == [1, 1]
    assert len(source.claim(2, 1.0)) == 1
    source.unregister()


def test_a_zombies_late_result_is_refused_and_counted(redis_url: str) -> None:
    client = new_client(redis_url)
    zombie, other = new_source(redis_url), new_source(redis_url)
    jobs = client.submit_many([f"p{i}" for i in range(20)])
    stale = zombie.claim(20, 1.0)
    crash(zombie)
    assert other.reap() == 20
    taken = []
    while len(taken) < 20:
        some = other.claim(20, 1.0)
        assert len(some) <= 8
        other.finish([success(j, "the second worker's") for j in some])
        taken += some
    assert zombie.heartbeat() == stale
    codes = zombie.finish([success(j, "the zombie's") for j in stale])
    assert codes == [FinishCode.FENCED] * 20
    assert {client.result(j.id, 1).text for j in jobs} == {"the second worker's"}
    assert all(client.redis.xlen(f"rq:results:{j.id}") == 1 for j in jobs)
    assert client.redis.hget(f"rq:x:n:{QUEUE}", "fenced") == b"20"
    assert [j.fence for j in taken] == [2] * 20
    assert balance(client) == 0
    zombie.unregister()
    other.unregister()


def test_a_zombies_result_is_refused_while_the_second_delivery_still_runs(redis_url: str) -> None:
    client = new_client(redis_url)
    zombie, other = new_source(redis_url), new_source(redis_url)
    sent = client.submit("x")
    stale = zombie.claim(1, 1.0)
    crash(zombie)
    other.reap()
    assert zombie.finish([success(stale[0])]) == [FinishCode.FENCED]
    current = other.claim(1, 1.0)
    assert zombie.finish([success(stale[0])]) == [FinishCode.FENCED]
    zombie.release([Released(stale[0], b"stale")])
    zombie.checkpoint([(stale[0], b"stale")])
    assert client.redis.hget(f"rq:job:{sent.id}", "ckpt") is None
    assert finish_all(other, current) == [FinishCode.COMMITTED]
    zombie.unregister()
    other.unregister()


def test_a_lapsed_lease_that_nobody_took_may_still_be_finished(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit("x")
    claimed = source.claim(1, 1.0)
    crash(source)
    assert finish_all(source, claimed) == [FinishCode.COMMITTED]
    source.unregister()


def test_leases_lapse_by_redis_clock_and_a_heartbeat_keeps_them(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url, lease=60.0)
    clock = Clock(client)
    clock.drive(client, source)
    client.submit("x")
    source.claim(1, 0.0)
    clock.advance(45)
    assert source.heartbeat() == []
    clock.advance(45)
    assert source.reap() == 0
    clock.advance(30)
    assert source.reap() == 1
    source.unregister()


def test_a_released_job_is_first_in_line_uncharged_and_keeps_its_checkpoint(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many(["a", "b", "c", "d"])
    claimed = source.claim(3, 1.0)
    source.release([Released(claimed[0], b"\x00progress"), Released(claimed[1])])
    source.release([Released(claimed[2], to_front=False)])
    again = source.claim(4, 1.0)
    assert [j.job_id for j in again] == [jobs[i].id for i in (0, 1, 3, 2)]
    assert again[0].checkpoint == b"\x00progress"
    assert [(j.attempts, j.crashes) for j in again] == [(0, 0)] * 4
    assert client.redis.hget(f"rq:x:n:{QUEUE}", "resumed") == b"1"
    assert client.redis.hget(f"rq:x:n:{QUEUE}", "released") == b"3"
    finish_all(source, again)
    assert client.redis.hexists(f"rq:job:{jobs[0].id}", "ckpt") is False
    assert balance(client) == 0
    source.unregister()


def test_a_checkpoint_survives_a_crash(redis_url: str) -> None:
    client = new_client(redis_url)
    first, second = new_source(redis_url), new_source(redis_url)
    client.submit("x")
    (claimed,) = first.claim(1, 1.0)
    first.checkpoint([(claimed, b"half"), (claimed, b"more")])
    crash(first)
    second.reap()
    (again,) = second.claim(1, 1.0)
    assert (again.checkpoint, again.crashes, again.fence) == (b"more", 1, 2)
    first.unregister()
    second.unregister()


def test_engine_errors_are_retried_with_growing_pauses_and_then_dead(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    clock = Clock(client)
    clock.drive(client, source)
    sent = client.submit("x")
    codes, delays = [], []
    for attempt in range(3):
        (claimed,) = source.claim(1, 0.0)
        assert claimed.attempts == attempt
        codes += source.finish([failure(claimed, OutcomeKind.RETRY, f"boom{attempt}")])
        due = client.redis.zscore(f"rq:scheduled:{QUEUE}", sent.id)
        if due is not None:
            delays.append(due - clock.now)
            assert source.claim(1, 0.0) == []
            clock.advance(due - clock.now + 0.001)
    assert codes == [FinishCode.RETRIED, FinishCode.RETRIED, FinishCode.DEAD]
    assert 0.5 <= delays[0] <= 1.001
    assert 1.0 <= delays[1] <= 2.001
    with pytest.raises(JobFailed, match="boom2"):
        sent.result(timeout=1)
    (found,) = client.run(dead.list_dead(QUEUE))
    assert [event["code"] for event in found.history] == ["boom0", "boom1", "boom2"]
    assert (found.job_id, found.attempts) == (sent.id, 3)
    assert balance(client) == 0
    source.unregister()


def test_back_off_doubles_up_to_its_limit_with_jitter() -> None:
    settings = LeaseSettings(backoff_first=1.0, backoff_most=60.0)
    for failed, most in [(1, 1), (2, 2), (3, 4), (7, 60), (50, 60)]:
        values = [backoff(settings, failed) for _ in range(200)]
        assert most * 0.5 <= min(values) < max(values) <= most
        assert max(values) - min(values) > most * 0.3


def test_max_attempts_of_a_job_goes_before_the_workers(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit("x", max_attempts=1)
    (claimed,) = source.claim(1, 1.0)
    assert source.finish([failure(claimed, OutcomeKind.RETRY)]) == [FinishCode.DEAD]
    source.unregister()


def test_a_job_that_crashed_once_keeps_company_of_at_most_eight_suspects(redis_url: str) -> None:
    client = new_client(redis_url)
    first, second = new_source(redis_url), new_source(redis_url)
    client.submit_many([f"p{i}" for i in range(30)])
    first.claim(20, 1.0)
    crash(first)
    second.reap()
    company = second.claim(64, 1.0)
    assert len(company) == 8
    assert {j.crashes for j in company} == {1}
    # Nobody else joins them, suspect or not.
    assert second.claim(64, 0.05) == []
    finish_all(second, company)
    assert len(second.claim(64, 1.0)) == 8
    first.unregister()
    second.unregister()


def test_a_job_that_crashed_twice_runs_alone_and_a_finish_clears_it(redis_url: str) -> None:
    client = new_client(redis_url)
    sent = client.submit_many(["a", "b", "c"])
    for _ in range(2):
        source = new_source(redis_url)
        source.reap()
        got = source.claim(3, 1.0)
        crash(source)
    source = new_source(redis_url)
    source.reap()
    for _ in range(3):
        (alone,) = source.claim(64, 1.0)
        assert alone.crashes == 2
        assert finish_all(source, [alone]) == [FinishCode.COMMITTED]
    assert client.redis.hexists(f"rq:job:{sent[0].id}", "crashes") is False
    assert len(got) == 3
    assert balance(client) == 0
    source.unregister()


def test_two_lost_workers_kill_nobody_and_a_third_makes_the_culprit_dead(redis_url: str) -> None:
    client = new_client(redis_url)
    poison = client.submit("poison", job_id="poison")
    good = client.submit_many([f"g{i}" for i in range(20)])
    lost_workers = 0
    done: set[str] = set()
    while len(done) < 20:
        source = new_source(redis_url)
        source.reap()
        while True:
            jobs = source.claim(64, 0.05)
            if any(j.job_id == "poison" for j in jobs):
                crash(source)
                lost_workers += 1
                break
            if not jobs:
                break
            assert set(finish_all(source, jobs)) == {FinishCode.COMMITTED}
            done |= {j.job_id for j in jobs}
    source = new_source(redis_url)
    source.reap()
    assert lost_workers == 3
    assert all(client.result(j.id, 1).ok for j in good)
    with pytest.raises(JobFailed, match="worker_lost"):
        poison.result(timeout=1)
    (found,) = client.run(dead.list_dead(QUEUE))
    assert (found.job_id, found.crashes) == ("poison", 3)
    assert [event["event"] for event in found.history] == ["worker lost"] * 3
    assert balance(client) == 0


def test_a_busy_worker_empties_itself_for_a_suspect_and_the_other_goes_on(redis_url: str) -> None:
    client = new_client(redis_url)
    victim, a, b = new_source(redis_url), new_source(redis_url), new_source(redis_url)
    suspect = client.submit("suspect")
    victim.claim(1, 1.0)
    client.submit_many([f"p{i}" for i in range(20)])
    of_a, of_b = a.claim(4, 1.0), b.claim(4, 1.0)
    crash(victim)
    b.reap()
    assert a.claim(4, 0.05) == []
    assert len(b.claim(4, 1.0)) == 4
    finish_all(a, of_a[:2])
    assert a.claim(4, 0.05) == []
    finish_all(a, of_a[2:])
    assert [j.job_id for j in a.claim(4, 1.0)] == [suspect.id]
    finish_all(a, a.held)
    assert len(a.claim(4, 1.0)) == 4
    assert len(of_b) == 4
    for source in (victim, a, b):
        source.unregister()


def test_a_dead_job_can_be_given_another_start_or_dropped(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many(["a", "b"], max_attempts=1, batch="n")
    source.finish([failure(j, OutcomeKind.RETRY) for j in source.claim(2, 1.0)])
    assert client.run(dead.queues_with_dead()) == [(QUEUE, 2)]
    assert client.batch("n").dead == 2
    assert client.run(dead.requeue([jobs[0].id, "nobody"], client.settings)) == [jobs[0].id]
    assert client.batch("n").done == 1
    (claimed,) = source.claim(2, 1.0)
    assert (claimed.job_id, claimed.attempts) == (jobs[0].id, 0)
    finish_all(source, [claimed])
    assert client.result(jobs[0].id, 1).ok
    assert client.redis.xlen(f"rq:results:{jobs[0].id}") == 1
    assert client.run(dead.drop([jobs[1].id], client.settings)) == 1
    assert client.run(dead.list_dead(QUEUE)) == []
    assert client.redis.keys(f"*{jobs[1].id}*") == []
    assert balance(client) == 0
    source.unregister()


def test_dead_workers_leave_rqs_books(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.redis.sadd("rq:workers", "rq:worker:gone")
    client.redis.sadd(f"rq:workers:{QUEUE}", "rq:worker:gone")
    source.reap()
    assert client.redis.smembers("rq:workers") == {f"rq:worker:{source.name}".encode()}
    assert client.redis.smembers(f"rq:workers:{QUEUE}") == {f"rq:worker:{source.name}".encode()}
    source.unregister()


def test_a_worker_that_was_forgotten_enters_the_books_again(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.redis.delete(f"rq:worker:{source.name}")
    client.redis.srem("rq:workers", f"rq:worker:{source.name}")
    source.heartbeat()
    assert client.redis.exists(f"rq:worker:{source.name}")
    assert client.redis.sismember("rq:workers", f"rq:worker:{source.name}")
    source.unregister()


def test_a_payload_that_is_no_job_of_ours_fails_alone(redis_url: str) -> None:
    import pickle

    client, source = new_client(redis_url), new_source(redis_url)
    good = client.submit("good")
    for job_id, data in [
        ("pickle", pickle.dumps(("os.system", None, ("id",), {}))),
        ("garbage", b"\x00\x01"),
        ("empty", b""),
    ]:
        client.redis.hset(
            f"rq:job:{job_id}", mapping={"status": "queued", "origin": QUEUE, "data": data}
        )
        client.redis.rpush(f"rq:queue:{QUEUE}", job_id)
    client.redis.hset("rq:job:nodata", mapping={"status": "queued", "origin": "e v\nil:x"})
    client.redis.set("rq:job:string", "not a hash")
    client.redis.rpush(f"rq:queue:{QUEUE}", "nodata", "string", "missing", "we:ird", "", "ü")
    claimed = source.claim(64, 0.2)
    assert [j.job_id for j in claimed] == [good.id]
    results = client.results(["pickle", "garbage", "empty", "nodata"])
    assert {r.failure.code for r in results.values()} == {"invalid_payload"}
    assert len(results) == 4
    assert client.redis.llen(f"rq:queue:{QUEUE}") == 0
    source.unregister()


def test_records_whose_time_has_passed_are_counted_as_removed(redis_url: str) -> None:
    client, source = new_client(redis_url, result_ttl=1), new_source(redis_url)
    client.submit_many(["a", "b"])
    finish_all(source, source.claim(2, 1.0))
    wait_until(lambda: client.redis.keys("rq:job:*") == [])
    assert client.redis.zcard(f"rq:finished:{QUEUE}") == 2
    assert balance(client) == 0
    wait_until(lambda: source.reap() or client.redis.zcard(f"rq:finished:{QUEUE}") == 0)
    assert client.redis.hget(f"rq:x:n:{QUEUE}", "removed") == b"2"
    assert balance(client) == 0
    source.unregister()


def test_outstanding_tokens_and_bytes_return_to_nothing(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    client.submit_many([f"prompt number {i}" for i in range(10)], max_tokens=50)
    counts = client.redis.hgetall(f"rq:x:n:{QUEUE}")
    assert int(counts[b"output_tokens"]) == 500
    assert int(counts[b"prompt_tokens"]) > 50
    claimed = source.claim(10, 1.0)
    source.finish([success(j) for j in claimed[:4]])
    source.finish([failure(j) for j in claimed[4:6]])
    client.cancel_many([j.job_id for j in claimed[6:8]])
    source.release([Released(j) for j in claimed[8:]])
    client.cancel_many([j.job_id for j in claimed[8:]])
    counts = client.redis.hgetall(f"rq:x:n:{QUEUE}")
    assert (counts[b"output_tokens"], counts[b"prompt_tokens"], counts[b"bytes"]) == (b"0",) * 3
    assert (counts[b"done_prompt"], counts[b"done_output"]) == (b"20", b"28")
    source.unregister()


def test_an_outcome_given_twice_in_one_call_writes_one_result(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("x", batch="n")
    (claimed,) = source.claim(1, 1.0)
    codes = source.finish([success(claimed), success(claimed, "again"), failure(claimed)])
    assert codes == [FinishCode.COMMITTED, FinishCode.OURS_EARLIER, FinishCode.OURS_EARLIER]
    assert client.redis.xlen(f"rq:results:{sent.id}") == 1
    assert client.batch("n").done == 1
    assert balance(client) == 0
    source.unregister()


def test_a_finished_jobs_state_survives_a_second_look(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    sent = client.submit("x")
    (claimed,) = source.claim(1, 1.0)
    assert source.finish([success(claimed)]) == [FinishCode.COMMITTED]
    assert source.finish([success(claimed, "again")]) == [FinishCode.OURS_EARLIER]
    assert sent.result(1).text == "an answer"
    assert sent.status() is JobState.SUCCEEDED
    source.unregister()
