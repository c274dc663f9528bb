"""doctor's key sanity: finds what contradicts itself, repairs it beside working workers."""

import threading
import time

from queue_support import QUEUE, balance, finish_all, new_client, new_source

from headrace.producer import health


def kinds(client) -> list[str]:
    return sorted(f.kind for f in client.run(health.examine()))


def repair(client) -> list[str]:
    findings = client.run(health.examine())
    return sorted(f.kind for f in client.run(health.repair(findings, client.settings)))


def test_a_sound_queue_has_no_findings(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    jobs = client.submit_many([f"p{i}" for i in range(20)], tenant="t")
    client.submit("later", start_at=time.time() + 100)
    source.claim(5, 1.0)
    client.cancel(jobs[10].id)
    finish_all(source, source.held[:2])
    assert kinds(client) == []
    source.unregister()


def test_each_contradiction_is_found_and_put_right(redis_url: str) -> None:
    client, source = new_client(redis_url), new_source(redis_url)
    r = client.redis
    jobs = client.submit_many([f"p{i}" for i in range(8)])
    claimed = source.claim(4, 1.0)
    # A queued job in no list; a started one nowhere; a scheduled one in no registry.
    r.lrem(f"rq:queue:{QUEUE}", 1, jobs[5].id)
    r.zrem(f"rq:x:lease:{QUEUE}", f"{claimed[0].job_id}:{claimed[0].execution_id}")
    r.zrem(f"rq:wip:{QUEUE}", f"{claimed[0].job_id}:{claimed[0].execution_id}")
    later = client.submit("later", start_at=time.time() + 100)
    r.zrem(f"rq:scheduled:{QUEUE}", later.id)
    # A running entry without its lease; a lease of a job that is gone; a wrong count.
    r.zrem(f"rq:x:lease:{QUEUE}", f"{claimed[1].job_id}:{claimed[1].execution_id}")
    r.delete(f"rq:job:{claimed[2].job_id}")
    r.zrem(f"rq:wip:{QUEUE}", f"{claimed[2].job_id}:{claimed[2].execution_id}")
    r.hset("rq:x:ghost", QUEUE, 7)
    assert balance(client) != 0
    assert kinds(client) == ["ghosts", "nowhere", "nowhere", "nowhere", "stray_lease", "stray_run"]
    assert repair(client) == ["ghosts", "nowhere", "nowhere", "nowhere", "stray_lease", "stray_run"]
    # The run without a lease is now a started job in no place.
    assert repair(client) == ["nowhere"]
    assert kinds(client) == []
    assert balance(client) == 0
    source.heartbeat()
    done = set()
    while some := source.claim(64, 1.5):
        finish_all(source, some)
        done |= {j.job_id for j in some}
    finish_all(source, source.held)
    assert balance(client) == 0
    source.unregister()


def test_examining_and_repairing_beside_busy_workers_changes_nothing(redis_url: str) -> None:
    client = new_client(redis_url)
    stop = threading.Event()
    jobs = []

    def work() -> None:
        source = new_source(redis_url)
        while not stop.is_set():
            finish_all(source, source.claim(16, 0.05))
        source.unregister()

    def produce() -> None:
        mine = new_client(redis_url)
        while not stop.is_set():
            jobs.extend(mine.submit_many([f"p{len(jobs)}"] * 20))
            if len(jobs) % 100 == 0:
                mine.cancel(jobs[-1].id)

    threads = [threading.Thread(target=target) for target in (work, work, produce)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        findings = client.run(health.examine())
        assert client.run(health.repair(findings, client.settings)) == []
        assert balance(client) == 0
    stop.set()
    for thread in threads:
        thread.join()
    source = new_source(redis_url)
    while some := source.claim(128, 0.2):
        finish_all(source, some)
    assert all(client.redis.xlen(f"rq:results:{job.id}") == 1 for job in jobs)
    assert balance(client) == 0
    source.unregister()


def test_the_clock_difference_is_measured(redis_url: str) -> None:
    assert abs(new_client(redis_url).run(health.clock_difference())) < 5
