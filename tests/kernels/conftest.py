"""Every kernel test runs with poisoned allocations: an output that is not written stays NaN."""

from collections.abc import Iterator

import numpy as np
import pytest
from full_run import FullRun
from kernel_support import DEVICE, FULL, empty_is_poison
from triton_interpreter import repair

if DEVICE.type != "cuda":
    repair()


@pytest.hookimpl(trylast=True)  # the terminal's writer is there then
def pytest_configure(config: pytest.Config) -> None:
    if FULL:
        config.pluginmanager.register(FullRun(config))


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    # exp(-inf), log(0) and their like are meant; a GPU says nothing about them either.
    with empty_is_poison(), np.errstate(all="ignore"):
        yield
