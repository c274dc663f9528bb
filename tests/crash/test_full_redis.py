"""Redis fills up (maxmemory, noeviction) while clients submit and a worker works."""

import threading
import time
from typing import Any

from crash_support import audit, wait_results
from redis_support import RedisServer
from serving import wait_until

from headrace.producer import Client, health
from headrace.producer.errors import QueueFull

ROOM = 3_000_000
"""Bytes beyond what an empty server with its scripts uses: some hundred jobs of 8 kB."""


def test_a_full_redis_gives_submitters_a_typed_error_and_workers_go_on(start: Any) -> None:
    server = RedisServer()
    refused: list[QueueFull] = []
    sent: dict[str, list[str]] = {"accepted": [], "refused": []}
    lock = threading.Lock()

    def fill(number: int) -> None:
        # A watermark above 1: Redis' own refusal is what is looked for here.
        client = Client(server.url, queue="tiny", memory_watermark=2.0)
        for chunk in range(200):
            ids = [f"j-{number}-{chunk}-{i}" for i in range(8)]
            try:
                client.submit_many(
                    [{"prompt": [65] * 4, "metadata": {"x": noise(i)}} for i in ids],
                    job_ids=ids,
                    batch="all",
                    max_tokens=20,
                    ignore_eos=True,
                )
            except QueueFull as error:
                with lock:
                    refused.append(error)
                    sent["accepted"] += error.accepted
                    sent["refused"] += sorted(set(ids) - set(error.accepted))
                break
            with lock:
                sent["accepted"] += ids
        client.close()

    try:
        worker = start("--lease-seconds", "2", url=server.url).wait_ready()
        with server.client() as admin, Client(server.url, queue="tiny") as client:
            client.submit("warm", max_tokens=1).result(60)
            admin.config_set("maxmemory", admin.info("memory")["used_memory"] + ROOM)
            threads = [threading.Thread(target=fill, args=(i,)) for i in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert len(refused) == 3, "each submitter is told"
            assert all("more memory" in str(error) for error in refused)
            # Nothing half-written: a refused job is nowhere, an accepted one whole.
            for job_id in sent["refused"]:
                assert not admin.exists(f"rq:job:{job_id}"), job_id
            assert client.run(health.examine()) == []
            census = client.run(health.census("tiny", client.settings))
            assert census.balance == 0
            assert census.accepted == len(sent["accepted"]) + 1
            # The worker never stops: with memory still full it ends all that was taken in.
            results = wait_results(client, sent["accepted"])
            assert all(result.ok for result in results.values())
            assert worker.process.poll() is None
            assert worker.value("headrace_leases_expired_total") == 0
            assert audit(client, ["tiny"], sent["accepted"]) == []
            # Room again once results are forgotten, without touching Redis' settings.
            client.forget(sent["accepted"])
            wait_until(lambda: accepts(client), "there is room again", 30.0)
    finally:
        server.stop()


def accepts(client: Client) -> bool:
    try:
        return client.submit("again", max_tokens=1).result(60).ok
    except QueueFull:
        time.sleep(0.2)
        return False


def noise(name: str) -> str:
    """8 kB that do not compress."""
    import random

    draw = random.Random(name)
    return "".join(chr(draw.randrange(33, 0x250)) for _ in range(5000))
