"""Chaos: a real queue under load while everything around it is killed, stopped and cut.

    python tests/crash/chaos.py --seconds 600 --seed 1        (make chaos SECONDS=600 SEED=1)

Workers are killed, stopped past their lease and drained; connections are cut and replies lost;
Redis itself is killed and comes back from its append-only file; clients send twice, cancel, and
`rq info` looks on. Then everything must add up: each acknowledged job has exactly one terminal
result, the right one, no good job is dead, and at every sample every job was in exactly one place.
Prints what was done and what came of it; exits 1 on any violation.

What Redis may lose by itself (`appendfsync everysec`) is told apart: a job acknowledged within
FSYNC_WINDOW before a kill of Redis may be gone; it is counted and sent again under its id, as a
client would. A job acknowledged earlier may not. With `--fsync always` there is no such window.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import serving
from chaos_faults import Faults
from chaos_load import BATCH, QUEUE, Load, RedisDeath
from crash_support import audit, counters
from nursery import Nursery
from redis_support import RedisServer

from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.producer import Client, health, schemas
from headrace.producer.errors import HeadraceError
from headrace.worker import wire_request as wire
from headrace.worker.source import ClaimedJob

FSYNC_WINDOW = 2.0
"""Seconds. Redis syncs every second, and waits one more for a sync that is under way."""

STUCK = 120.0
MAX_CRASHES = 12
"""A kill every few seconds is far above what the default of 3 is meant for: in ten minutes a job
is hit three times by chance alone."""


class Watch:
    """Looks at the queue all the time: conservation, `rq info`, how much is done."""

    def __init__(self, server: RedisServer, faults: Faults, load: Load, wrong: list[str]) -> None:
        self.samples = 0
        self.infos = 0
        self._server = server
        self._faults = faults
        self._load = load
        self._wrong = wrong
        self._running = True
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._sample, self._info)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._running = False
        for thread in self._threads:
            thread.join(60)

    def _sample(self) -> None:
        client = Client(self._server.url, queue=QUEUE, retry_for=0.0)
        while self._running:
            time.sleep(0.1)
            if not self._faults.redis_up.is_set():
                continue
            try:
                census = client.run(health.census(QUEUE, client.settings))
            except HeadraceError:
                continue
            self.samples += 1
            ended = census.finished + census.failed + census.cancelled
            self._load.outstanding = census.accepted - ended
            if census.balance:
                self._wrong.append(f"sample {self.samples} does not add up: {census}")
        client.close()

    def _info(self) -> None:
        program = [str(Path(sys.executable).with_name("rq")), "info", "--url", self._server.url]
        while self._running:
            began = len(self._faults.deaths)
            up = self._faults.redis_up.is_set()
            ran = subprocess.run(program, capture_output=True, text=True, timeout=120)
            steady = up and self._faults.redis_up.is_set() and began == len(self._faults.deaths)
            if ran.returncode == 0:
                self.infos += 1
            elif steady:
                self._wrong.append(f"rq info failed: {ran.stderr[-500:]}")
            for _ in range(30):
                if self._running:
                    time.sleep(0.1)


def find_lost(client: Client, load: Load, deaths: list[RedisDeath], wrong: list[str]) -> None:
    """Acknowledged jobs that Redis does not know. Excused ones are sent again."""
    ids = [i for i, sent in load.ledger.items() if sent.acknowledged is not None]
    for job_id in ids:
        if client.redis.exists(f"rq:job:{job_id}"):
            continue
        at = load.ledger[job_id].acknowledged or 0.0
        death = next((d for d in deaths if d.at - FSYNC_WINDOW <= at <= d.at + 1.0), None)
        if death is None:
            wrong.append(f"{job_id} was acknowledged and is gone")
        else:
            death.lost.append(job_id)
        load.send_again(client, job_id)


def wait_quiet(client: Client, load: Load, faults: Faults, wrong: list[str]) -> None:
    """Until every job of the ledger has ended, or nothing has moved for STUCK seconds."""
    done, since = -1, time.monotonic()
    while True:
        faults.calm()
        status = client.batch(BATCH)
        if status.done >= len(load.ledger):
            return
        if status.done != done:
            done, since = status.done, time.monotonic()
        elif time.monotonic() - since > STUCK:
            wrong.append(f"stuck: {status.done} of {len(load.ledger)} have ended")
            return
        time.sleep(0.2)


def check_results(
    client: Client, load: Load, deaths: list[RedisDeath], wrong: list[str]
) -> Counter[str]:
    """Each job's one result is one that it may have."""
    ends: Counter[str] = Counter()
    results = client.results(list(load.ledger))
    for job_id, sent in load.ledger.items():
        result = results.get(job_id)
        if result is None:
            wrong.append(f"{job_id} has no result")
            continue
        code = result.failure.code if result.failure else "answered"
        ends[code] += 1
        cancelled = sent.cancelled is not None and sent.cancelled.value.endswith("cancelled")
        cancelled |= sent.cancelled is not None and sent.cancelled.cancelled
        at_risk = any(d.at - FSYNC_WINDOW <= sent.cancelled_at <= d.at + 1.0 for d in deaths)
        allowed = {"invalid_request"} if sent.bad else {"answered"}
        if cancelled:
            allowed = {"cancelled"} | (allowed if at_risk else set())
        if code not in allowed:
            wrong.append(f"{job_id} ended with {code}, not {allowed}: {sent.cancelled}")
        if result.ok and result.usage.completion_tokens != sent.fields[
            "max_tokens"
        ] * sent.fields.get("n", 1):
            wrong.append(f"{job_id} has {result.usage.completion_tokens} tokens")
    return ends


