"""What crash tests share: workers that die on purpose, and the books audited afterwards."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import orjson
from nursery import Nursery
from serving import POOL, WorkerProcess, wait_until

from headrace.producer import Client, health
from headrace.producer.schemas import Result


class ForkedWorker(WorkerProcess):
    """`headrace worker` on a tiny model, from a nursery; `environment` for its kill points."""

    def __init__(
        self,
        nursery: Nursery,
        redis_url: str,
        model: Path | str,
        log: Path,
        *arguments: str,
        **environment: str,
    ) -> None:
        self.log = log
        command = ["--model", str(model), "--redis-url", redis_url, "--port", "0"]
        command += ["--log-format", "json", "--dtype", "float32", "--num-threads", "1"]
        command += ["--kv-cache-memory", str(POOL), *arguments]
        self.process = nursery.fork(command, log, **environment)  # type: ignore[assignment]

    def wait_killed(self, timeout: float = 120.0) -> None:
        """Until a kill point has ended it."""
        assert self.process.wait(timeout) == -9, self.log.read_text()


def progress_in_redis(client: Client, job_id: str) -> int:
    """Output tokens that the job's checkpoint holds; 0 without one."""
    blob = client.redis.hget(f"rq:job:{job_id}", "ckpt")
    return sum(answer["at"] for answer in orjson.loads(blob)["a"]) if blob else 0


def wait_results(
    client: Client, job_ids: Sequence[str], timeout: float = 180.0
) -> dict[str, Result]:
    """Every job's result; AssertionError names those that never came."""
    found: dict[str, Result] = {}

    def complete() -> bool:
        found.update(client.results([name for name in job_ids if name not in found]))
        return len(found) == len(job_ids)

    try:
        wait_until(complete, "all results", timeout)
    except AssertionError as error:
        raise AssertionError(f"no result: {sorted(set(job_ids) - set(found))}") from error
    return found


_ENDED = {b"finished", b"failed", b"canceled", b"stopped"}


def audit(client: Client, queues: Iterable[str], job_ids: Sequence[str]) -> list[str]:
    """What is wrong with the books once all is quiet; empty when each of the jobs has ended in
    exactly one place with exactly one result and nothing is left of its deliveries."""
    r = client.redis
    wrong: list[str] = []
    with r.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(f"rq:job:{job_id}", "status")
            pipe.xlen(f"rq:results:{job_id}")
        replies = pipe.execute()
    for job_id, status, results in zip(job_ids, replies[::2], replies[1::2], strict=True):
        if status not in _ENDED:
            wrong.append(f"{job_id} is {status!r}")
        if results != 1:
            wrong.append(f"{job_id} has {results} results")
    places: Counter[str] = Counter()
    for queue in queues:
        for name in (queue, f"{queue}.high", f"{queue}.low", f"{queue}.suspect"):
            for kind in ("finished", "failed", "canceled"):
                places.update(i.decode() for i in r.zrange(f"rq:{kind}:{name}", 0, -1))
            for kind in ("wip", "scheduled", "deferred", "ready"):
                if left := r.zcard(f"rq:{kind}:{name}"):
                    wrong.append(f"{left} left in {kind}:{name}")
        if left := r.zcard(f"rq:x:lease:{queue}"):
            wrong.append(f"{left} leases left in {queue}")
        balance = client.run(health.census(queue, client.settings)).balance
        if balance:
            wrong.append(f"{queue}: counted {balance:+d} jobs")
    wrong += [
        f"{job_id} is in {places[job_id]} places" for job_id in job_ids if places[job_id] != 1
    ]
    wrong += [f"left over: {key.decode()}" for key in r.scan_iter("rq:execution*", 1000)]
    wrong += [finding.text for finding in client.run(health.examine(list(queues)))]
    return wrong


def counters(client: Client, queues: Iterable[str]) -> Mapping[str, int]:
    """Our counters, summed over queues."""
    total: Counter[str] = Counter()
    for queue in queues:
        for name, value in client.redis.hgetall(f"rq:x:n:{queue}").items():
            if value.lstrip(b"-").isdigit():
                total[name.decode()] += int(value)
    return total
