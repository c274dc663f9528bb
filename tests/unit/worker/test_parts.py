"""The worker's small parts, each by itself."""

import json
import logging
import random
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sequence import Sequence
from headrace.producer import schemas
from headrace.worker import logs, metrics, notice
from headrace.worker.config import default_served_name
from headrace.worker.drain import Drain
from headrace.worker.exporter import exporter
from headrace.worker.http import HttpServer, check_route
from headrace.worker.inflight import InFlight
from headrace.worker.metrics import WorkerMetrics
from headrace.worker.options import BytesType, FiniteType, PortType
from headrace.worker.pulse import Pulse
from headrace.worker.rates import ServiceRates
from headrace.worker.recovery import Recovery
from headrace.worker.retrying import Connection
from headrace.worker.source import ClaimedJob, SourceUnavailable


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_drain_works_until_shortly_before_its_deadline() -> None:
    clock = Clock()
    drain = Drain(25.0, clock)
    assert not drain.requested and not drain.stop_working
    drain.request("SIGTERM")
    assert drain.deadline == 1025.0
    clock.now = 1022.4
    assert not drain.stop_working
    clock.now = 1022.6
    assert drain.stop_working


def test_a_second_request_stops_the_work_at_once() -> None:
    drain = Drain(120.0, Clock())
    drain.request("SIGTERM")
    assert not drain.stop_working
    drain.request("SIGTERM")
    assert drain.stop_working


def test_a_notice_can_only_shorten_the_grace() -> None:
    for own, expected in ((120.0, 25.0), (10.0, 10.0)):
        drain = Drain(own, Clock())
        drain.request("spot notice", 25.0)
        assert drain.deadline == 1000.0 + expected


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ("FALSE", False),
        ("TRUE", True),
        ("", False),
        ('{"action": "terminate", "time": "2026-01-01T00:00:00Z"}', True),
        ('{"DocumentIncarnation": 1, "Events": []}', False),
        ('{"Events": [{"EventType": "Reboot"}]}', False),
        ('{"Events": [{"EventType": "Preempt"}]}', True),
    ],
)
def test_each_clouds_notice_is_understood(body: str, given: bool) -> None:
    assert notice.is_notice(body) is given


def test_a_notice_file_counts_once_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    assert not notice.read_notice(str(file))
    file.touch()
    assert notice.read_notice(str(file))
    assert notice.read_notice(f"file://{file}")


def test_a_notice_url_that_answers_404_is_no_notice() -> None:
    server = HttpServer("127.0.0.1", 0, {"/taken": check_route(lambda: None)})
    server.start()
    base = "http://{}:{}".format(*server.address)
    assert not notice.read_notice(base + "/other")
    assert notice.read_notice(base + "/taken")
    server.stop()
    assert not notice.read_notice(base + "/taken")


def test_a_step_is_a_hang_only_when_it_is_older_than_the_limit() -> None:
    clock = Clock()
    pulse = Pulse(600.0, clock)
    with pulse.beat("engine step"):
        clock.now += 599
        assert pulse.stalled() is None
        clock.now += 2
        assert pulse.stalled() == "engine step"
    assert pulse.stalled() is None


def test_prefill_and_decode_rates_are_told_apart_in_mixed_steps() -> None:
    """100 us a prompt token, 1 ms an output token, 10 % noise: 10,000 and 1,000 a second."""
    source = random.Random(1)
    rates = ServiceRates()
    for _ in range(500):
        prompt = source.choice((0, 0, 256, 1024))
        output = source.randint(1, 64)
        seconds = (prompt * 1e-4 + output * 1e-3) * source.uniform(0.9, 1.1)
        rates.observe(prompt, output, seconds)
    assert rates.prefill == pytest.approx(10_000, rel=0.1)
    assert rates.decode == pytest.approx(1_000, rel=0.1)


def test_steps_that_are_all_alike_still_give_a_rate() -> None:
    rates = ServiceRates()
    for _ in range(10):
        rates.observe(0, 32, 0.1)
    assert rates.decode == pytest.approx(320)
    assert rates.prefill == 0.0


def flight(name: str) -> InFlight:
    job = ClaimedJob(name, name, "q", b"")
    sequence = Sequence(name, [1], SamplingParams())
    return InFlight(job, schemas.Request(prompt="a"), [sequence], 0.0)


