"""Soak: full load for half an hour with workers restarted, and memory that must level off.

    python tests/soak/soak.py --minutes 30        (make soak MINUTES=30)

Two workers on a small random model serve a queue that is never empty; one of them lives through the
whole run, the other is drained or killed every minute. The client submits, reads results and
forgets them, as a service does. Every few seconds the memory of the first worker, of the client and
of Redis is read; the first quarter is warm-up (caches fill, allocators grow). Prints the slope of a
straight line through the rest and exits 1 when any grows by more than its allowance over the run.
"""

import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import serving
from redis_support import RedisServer

from headrace.producer import Client

QUEUE = "soak"
WINDOW = 400
"""Jobs that are under way at any time."""

MIB = 1 << 20


@dataclass(slots=True)
class Series:
    """One memory over time: seconds and bytes. `allowance`: growth that is noise, in bytes."""

    name: str
    allowance: int
    at: list[float] = field(default_factory=list)
    size: list[int] = field(default_factory=list)

    def add(self, at: float, size: int) -> None:
        self.at.append(at)
        self.size.append(size)

    def settled(self) -> tuple[list[float], list[int]]:
        """All but the first quarter."""
        start = len(self.at) // 4
        return self.at[start:], self.size[start:]

    @property
    def growth(self) -> float:
        """Bytes that the fitted line rises over the settled part."""
        at, _ = self.settled()
        return self.slope * (at[-1] - at[0])

    @property
    def slope(self) -> float:
        """Bytes a second, by least squares."""
        at, size = self.settled()
        return slope(at, size)

    @property
    def level(self) -> bool:
        return self.growth <= self.allowance


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - middle_x) ** 2 for a in x)


class Traffic:
    """The client: keeps WINDOW jobs under way, reads results in order of completion, forgets."""

    def __init__(self, url: str) -> None:
        self.done = 0
        self.failed: list[str] = []
        self._client = Client(url, queue=QUEUE)
        self._draw = random.Random(1)
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._running = False
        self._thread.join(120)

    def _run(self) -> None:
        """A batch of 20,000 at a time, because a batch keeps its list of ids."""
        turn = 0
        while self._running:
            turn += 1
            self._one_batch(f"batch-{turn}", 20_000)
        self._client.close()

    def _one_batch(self, batch: str, total: int) -> None:
        sent = received = cursor = 0
        while received < total and (self._running or received < sent):
            if self._running and sent < total and sent - received < WINDOW:
                requests = [self._request() for _ in range(min(64, total - sent))]
                sent += len(self._client.submit_many(requests, batch=batch, ignore_eos=True))
            some = self._client.completed(batch, cursor, trim=True)
            cursor = some.cursor
            received += len(some.items)
            for job_id, result in some.items:
                if result is None or not result.ok:
                    self.failed.append(f"{job_id}: {result and result.failure}")
            self.done += len(some.items)
            self._client.forget([job_id for job_id, _ in some.items])
            if not some.items:
                time.sleep(0.02)

    def _request(self) -> dict[str, object]:
        draw = self._draw
        prompt = [draw.randrange(256) for _ in range(draw.randint(4, 200))]
        long = draw.random() < 0.05
        tokens = draw.randint(300, 800) if long else draw.randint(4, 60)
        return {"prompt": prompt, "max_tokens": tokens, "seed": draw.randrange(1 << 30)}


@click.command()
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--restart-every", default=60.0, show_default=True, help="Seconds.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/soak/soak.json"))
def main(minutes: float, restart_every: float, out: Path) -> None:
    """Full load, restarts, and a look at memory."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-soak-"))
    click.echo(f"soak: {minutes:g} minutes, logs in {folder}")
    model = serving.write_model(folder)
    server = RedisServer(appendonly="yes", appendfsync="everysec", maxmemory="256mb")
    births = 0

    def born() -> serving.WorkerProcess:
        nonlocal births
        births += 1
        return serving.WorkerProcess(
            server.url,
            model,
            folder / f"worker-{births}.log",
            *("--queue", QUEUE, "--max-num-seqs", "32", "--lease-seconds", "10"),
            *("--checkpoint-every", "64", "--drain-timeout", "5", "--max-crashes", "10"),
            *("--log-level", "warning"),
        )

    # A worker at log level `warning` does not say that it is ready; its facts do.
    lasting, other = born(), born()
    series = [
        Series("worker", 6 * MIB),
        Series("client", 4 * MIB),
        Series("Redis", 3 * MIB),
    ]
    kills = drains = 0
    traffic = None
    try:
        with Client(server.url, queue=QUEUE) as client, server.client() as admin:
            serving.wait_until(
                lambda: sum(w.state == "ready" for w in client.workers()) == 2, "ready", 180
            )
            traffic = Traffic(server.url)
            began = time.monotonic()
            restart = began + restart_every
            step = max(1.0, min(5.0, minutes * 60 / 60))
            while (now := time.monotonic()) < began + 60 * minutes:
                time.sleep(step)
                if now >= restart:
                    restart = now + restart_every
                    if (kills + drains) % 2:
                        other.kill()
                        kills += 1
                    else:
                        other.signal(signal.SIGTERM)
                        status = other.exit_status(60)
                        assert status == 0, f"a drained worker ended with {status}: {other.log}"
                        drains += 1
                    other = born()
                at = time.monotonic() - began
                series[0].add(at, psutil.Process(lasting.process.pid).memory_info().rss)
                series[1].add(at, psutil.Process().memory_info().rss)
                series[2].add(at, int(admin.info("memory")["used_memory"]))
            seconds = time.monotonic() - began
            done = traffic.done
            traffic.stop()
            left = admin.dbsize()
    finally:
        if traffic is not None:
            traffic.stop()
        for worker in (lasting, other):
            worker.end()
        server.stop()
    click.echo(
        f"{done:,} jobs in {seconds:.0f} s ({done / seconds:.0f} a second), {drains} drains, "
        f"{kills} kills, {left} keys left in Redis, {len(traffic.failed)} failures"
    )
    for one in series:
        click.echo(
            f"{one.name:7} {one.size[0] / MIB:7.1f} MiB at first, {one.size[-1] / MIB:7.1f} at the "
            f"end, slope {one.slope * 3600 / MIB:+7.2f} MiB an hour, "
            f"{one.growth / MIB:+6.2f} MiB over the settled part: "
            + ("level" if one.level else f"GROWS by more than {one.allowance / MIB:g} MiB")
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {one.name: {"at": one.at, "bytes": one.size, "slope": one.slope} for one in series}
    out.write_text(json.dumps({"jobs": done, "seconds": seconds, "series": report}))
    for line in traffic.failed[:10]:
        click.echo(f"FAILED {line}")
    sys.exit(0 if all(one.level for one in series) and not traffic.failed else 1)


if __name__ == "__main__":
    main()
