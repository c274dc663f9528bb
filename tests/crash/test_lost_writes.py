"""Redis comes back without its last writes, as after a fail-over to a replica that lagged.

What is promised then: what it still knows is whole, each job that it knows ends once, and readers
who had seen more are not left waiting.
"""

from collections.abc import Iterator

import pytest
from crash_support import audit
from queue_support import QUEUE, Clock, balance, crash, finish_all, new_client, new_source
from redis_support import RedisServer

from headrace.producer.errors import JobNotFound
from headrace.worker.source import FinishCode


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Keeps what it knew at the last `SAVE`, and nothing later."""
    server = RedisServer(dbfilename="dump.rdb")
    yield server
    server.stop()


def test_after_lost_writes_every_known_job_ends_once_and_readers_see_the_rest(
    server: RedisServer,
) -> None:
    client, source = new_client(server.url), new_source(server.url)
    ids = [job.id for job in client.submit_many([f"p{i}" for i in range(12)], batch="b")]
    first = source.claim(6, 1.0)
    finish_all(source, first[:2])
    client.redis.save()
    # All of this will be forgotten: four results, six claims, two results of those, a submission.
    finish_all(source, first[2:])
    second = source.claim(6, 1.0)
    finish_all(source, second[:2])
    client.submit("forgotten", job_id="forgotten", batch="b")
    seen = client.completed("b")
    assert len(seen.items) == seen.cursor == 8
    server.kill()
    server.start()

    with pytest.raises(JobNotFound):
        client.result("forgotten", timeout=1)
    assert balance(client) == 0
    assert finish_all(source, second[2:]) == [FinishCode.FENCED] * 4
    lost = {job.execution_id for job in source.heartbeat()}
    assert lost <= {job.execution_id for job in [*first, *second]}
    rest = client.completed("b", seen.cursor)
    assert rest.items == [], "nothing new yet"
    # The four claims of the snapshot lapse; everything is done again.
    source._held.clear()
    clock = Clock(client)
    clock.drive(client, source)
    clock.advance(120)
    assert source.reap() == 4
    for _ in range(20):
        finish_all(source, source.claim(12, 0.0))
    found = set()
    cursor = rest.cursor
    while (some := client.completed("b", cursor)).items:
        found |= {job_id for job_id, _ in some.items}
        cursor = some.cursor
    assert found == set(ids) - {job.job_id for job in first[:2]}
    assert client.batch("b").succeeded == 12
    assert audit(client, [QUEUE], ids) == []
    crash(source)
    source.unregister()
