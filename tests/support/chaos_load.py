"""What chaos is made to: jobs of every kind, sent again, sent twice and cancelled, with a ledger of
what was acknowledged and when. Knows no worker and breaks nothing."""

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tcp_proxy import TcpProxy

from headrace.producer import Client
from headrace.producer.errors import HeadraceError, IdempotencyConflict
from headrace.producer.operations import CancelOutcome, idempotent_id

QUEUE = BATCH = "chaos"
MOST_OUTSTANDING = 240


@dataclass(slots=True)
class Sent:
    """One job of the ledger. Times on the monotonic clock; `bad`: it must be refused."""

    fields: dict[str, Any]
    key: str | None = None
    bad: bool = False
    acknowledged: float | None = None
    cancelled: CancelOutcome | None = None
    cancelled_at: float = 0.0


@dataclass(slots=True)
class Counts:
    duplicates: int = 0
    conflicts: int = 0
    cancels: int = 0
    retried_calls: int = 0


def request(draw: random.Random) -> dict[str, Any]:
    """Mostly short, some long enough for many checkpoints; greedy, or drawn with a seed."""
    kind = draw.random()
    tokens = draw.randint(4, 16)
    if kind > 0.95:
        tokens = draw.randint(200, 400)
    elif kind > 0.7:
        tokens = draw.randint(30, 80)
    prompt = [draw.randrange(256) for _ in range(draw.randint(1, 24))]
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    if draw.random() < 0.5:
        fields["temperature"] = 0.0
    else:
        fields["seed"] = draw.randrange(1 << 30)
    if draw.random() < 0.05:
        fields["n"] = 2
    return fields


class Load:
    """Submitters, each with a connection of its own that others may cut.

    `wrong` collects what no fault excuses.
    """

    def __init__(self, port: int, seed: int, wrong: list[str], submitters: int = 2) -> None:
        self.ledger: dict[str, Sent] = {}
        self.counts = Counts()
        self.proxies = [TcpProxy(port) for _ in range(submitters)]
        self.outstanding = 0
        self._wrong = wrong
        self._lock = threading.Lock()
        self._running = True
        self._threads = [
            threading.Thread(target=self._submit, args=(number, seed), daemon=True)
            for number in range(submitters)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send no more; everything begun is acknowledged before this returns."""
        self._running = False
        for thread in self._threads:
            thread.join(180)
            if thread.is_alive():
                self._wrong.append("a submitter hangs")

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()

    def send_again(self, client: Client, job_id: str) -> None:
        """A job that Redis itself has lost."""
        sent = self.ledger[job_id]
        self._send_one(client, job_id, sent)

    def _submit(self, number: int, seed: int) -> None:
        draw = random.Random(f"{seed}-load-{number}")
        client = Client(self.proxies[number].url, queue=QUEUE, retry_for=120.0)
        serial = 0
        while self._running:
            if self.outstanding > MOST_OUTSTANDING:
                time.sleep(0.02)
                continue
            try:
                action = draw.random()
                if action < 0.5:
                    self._send_many(client, draw, f"s{number}-{serial}")
                elif action < 0.97:
                    self._send_keyed(client, draw, f"key {number} {serial}")
                else:
                    self._cancel(client, draw)
            except HeadraceError as error:
                self._wrong.append(f"submitter {number}: {type(error).__name__}: {error}")
            serial += 1
        client.close()

    def _send_many(self, client: Client, draw: random.Random, prefix: str) -> None:
        jobs = {f"{prefix}-{i}": Sent(request(draw)) for i in range(draw.randint(1, 16))}
        with self._lock:
            self.ledger.update(jobs)
        client.submit_many(
            [sent.fields for sent in jobs.values()],
            job_ids=list(jobs),
            batch=BATCH,
            priority=draw.choice(["high", "normal", "normal", "low"]),
        )
        now = time.monotonic()
        for sent in jobs.values():
            sent.acknowledged = now
        self.outstanding += len(jobs)

    def _send_keyed(self, client: Client, draw: random.Random, key: str) -> None:
        fields = request(draw)
        bad = draw.random() < 0.1
        if bad:
            fields["temperature"] = -1.0
        sent = Sent(fields, key, bad)
        job_id = idempotent_id(key)
        with self._lock:
            self.ledger[job_id] = sent
        self._send_one(client, job_id, sent)
        self.outstanding += 1
        if draw.random() < 0.4:
            self._send_one(client, job_id, sent)
            self.counts.duplicates += 1
        if draw.random() < 0.1:
            try:
                client.submit(idempotency_key=key, batch=BATCH, **{**fields, "max_tokens": 3})
            except IdempotencyConflict:
                self.counts.conflicts += 1
            else:
                self._wrong.append(f"{job_id}: another body was taken under the same key")

    def _send_one(self, client: Client, job_id: str, sent: Sent) -> None:
        name = {"idempotency_key": sent.key} if sent.key is not None else {"job_id": job_id}
        job = client.submit(batch=BATCH, **name, **sent.fields)
        if job.id != job_id:
            self._wrong.append(f"{sent.key}: two ids, {job_id} and {job.id}")
        sent.acknowledged = time.monotonic()

    def _cancel(self, client: Client, draw: random.Random) -> None:
        with self._lock:
            recent = list(self.ledger)[-200:]
        known = [i for i in recent if self.ledger[i].acknowledged and not self.ledger[i].cancelled]
        if not known:
            return
        sent = self.ledger[job_id := draw.choice(known)]
        sent.cancelled_at = time.monotonic()
        outcome = client.cancel(job_id)
        # Sent again after a lost reply, a cancel finds its own work.
        sent.cancelled = outcome
        sent.cancelled_at = time.monotonic()
        self.counts.cancels += 1


@dataclass(slots=True)
class RedisDeath:
    """When Redis was killed, and what it had acknowledged and forgot."""

    at: float
    away: float
    lost: list[str] = field(default_factory=list)
