"""A job that kills its worker stops killing workers, and takes no other job with it."""

from pathlib import Path

from crash_support import ForkedWorker, audit, counters
from nursery import Nursery
from serving import wait_until

from headrace.producer import Client, dead

GOOD = 200
MAX_CRASHES = 3


def test_a_job_that_kills_its_worker_costs_three_workers_and_no_other_job(
    nursery: Nursery, redis_url: str, small_model: Path, tmp_path: Path
) -> None:
    """Two workers, each replaced as soon as it is dead, as a deployment does."""
    workers: list[ForkedWorker] = []
    lost = 0

    def born() -> ForkedWorker:
        return ForkedWorker(
            nursery,
            redis_url,
            small_model,
            tmp_path / f"worker-{len(workers)}-{lost}.log",
            *("--lease-seconds", "2", "--max-crashes", str(MAX_CRASHES), "--max-num-seqs", "16"),
            HEADRACE_TEST_KILL_AT="job:poison",
        )

    with Client(redis_url, queue="tiny") as client:
        good = [f"good-{i}" for i in range(GOOD)]
        ids = [*good[:20], "poison", *good[20:]]
        client.submit_many(
            [{"prompt": [i % 256], "max_tokens": 10 + i % 30} for i in range(len(ids))],
            job_ids=ids,
            batch="all",
            ignore_eos=True,
        )
        workers += [born()]
        workers += [born()]
        try:

            def all_ended() -> bool:
                nonlocal lost
                for index, worker in enumerate(workers):
                    if worker.process.poll() is not None:
                        assert worker.process.poll() == -9, worker.log.read_text()
                        lost += 1
                        workers[index] = born()
                return client.batch("all").done == len(ids)

            wait_until(all_ended, "all have ended", 240.0)
        finally:
            for worker in workers:
                worker.end()
        results = client.results(ids)
        assert all(results[name].ok for name in good)
        assert lost <= MAX_CRASHES
        (entry,) = client.run(dead.list_dead("tiny"))
        assert entry.job_id == "poison"
        assert entry.crashes == MAX_CRASHES == lost
        assert len({event["worker"] for event in entry.history}) == MAX_CRASHES
        assert results["poison"].failure is not None
        assert results["poison"].failure.code == "worker_lost"
        assert counters(client, ["tiny"])["dead"] == 1
        assert audit(client, ["tiny"], ids) == []
