"""One tiny engine for all fuzz tests."""

from pathlib import Path

import pytest
import serving

from headrace.engine.engine import Engine
from headrace.worker.start import warm_up


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model: Path = serving.write_model(tmp_path_factory.mktemp("fuzz"))
    engine = serving.load(model, max_num_seqs=16)
    # As a worker does before its first claim: what a first step loads is loaded.
    warm_up(engine)
    return engine
