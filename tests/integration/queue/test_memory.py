"""What a job weighs in Redis, with the two settings of our embedded server."""

from redis_support import RedisServer

from headrace.worker.bench.queue import GROUP, run_ours, weigh


def test_a_job_takes_at_most_600_bytes_queued_and_1700_finished() -> None:
    """A 326-byte prompt, a short answer; `used_memory` over 2,000 jobs, on a server of its own:
    what other tests left in one (tables that shrink, buffers) would count too."""
    server = RedisServer()
    try:
        weight = weigh(server.url, count=2000)
    finally:
        server.stop()
    assert weight["bytes_per_queued_job"] <= 600
    assert weight["bytes_per_finished_job"] <= 1700


def test_a_group_of_64_takes_two_round_trips(redis_url: str) -> None:
    figures = run_ours(redis_url, 4 * GROUP)
    assert figures["round_trips_per_group"] <= 2
