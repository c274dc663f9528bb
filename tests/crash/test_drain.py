"""A drain may last longer than a lease: what is in flight stays with the worker that drains."""

import signal
import time
from typing import Any

from crash_support import audit, counters, wait_results
from queue_support import new_source
from redis_support import RedisServer
from serving import wait_until

from headrace.producer import Client

LEASE = 3.0


def test_a_drain_longer_than_the_lease_keeps_its_jobs_from_an_eager_reaper(
    start: Any, redis_url: str
) -> None:
    reaper = new_source(redis_url, "tiny", lease=LEASE)
    with Client(redis_url, queue="tiny") as client:
        ids = [f"job-{i}" for i in range(6)]
        client.submit_many(
            [{"prompt": [i + 1]} for i in range(6)],
            job_ids=ids,
            max_tokens=3500,
            ignore_eos=True,
        )
        worker = start("--lease-seconds", str(LEASE), "--drain-timeout", "100")
        wait_until(lambda: client.redis.zcard("rq:x:lease:tiny") == len(ids), "all are claimed")
        worker.wait_ready()
        wait_until(lambda: worker.value("headrace_engine_running_sequences") == len(ids), "all run")
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        while worker.process.poll() is None:
            assert reaper.reap() == 0
            assert reaper.claim(8, 0.0) == [], "nothing was put back that the grace allows"
            time.sleep(0.05)
        assert worker.process.poll() == 0, worker.log.read_text()
        assert time.monotonic() - began > LEASE, "longer than a lease, or it shows nothing"
        results = client.results(ids)
        assert {result.usage.completion_tokens for result in results.values()} == {3500}
        assert {result.usage.resumed_from_tokens for result in results.values()} == {0}
        assert counters(client, ["tiny"])["lapsed"] == 0
        reaper.unregister()
        assert audit(client, ["tiny"], ids) == []


def test_a_drain_that_ends_while_the_queue_is_away_says_so_and_its_jobs_are_answered_later(
    start: Any,
) -> None:
    """Exit status 4: it was the queue, not the worker."""
    server = RedisServer(appendonly="yes", appendfsync="always")
    try:
        with Client(server.url, queue="tiny", retry_for=60.0) as client:
            ids = [f"job-{i}" for i in range(6)]
            client.submit_many(
                [{"prompt": [i + 1]} for i in range(6)],
                job_ids=ids,
                max_tokens=1500,
                ignore_eos=True,
            )
            options = ("--lease-seconds", str(LEASE), "--drain-timeout", "1.5")
            worker = start(*options, url=server.url)
            wait_until(lambda: client.redis.zcard("rq:x:lease:tiny") == len(ids), "all claimed")
            worker.wait_ready()
            server.kill()
            worker.signal(signal.SIGTERM)
            assert worker.exit_status(60) == 4, worker.log.read_text()
            assert worker.said("the queue did not take 6 results or jobs put back")
            server.start()
            start(*options, url=server.url)
            results = wait_results(client, ids)
            assert {result.usage.completion_tokens for result in results.values()} == {1500}
            assert audit(client, ["tiny"], ids) == []
    finally:
        server.stop()
