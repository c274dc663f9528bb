"""Safetensors files written piece by piece: read back by the format's own library, whole or not
there."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.engine.quantize.tensor_file import header_of, write_tensors

TENSORS = {
    "half": torch.arange(6, dtype=torch.float16).view(2, 3),
    "codes": torch.tensor([-128, 127], dtype=torch.int8),
    "turned": torch.arange(12, dtype=torch.float32).view(3, 4).t(),
}


def test_a_file_is_read_back_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_tensors(path, header_of(TENSORS), iter(TENSORS.values()), {"made": "here"})
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype


@pytest.mark.parametrize(
    "tensors",
    [
        [TENSORS["half"], TENSORS["codes"].float(), TENSORS["turned"]],
        [TENSORS["half"], TENSORS["codes"], TENSORS["turned"].t()],
        [TENSORS["half"], TENSORS["codes"]],
        [*TENSORS.values(), TENSORS["half"]],
    ],
    ids=["another type", "another shape", "too few", "too many"],
)
def test_tensors_that_are_not_the_headers_leave_no_file(
    tmp_path: Path, tensors: list[torch.Tensor]
) -> None:
    """Written, they would shift everything behind them, and no reader could tell."""
    path = tmp_path / "m.safetensors"
    with pytest.raises(ValueError):
        write_tensors(path, header_of(TENSORS), tensors, {})
    assert not path.exists()
