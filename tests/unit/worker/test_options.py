"""Options of a worker that no machine could serve are refused before anything is loaded."""

import signal
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from headrace.engine.config import EngineConfig
from headrace.worker.cli import worker
from headrace.worker.config import WorkerConfig
from headrace.worker.process import WorkerProcess
from headrace.worker.start import EXIT_MODEL, EXIT_PORT, StartFailed


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-num-seqs", "0"),
        ("--max-num-seqs", "9" * 30),
        ("--max-num-batched-tokens", "0"),
        ("--max-num-batched-tokens", "9" * 30),
        ("--max-model-len", "1"),
        ("--block-size", "0"),
        ("--block-size", "9" * 30),
        ("--num-threads", "9" * 30),
        ("--kv-cache-memory", "0"),
        ("--kv-cache-memory", "-2G"),
        ("--kv-cache-memory", "nan"),
        ("--kv-cache-memory", "1e308G"),
        ("--kv-cache-memory", "9" * 400),
        ("--gpu-memory-utilization", "nan"),
        ("--gpu-memory-utilization", "1.5"),
        ("--dtype", "int8"),
        ("--kv-cache-dtype", "int4"),
        ("--lease-seconds", "1e300"),
        ("--lease-seconds", "inf"),
        ("--port", "99999"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_by_name_with_status_2(
    option: str, value: str
) -> None:
    done = CliRunner().invoke(worker, ["--model", "nowhere", option, value])
    assert done.exit_code == 2, done.output
    assert f"'{option}'" in done.output
    assert "Traceback" not in done.output


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A WorkerProcess takes the process's signals."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
@pytest.mark.parametrize("port", [None, 0])
def test_a_host_that_cannot_be_listened_on_says_so(host: str, port: int | None) -> None:
    config = WorkerConfig(EngineConfig(model="m"), "redis://localhost:1/0", host=host, port=port)
    with pytest.raises(StartFailed, match="choose another --port or --host") as refused:
        WorkerProcess(config)._start_http()
    assert refused.value.status == EXIT_PORT


def test_memory_that_is_too_short_for_loading_is_said_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = WorkerProcess(WorkerConfig(EngineConfig(model="m"), "redis://localhost:1/0"))
    assert process._report(MemoryError("Unable to allocate 9 TiB")) == EXIT_MODEL
    (told,) = caplog.records
    assert "Unable to allocate 9 TiB" in told.message and "--kv-cache-memory" in told.message
    assert told.exc_info is None
