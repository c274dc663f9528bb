"""One tiny model and one nursery of workers for all crash tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import serving
from crash_support import ForkedWorker
from nursery import Nursery

from headrace.engine.engine import Engine

Start = Callable[..., ForkedWorker]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("crash"))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def engine(small_model: Path) -> Engine:
    """Tells what an uninterrupted run answers."""
    return serving.load(small_model, max_num_seqs=16)


@pytest.fixture
def start(nursery: Nursery, redis_url: str, small_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts workers on the test's Redis; ends what is left of them."""
    workers: list[ForkedWorker] = []

    def begin(
        *arguments: str, url: str = redis_url, model: Path = small_model, **environment: str
    ) -> ForkedWorker:
        log = tmp_path / f"worker-{len(workers)}.log"
        workers.append(ForkedWorker(nursery, url, model, log, *arguments, **environment))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.end()
