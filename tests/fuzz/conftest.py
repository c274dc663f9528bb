"""One tiny engine for all fuzz tests."""

from pathlib import Path

import pytest
import serving

from headrace.engine.engine import Engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model: Path = serving.write_model(tmp_path_factory.mktemp("fuzz"))
    return serving.load(model, max_num_seqs=16)