def check_tokens(
    client: Client, load: Load, engine: Engine, wrong: list[str], most: int = 1200
) -> tuple[int, int]:
    """Answers against an uninterrupted run, those delivered more than once first: how many were
    compared, and how many of them had been delivered more than once."""
    results = client.results(list(load.ledger))
    answered = [i for i, result in results.items() if result.ok]
    with client.redis.pipeline(transaction=False) as pipe:
        for job_id in answered:
            pipe.hget(f"rq:job:{job_id}", "fence")
        fences = [int(reply or 1) for reply in pipe.execute()]
    ranked = sorted(zip(fences, answered, strict=True), key=lambda pair: -pair[0])[:most]
    sequences: dict[str, list[Sequence]] = {}
    for _, job_id in ranked:
        request = schemas.Request.model_validate(load.ledger[job_id].fields)
        job = ClaimedJob(job_id, job_id, QUEUE, b"")
        sequences[job_id] = wire.to_sequences(request, job, engine)
        for sequence in sequences[job_id]:
            engine.add(sequence)
    while engine.has_unfinished:
        engine.step()
    for job_id, parts in sequences.items():
        got = [choice.token_ids for choice in results[job_id].choices]
        if got != [part.output_token_ids for part in parts] and not alone(
            engine, load.ledger[job_id].fields, job_id, got
        ):
            wrong.append(f"{job_id}: its tokens are not those of an uninterrupted run")
    return len(ranked), sum(fence > 1 for fence, _ in ranked)


