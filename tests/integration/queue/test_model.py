"""A model of the promises against the real scripts on a real Redis, driven by hypothesis.

Two workers claim, renew, finish, release and reap in any order, producers submit and cancel, time
passes (by the scripts' test clock), replies get lost. After every step: no job has two results,
none is lost or counted twice, and what a worker was told is what Redis shows; at the end every job
can be brought to its one end. The same machine finds the fault when the fence is taken out.
"""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from queue_support import QUEUE, Clock, balance, failure, new_client, new_source, success

from headrace.producer.scripts import Script
from headrace.worker.lease import RedisSource
from headrace.worker.source import ClaimedJob, FinishCode, OutcomeKind, Released

FENCE = (
    "if leased[member] and f.eid == eid and (f.status == 'started' or f.status == 'queued') then"
)
WORKERS = st.sampled_from([0, 1])


class QueueMachine(RuleBasedStateMachine):
    url = ""
    fenced = True

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.client = new_client(self.url)
        self.client.redis.flushall()
        self.clock = Clock(self.client)
        self.sources: list[RedisSource] = [
            new_source(self.url, start=False, lease=60.0) for _ in range(2)
        ]
        if not self.fenced:
            for source in self.sources:
                script = source._scripts["finish"]
                assert FENCE in script.text
                text = script.text.replace(FENCE, "if f.status then")
                source._scripts["finish"] = Script.from_text("finish", text)
        self.clock.drive(self.client, *self.sources)
        # What each worker works on, whether or not the lease is still its own.
        self.working: list[dict[str, ClaimedJob]] = [{}, {}]
        self.sent: list[str] = []
        self.committed: dict[str, str] = {}
        self.cancelled: set[str] = set()

    def teardown(self) -> None:
        try:
            if self.sent:
                self.everything_can_be_ended()
        finally:
            for source in self.sources:
                source.close()
            self.client.close()

    # What may happen

    @rule(target=jobs, priority=st.sampled_from(["high", "normal", "low"]))
    def submit(self, priority: str) -> str:
        job_id = f"j{len(self.sent)}"
        self.client.submit(job_id, job_id=job_id, priority=priority, batch="n")
        self.sent.append(job_id)
        return job_id

    @rule(target=jobs, seconds=st.sampled_from([5, 100]))
    def submit_with_deadline(self, seconds: int) -> str:
        job_id = f"j{len(self.sent)}"
        deadline = self.clock.now + seconds
        self.client.submit(job_id, job_id=job_id, deadline=deadline, batch="n")
        self.sent.append(job_id)
        return job_id

    @rule(job_id=jobs)
    def submit_again_after_a_lost_reply(self, job_id: str) -> None:
        options = self.client.redis.hget(f"rq:job:{job_id}", "origin")
        assert options is not None
        self.client.submit(job_id, job_id=job_id, batch="n")

    @rule(worker=WORKERS, most=st.integers(1, 5), lost=st.booleans())
    def claim(self, worker: int, most: int, lost: bool) -> None:
        source = self.sources[worker]
        before = set(source._held)
        jobs = source.claim(most, 0.0)
        if lost and source._held.keys() != before:
            # The reply never came: the same nonce is asked again, by now perhaps too late.
            source._sequence -= 1
            for job in jobs:
                del source._held[job.execution_id]
            return
        for job in jobs:
            self.working[worker][job.execution_id] = job

    @rule(
        worker=WORKERS,
        share=st.integers(1, 4),
        kind=st.sampled_from([OutcomeKind.SUCCEEDED] * 3 + [OutcomeKind.FAILED, OutcomeKind.RETRY]),
        lost=st.booleans(),
    )
    def finish(self, worker: int, share: int, kind: OutcomeKind, lost: bool) -> None:
        source = self.sources[worker]
        some = list(self.working[worker].values())[:share]
        if not some:
            return
        outcomes = [
            success(job, f"by {job.execution_id}")
            if kind is OutcomeKind.SUCCEEDED
            else failure(job, kind, f"by {job.execution_id}")
            for job in some
        ]
        codes = source.finish(outcomes)
        if lost:
            # Sent again: nothing may change, and what was ours is still ours.
            again = source.finish(outcomes)
            for first, second in zip(codes, again, strict=True):
                if first in (FinishCode.COMMITTED, FinishCode.DEAD):
                    assert second is FinishCode.OURS_EARLIER
        for job, code in zip(some, codes, strict=True):
            del self.working[worker][job.execution_id]
            if code in (FinishCode.COMMITTED, FinishCode.DEAD):
                assert job.job_id not in self.committed, "two results were acknowledged"
                assert job.job_id not in self.cancelled
                self.committed[job.job_id] = job.execution_id

    @rule(worker=WORKERS)
    def heartbeat(self, worker: int) -> None:
        for job in self.sources[worker].heartbeat():
            self.working[worker].pop(job.execution_id, None)

    @rule(worker=WORKERS, share=st.integers(1, 3), front=st.booleans())
    def release(self, worker: int, share: int, front: bool) -> None:
        some = list(self.working[worker].values())[:share]
        self.sources[worker].release([Released(job, b"progress", front) for job in some])
        for job in some:
            del self.working[worker][job.execution_id]

    @rule(worker=WORKERS)
    def checkpoint(self, worker: int) -> None:
        self.sources[worker].checkpoint([(job, b"c") for job in self.working[worker].values()])

    @rule(worker=WORKERS)
    def reap(self, worker: int) -> None:
        self.sources[worker].reap()

    @rule(seconds=st.sampled_from([1, 10, 61]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(worker=WORKERS)
    def forget_everything(self, worker: int) -> None:
        """The process is gone: a new one with a new name takes its place."""
        self.sources[worker].close()
        self.sources[worker] = new_source(self.url, start=False, lease=60.0)
        if not self.fenced:
            self.sources[worker]._scripts["finish"] = self.sources[1 - worker]._scripts["finish"]
        self.clock.sources = []
        self.clock.drive(*self.sources)
        self.working[worker] = {}

    @rule(job_id=jobs)
    def cancel(self, job_id: str) -> None:
        outcome = self.client.cancel(job_id)
        if outcome.cancelled:
            assert job_id not in self.committed
            self.cancelled.add(job_id)

    # What must hold

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        assert balance(self.client) == 0

    @invariant()
    def a_job_has_one_result_at_most_and_it_is_the_acknowledged_one(self) -> None:
        if not self.sent:
            return
        pipeline = self.client.redis.pipeline(transaction=False)
        for job_id in self.sent:
            pipeline.xrange(f"rq:results:{job_id}")
            pipeline.hget(f"rq:job:{job_id}", "status")
        replies = pipeline.execute()
        for at, job_id in enumerate(self.sent):
            entries, status = replies[2 * at], replies[2 * at + 1]
            assert len(entries) <= 1
            terminal = status in (b"finished", b"failed", b"canceled")
            assert bool(entries) == terminal
            if job_id in self.committed:
                assert entries[0][1][b"execution_id"].decode() == self.committed[job_id]
            if job_id in self.cancelled:
                assert status == b"canceled"

    @invariant()
    def leases_and_running_entries_are_the_same(self) -> None:
        r = self.client.redis
        leases = set(r.zrange(f"rq:x:lease:{QUEUE}", 0, -1))
        running: set[bytes] = set()
        for suffix in (".high", "", ".low", ".suspect"):
            running |= set(r.zrange(f"rq:wip:{QUEUE}{suffix}", 0, -1))
        assert leases == running
        assert len(leases) == len(r.keys("rq:execution:*")) == len(r.keys("rq:executions:*"))
        assert len(leases) == len({member.rpartition(b":")[0] for member in leases})

    def everything_can_be_ended(self) -> None:
        """No state is stuck: time, a reaper and one sound worker end every job."""
        source = new_source(self.url, start=False, max_crashes=100)
        if not self.fenced:
            source._scripts["finish"] = self.sources[0]._scripts["finish"]
        self.clock.drive(source)
        for _ in range(200):
            self.clock.advance(400)
            source.reap()
            jobs = source.claim(64, 0.0)
            for job, code in zip(jobs, source.finish([success(j) for j in jobs]), strict=True):
                assert code is FinishCode.COMMITTED
                self.committed[job.job_id] = job.execution_id
            status = self.client.batch("n")
            if status.done == status.total and not source.held:
                break
        assert status.done == status.total == len(self.sent)
        self.a_job_has_one_result_at_most_and_it_is_the_acknowledged_one()
        assert balance(self.client) == 0
        counters = self.client.redis.hmget(
            f"rq:x:n:{QUEUE}", "prompt_tokens", "output_tokens", "bytes"
        )
        assert all(int(value or 0) == 0 for value in counters)
        assert sum(int(v) for v in self.client.redis.hvals("rq:x:ghost")) == self._ghosts()
        source.close()

    def _ghosts(self) -> int:
        r = self.client.redis
        return sum(r.llen(f"rq:queue:{QUEUE}{s}") for s in (".high", "", ".low", ".suspect"))


QUICK = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


def test_no_order_of_moves_loses_doubles_or_strands_a_job(redis_url: str) -> None:
    machine = type("Machine", (QueueMachine,), {"url": redis_url})
    run_state_machine_as_test(machine, settings=QUICK)


def test_the_same_search_finds_the_fault_when_the_fence_is_taken_out(redis_url: str) -> None:
    machine = type("Unfenced", (QueueMachine,), {"url": redis_url, "fenced": False})
    thorough = settings(
        QUICK, max_examples=400, derandomize=True, database=None, phases=[Phase.generate]
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=thorough)


def test_the_clock_of_the_tests_is_off_by_default(redis_url: str) -> None:
    assert replace(new_client(redis_url).settings).clock == ""
    assert new_source(redis_url, start=False).settings.clock == ""
