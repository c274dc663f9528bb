"""Which graphs are recorded, and which one a batch takes. No torch device is needed for it."""

import pytest
import torch

from headrace.engine.accelerator import HostAccelerator
from headrace.engine.graphs import CUDAGraphRunner, GraphReport, graph_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 100, 256, 300, 1024, 1500])
def test_every_batch_has_a_graph_and_little_padding(most: int) -> None:
    """Up to 8 rows the next power of two; then at most 7 rows of padding to 256, 15 to 512, 31 to
    1024 and 63 above."""
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    runner = CUDAGraphRunner(
        HostAccelerator(), sizes, lambda rows, shared: torch.zeros(rows), False
    )
    for rows in range(1, most + 1):
        size = runner.size_for(rows)
        assert size is not None and size >= rows
        allowed = rows if rows < 8 else 8 if rows <= 256 else 16 if rows <= 512 else 32
        assert size - rows < (allowed if rows <= 1024 else 64)
    assert runner.size_for(most + 1) is None


def test_the_grid_of_256_rows_has_35_graphs() -> None:
    """1, 2, 4 and the 32 multiples of 8 up to 256."""
    assert graph_sizes(256) == [1, 2, 4, *range(8, 257, 8)]


def test_a_batch_replays_the_graph_of_its_size_and_kind() -> None:
    recorded: list[tuple[int, bool]] = []

    def decode(rows: int, shared: bool) -> torch.Tensor:
        recorded.append((rows, shared))
        return torch.full((rows,), float(shared))

    runner = CUDAGraphRunner(HostAccelerator(), [1, 2, 4], decode, shared=True)
    report = runner.capture()
    assert (report.num_graphs, report.largest) == (5, 4)  # no prefix is shared by one row
    assert "5 for decodes of up to 4 rows" in str(report)
    recorded.clear()
    assert runner.replay(4, True).tolist() == [1.0] * 4
    assert runner.replay(2, False).tolist() == [0.0] * 2
    assert recorded == [(4, True), (2, False)]


def test_no_graphs_are_reported_with_the_reason() -> None:
    assert str(GraphReport(reason="enforce_eager")) == "none (enforce_eager)"
