"""Shared fixtures. Helpers that tests import live in tests/support.

Triton reads TRITON_INTERPRET when a kernel is defined, so it is set here, before any test imports
one: without a GPU the kernels run in Triton's interpreter. In the base installation, which has no
torch, the tests of producer and queue run.
"""

import importlib.util
import os
from collections.abc import Iterator

import headrace.engine  # noqa: F401 (first: it tells torch's threads how long to spin)

# isort: split
import pytest
from redis_support import RedisServer

if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One private Redis for the whole session."""
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The session's Redis, emptied."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url
