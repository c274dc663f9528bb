"""One tiny model and one small file of prompts for all tests of the benchmark."""

import json
from pathlib import Path

import pytest
import serving


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six requests that share a beginning, with answers of 4 to 9 tokens."""
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    head = "You answer in one word, as a shop for garden tools would. "
    path.write_text(
        "".join(
            json.dumps({"prompt": f"{head}Question {i}: rake or hoe?", "max_tokens": 4 + i}) + "\n"
            for i in range(6)
        )
    )
    return path
