"""What chaos does: workers killed, stopped, drained; connections cut; replies lost; no Redis."""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos_load import QUEUE, RedisDeath
from crash_support import ForkedWorker
from nursery import Nursery
from redis_support import RedisServer
from tcp_proxy import TcpProxy

EXIT_SOURCE = 4
LEASE = 3.0


@dataclass(slots=True)
class Slot:
    """One of the workers, and the connection that it has through us."""

    proxy: TcpProxy
    worker: ForkedWorker
    stopped: bool = False
    draining: bool = False


class Faults:
    """Keeps `workers` of them running and does something to one every second or so.

    All from one thread, so that a seed gives the same faults in the same order. `wrong` collects
    what none of them excuses.
    """

    def __init__(
        self,
        server: RedisServer,
        nursery: Nursery,
        model: Path,
        folder: Path,
        seed: int,
        wrong: list[str],
        *,
        max_crashes: int,
        clients: Sequence[TcpProxy] = (),
        workers: int = 3,
    ) -> None:
        self.done: Counter[str] = Counter()
        self.deaths: list[RedisDeath] = []
        self.redis_up = threading.Event()
        self.redis_up.set()
        self._server = server
        self._nursery = nursery
        self._model = model
        self._folder = folder
        self._draw = random.Random(f"{seed}-faults")
        self._wrong = wrong
        self._max_crashes = max_crashes
        self._clients = clients
        self._births = 0
        self._resume: list[tuple[float, Slot]] = []
        self.slots = []
        for _ in range(workers):
            proxy = TcpProxy(server.port)
            self.slots.append(Slot(proxy, self._birth(proxy)))

    def wait_ready(self) -> None:
        for slot in self.slots:
            slot.worker.wait_ready()

    def run(self, until: Callable[[], bool], seconds: float) -> None:
        """Faults until `until()`; Redis dies three times within the first `seconds`."""
        began = time.monotonic()
        deaths = [began + seconds * share for share in (0.2, 0.5, 0.8)]
        soon = began
        while not until():
            self._look_after()
            if time.monotonic() >= soon:
                if deaths and time.monotonic() >= deaths[0]:
                    deaths.pop(0)
                    self._kill_redis()
                else:
                    self._something()
                soon = time.monotonic() + min(4.0, self._draw.expovariate(1 / 1.2))
            time.sleep(0.05)

    def calm(self) -> None:
        """Everything runs and nothing is broken any more; call again while waiting."""
        for slot in self.slots:
            slot.proxy.refuse = False
            slot.proxy.lose_replies(0)
        for proxy in self._clients:
            proxy.refuse = False
            proxy.lose_replies(0)
        self._resume = [(0.0, slot) for _, slot in self._resume]
        self._look_after()

    def end(self) -> None:
        """Drain all workers: each must exit with 0."""
        for slot in self.slots:
            slot.worker.signal(signal.SIGTERM)
        for slot in self.slots:
            try:
                status = slot.worker.exit_status(120)
            except Exception:
                status = None
                slot.worker.end()
            if status != 0:
                self._wrong.append(f"a drained worker ended with {status}: {slot.worker.log}")
            slot.proxy.close()

    def kill_all(self) -> None:
        for slot in self.slots:
            slot.worker.end()
            slot.proxy.close()

    def _birth(self, proxy: TcpProxy) -> ForkedWorker:
        self._births += 1
        return ForkedWorker(
            self._nursery,
            proxy.url,
            self._model,
            self._folder / f"worker-{self._births}.log",
            *("--queue", QUEUE, "--lease-seconds", str(LEASE), "--checkpoint-every", "16"),
            *("--max-num-seqs", "12", "--max-crashes", str(self._max_crashes)),
            *("--connect-timeout", "30", "--drain-timeout", "1.5"),
        )

    def _something(self) -> None:
        kinds = {
            self._kill: 9,
            self._stop: 5,
            self._drain: 2,
            self._cut: 3,
            self._lose: 3,
        }
        action = self._draw.choices(list(kinds), list(kinds.values()))[0]
        action(self._draw.choice(self.slots))

    def _kill(self, slot: Slot) -> None:
        slot.worker.kill()
        slot.stopped = slot.draining = False
        self._resume = [(at, other) for at, other in self._resume if other is not slot]
        slot.worker = self._birth(slot.proxy)
        self.done["workers killed (SIGKILL)"] += 1

    def _stop(self, slot: Slot) -> None:
        if slot.stopped:
            return
        slot.worker.signal(signal.SIGSTOP)
        slot.stopped = True
        seconds = LEASE * self._draw.uniform(0.2, 2.5)
        self._resume.append((time.monotonic() + seconds, slot))
        past = "past" if seconds > LEASE else "within"
        self.done[f"workers stopped {past} their lease (SIGSTOP)"] += 1

    def _drain(self, slot: Slot) -> None:
        if slot.stopped or slot.draining:
            return
        slot.worker.signal(signal.SIGTERM)
        slot.draining = True
        self.done["workers drained (SIGTERM)"] += 1

    def _cut(self, slot: Slot) -> None:
        proxy = self._draw.choice([slot.proxy, *self._clients])
        proxy.cut()
        self.done["connections cut"] += 1

    def _lose(self, slot: Slot) -> None:
        proxy = self._draw.choice([slot.proxy, *self._clients])
        proxy.lose_replies(self._draw.randint(1, 3), to=b"EVALSHA")
        self.done["replies of scripts lost"] += 1

    def _kill_redis(self) -> None:
        away = self._draw.choice([0.2, 1.0, 2.0 * LEASE])
        self.redis_up.clear()
        self._server.kill()
        self.deaths.append(RedisDeath(time.monotonic(), away))
        time.sleep(away)
        self._server.start()
        self.redis_up.set()
        self.done["Redis killed (SIGKILL) and restarted"] += 1

    def _look_after(self) -> None:
        now = time.monotonic()
        for at, slot in self._resume:
            if now >= at:
                slot.worker.signal(signal.SIGCONT)
                slot.stopped = False
        self._resume = [(at, slot) for at, slot in self._resume if now < at]
        for slot in self.slots:
            status = slot.worker.process.poll()
            if status is None:
                continue
            # A SIGTERM that came before the process had said a word met nobody who could drain.
            unborn = status == -signal.SIGTERM and not slot.worker.log.read_text()
            drained = slot.draining and (status == 0 or unborn)
            if not drained and status != EXIT_SOURCE:
                self._wrong.append(f"a worker ended by itself ({status}): {slot.worker.log}")
            slot.draining = False
            slot.worker = self._birth(slot.proxy)
