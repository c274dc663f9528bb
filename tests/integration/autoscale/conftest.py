"""One tiny model and one exporter for the loops."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import serving
from prometheus_support import ExporterProcess


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("autoscale"))


@pytest.fixture
def exporter(redis_url: str, tmp_path: Path) -> Iterator[ExporterProcess]:
    exporter = ExporterProcess(redis_url, tmp_path / "exporter.log", "exporter", "--queue=tiny")
    yield exporter
    exporter.stop()