@pytest.mark.parametrize("culprit", range(16))
def test_one_bad_job_among_sixteen_is_found_in_four_halvings(culprit: int) -> None:
    """The engine raises whenever the bad one is in the batch: 1 + log2(16) = 5 raised steps."""
    flights = [flight(str(i)) for i in range(16)]
    bad = flights[culprit]
    recovery, batch, raised, found = Recovery(), list(flights), 0, None
    while found is None:
        if bad in batch:
            raised += 1
            found = recovery.split(batch)
            waiting = recovery.waiting
            batch = [f for f in batch if f not in waiting and f is not found]
        else:
            for member in batch:
                member.sequences[0].output_token_ids.append(1)
            recovery.observe(set())
        batch += recovery.next_group()
    assert found is bad
    assert raised == 5
    while recovery.active:
        batch += recovery.next_group()
        for member in batch:
            member.sequences[0].output_token_ids.append(1)
        recovery.observe(set())
    assert {f.job.job_id for f in batch} == {f.job.job_id for f in flights if f is not bad}


def test_an_absent_queue_is_waited_for_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    connection = Connection(WorkerMetrics("m", registry))
    tries = []

    def call() -> str:
        tries.append(registry.get_sample_value("headrace_worker_source_available"))
        if len(tries) < 4:
            raise SourceUnavailable("gone")
        return "back"

    with caplog.at_level(logging.INFO, logger="headrace"):
        assert connection.insist(call, give_up=lambda: False, sleep=lambda _: None) == "back"
    assert tries == [1, 0, 0, 0]
    assert registry.get_sample_value("headrace_worker_source_available") == 1
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


def test_every_label_set_exists_before_anything_happened() -> None:
    registry = WorkerMetrics("m").registry
    for outcome in metrics.OUTCOMES:
        labels = {"outcome": outcome}
        assert registry.get_sample_value("headrace_jobs_completed_total", labels) == 0
    for phase in metrics.PHASES:
        assert (
            registry.get_sample_value("headrace_worker_cold_start_seconds", {"phase": phase}) == 0
        )


def test_names_have_our_prefix_and_only_aliases_have_colons() -> None:
    for name in metrics.all_names():
        assert name.startswith(("headrace_", "vllm:", "rq_jobs", "process_")), name
        assert ":" not in name or name.startswith("vllm:")


def test_the_names_that_users_of_vllm_know_carry_our_values() -> None:
    worker = WorkerMetrics("m")
    worker.generation_tokens.inc(7)
    worker.first_token.observe(0.2)
    get = worker.registry.get_sample_value
    assert get("vllm:generation_tokens_total", {"model_name": "m"}) == 7
    assert get("vllm:time_to_first_token_seconds_count", {"model_name": "m"}) == 1
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_sum",
    ):
        assert get(name, {"model_name": "m"}) == 0, name


def test_logs_are_json_where_there_is_no_terminal() -> None:
    record = logging.makeLogRecord(
        {"name": "headrace.worker.loop", "levelname": "INFO", "msg": "failed: %s", "args": ("x",)}
    )
    record.job_id = "j1"
    line = json.loads(logs.JsonFormatter().format(record))
    assert (line["message"], line["job_id"], line["level"]) == ("failed: x", "j1", "info")
    assert "job_id=j1" in logs.TextFormatter().format(record)


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("Org/Name-1B", "name-1b"),
        ("/models/Name-1B.Q4_1.gguf", "name-1b.q4_1"),
        ("/models/folder/", "folder"),
    ],
)
def test_the_served_name_is_the_last_part_of_the_path(model: str, served: str) -> None:
    assert default_served_name(model) == served


def test_sizes_and_ports_of_the_command_line() -> None:
    assert BytesType().convert("2G", None, None) == 2 << 30
    assert BytesType().convert("1.5MiB", None, None) == 3 << 19
    assert BytesType().convert("4096", None, None) == 4096
    assert PortType().convert("tcp://10.0.0.1:80", None, None) == 0
    assert PortType().convert("9151", None, None) == 9151


@pytest.mark.parametrize("text", ["nan", "inf", "infG", "0", "-1", "1e999", "many", ""])
def test_a_size_that_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        BytesType().convert(text, None, None)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "0.5", "soon"])
def test_a_time_that_no_clock_reaches_is_refused(text: str) -> None:
    """click compares nan with the lowest value allowed, and nan is not below it."""
    with pytest.raises(click.BadParameter):
        FiniteType(1).convert(text, None, None)
    assert FiniteType(1).convert("1.5", None, None) == 1.5


@pytest.mark.parametrize(
    "option, value",
    [
        ("--acceptable-wait", "-1"),
        ("--cold-start", "nan"),
        ("--prefill-rate", "-5"),
        ("--decode-rate", "inf"),
        ("--max-replicas", "-1"),
    ],
)
def test_an_exporter_that_could_never_answer_does_not_start(option: str, value: str) -> None:
    done = CliRunner().invoke(exporter, [option, value, "--redis-url", "redis://localhost:1/0"])
    assert done.exit_code == 2 and option in done.output
