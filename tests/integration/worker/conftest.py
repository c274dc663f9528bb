"""One tiny model for all tests of the worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import serving

from headrace.engine.engine import Engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("worker"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    """Empty when a test gets it, balanced when a test leaves it."""
    engine = serving.load(model, max_num_seqs=16)
    yield engine
    engine.check_integrity()
