"""When leases are renewed and when other workers' jobs are taken back."""

import time
from collections.abc import Iterator

import pytest
from serving import wait_until

from headrace.worker import keeper as module
from headrace.worker.bench.memory import MemorySource
from headrace.worker.keeper import Keeper
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.pulse import Pulse
from headrace.worker.retrying import Connection
from headrace.worker.source import ClaimedJob, WorkerFacts, WorkerState

FACTS = WorkerFacts(model="m", state=WorkerState.READY, queues=("q",))


class Watched(MemorySource):
    """Notes what the keeper asks for, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, float]] = []

    def heartbeat(self) -> list[ClaimedJob]:
        lost = super().heartbeat()
        self.log.append(("heartbeat", time.monotonic()))
        return lost

    def reap(self) -> int:
        taken = super().reap()
        self.log.append(("reap", time.monotonic()))
        return taken

    def first_reap_after(self, moment: float) -> float:
        """Seconds from `moment`; -1 while there is none."""
        return next((at - moment for what, at in self.log if what == "reap" and at > moment), -1.0)


@pytest.fixture
def source() -> Watched:
    return Watched()


@pytest.fixture
def keeper(source: Watched, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    monkeypatch.setattr(module, "START_GRACE", 0.05)
    metrics = WorkerMetrics("m")
    keeper = Keeper(
        source,
        source,
        metrics,
        Connection(metrics),
        Pulse(600.0),
        facts=lambda: FACTS,
        on_lost=lambda jobs: None,
        heartbeat_seconds=0.5,
        reap_seconds=0.1,
        outage_grace=0.8,
    )
    keeper.start()
    yield keeper
    keeper.stop()


def test_after_an_outage_the_others_have_time_to_renew_before_anyone_reaps(
    keeper: Keeper, source: Watched
) -> None:
    wait_until(lambda: source.first_reap_after(0.0) > 0, "it reaps")
    source.down = True
    time.sleep(0.7)
    source.down = False
    back = time.monotonic()
    wait_until(lambda: source.first_reap_after(back) > 0, "it reaps again")
    # The last unanswered call was at most half a second before.
    assert source.first_reap_after(back) > 0.2
    renewed = [at for what, at in source.log if what == "heartbeat" and at > back]
    assert renewed[0] - back < source.first_reap_after(back)


def test_a_machine_that_slept_reaps_nothing_until_the_others_had_time_to_renew(
    keeper: Keeper, source: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: source.first_reap_after(0.0) > 0, "it reaps")
    slept = time.time
    monkeypatch.setattr(module.time, "time", lambda: slept() + 3600.0)
    time.sleep(0.15)
    woke = time.monotonic()
    wait_until(lambda: source.first_reap_after(woke) > 0, "it reaps again")
    assert source.first_reap_after(woke) > 0.4


def test_own_leases_are_renewed_right_before_every_reap(keeper: Keeper, source: Watched) -> None:
    """Whoever was stopped for longer than a lease would take itself for dead otherwise."""
    wait_until(lambda: sum(what == "reap" for what, _ in source.log) > 3, "it reaps")
    for before, (what, _) in zip(source.log, source.log[1:], strict=False):
        if what == "reap":
            assert before[0] == "heartbeat"