def alone(
    engine: Engine, fields: dict[str, object], job_id: str, got: list[list[int] | None]
) -> bool:
    """Whether it is the answer of a batch of one: float32 sums differ with the batch's size, and
    once in some 100,000 tokens two of them are that close."""
    return [part.output_token_ids for part in serving.answer(engine, fields, job_id)] == got


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="How long faults go on.")
@click.option("--jobs", "fewest", default=2000, show_default=True, help="At least so many jobs.")
@click.option("--seed", default=0, show_default=True)
@click.option("--fsync", type=click.Choice(["everysec", "always"]), default="everysec")
@click.option("--folder", type=click.Path(path_type=Path), help="Where logs go; default: new.")
def main(seconds: float, fewest: int, seed: int, fsync: str, folder: Path | None) -> None:
    """Break everything but the promises."""
    folder = folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"chaos: seed {seed}, {seconds:g} s, appendfsync {fsync}, logs in {folder}")
    wrong: list[str] = []
    began = time.monotonic()
    model = serving.write_model(folder)
    server = RedisServer(appendonly="yes", appendfsync=fsync)
    nursery = Nursery()
    load = Load(server.port, seed, wrong)
    faults = Faults(
        server,
        nursery,
        model,
        folder,
        seed,
        wrong,
        max_crashes=MAX_CRASHES,
        clients=load.proxies,
    )
    try:
        faults.wait_ready()
        load.start()
        watch = Watch(server, faults, load, wrong)
        end = time.monotonic() + seconds

        def enough() -> bool:
            if load.counts.cancels and len(load.ledger) >= fewest:
                return time.monotonic() >= end
            return time.monotonic() >= end + 20 * seconds

        faults.run(enough, seconds)
        faults.calm()
        load.stop()
        with Client(server.url, queue=QUEUE) as client:
            find_lost(client, load, faults.deaths, wrong)
            wait_quiet(client, load, faults, wrong)
            watch.stop()
            faults.end()
            wrong += audit(client, [QUEUE], list(load.ledger))
            ends = check_results(client, load, faults.deaths, wrong)
            listed = Counter(job_id for job_id in batch_ids(client))
            wrong += [f"{i} is listed {n} times in its batch" for i, n in listed.items() if n > 1]
            if set(listed) != set(load.ledger):
                wrong.append(f"{len(set(load.ledger) - set(listed))} jobs are not in their batch")
            counted = counters(client, [QUEUE])
            if counted["dead"]:
                wrong.append(f"{counted['dead']} jobs are dead, and none deserved it")
            engine = serving.load(model, max_num_seqs=32)
            compared, redelivered = check_tokens(client, load, engine, wrong)
    finally:
        faults.kill_all()
        nursery.close()
        load.close()
        server.stop()
    click.echo(
        f"\n{len(load.ledger)} jobs in {time.monotonic() - began:.0f} s; they ended: " + facts(ends)
    )
    click.echo("done to them: " + facts(faults.done))
    click.echo(
        f"clients: {load.counts.duplicates} sent twice, {load.counts.conflicts} conflicts refused, "
        f"{load.counts.cancels} cancels; rq info ran {watch.infos} times"
    )
    shown = ("lapsed", "released", "resumed", "fenced", "retried", "duplicates", "broken", "dead")
    click.echo("queue: " + ", ".join(f"{counted[name]} {name}" for name in shown))
    for death in faults.deaths:
        at_risk = sum(
            death.at - FSYNC_WINDOW <= (sent.acknowledged or 0) <= death.at
            for sent in load.ledger.values()
        )
        click.echo(
            f"Redis killed for {death.away:g} s: {at_risk} jobs acknowledged in the "
            f"{FSYNC_WINDOW:g} s before, {len(death.lost)} of them lost by Redis"
        )
        if fsync == "always" and death.lost:
            wrong.append(f"{len(death.lost)} jobs were lost though every write was synced")
    click.echo(f"conservation: {watch.samples} samples")
    click.echo(
        f"answers: {compared} compared with an uninterrupted run, {redelivered} of them delivered "
        "more than once"
    )
    for line in wrong[:40]:
        click.echo(f"VIOLATION {line}")
    click.echo(f"{len(wrong)} violations (seed {seed})")
    sys.exit(1 if wrong else 0)


def batch_ids(client: Client) -> list[str]:
    return [job_id.decode() for job_id in client.redis.lrange(f"rq:x:batch:{BATCH}:done", 0, -1)]


def facts(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


if __name__ == "__main__":
    main()
