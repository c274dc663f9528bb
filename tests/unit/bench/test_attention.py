"""The attention benchmark: what it counts, and that it measures the kernel's right answers."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.worker.bench import attention
from headrace.worker.bench.attention import BATCHES, BLOCK, Batch


@pytest.mark.parametrize("batch", [*BATCHES, Batch("chunks", rows=3, past=40, queries=7)])
def test_pairs_are_those_that_a_causal_mask_leaves(batch: Batch) -> None:
    keys, queries = np.arange(batch.length), np.arange(batch.past, batch.length)
    assert batch.pairs == batch.rows * int((keys <= queries[:, None]).sum())


@pytest.mark.parametrize("batch", BATCHES)
def test_rows_share_their_common_blocks_and_no_other(batch: Batch) -> None:
    tables = attention.block_tables(batch)
    common = batch.shared // BLOCK
    assert (tables[:, :common] == tables[0, :common]).all()
    own = tables[:, common:].flatten()
    blocks = np.concatenate([tables[0, :common], own])
    assert sorted(blocks) == list(range(len(blocks))), "every block has one owner"
    assert not (np.diff(own) == 1).all(), "they do not lie in order"
    step = attention.metadata(batch, tables, [batch.past] * batch.rows, batch.length)
    assert len(set(step.slots.tolist())) == batch.rows * batch.queries
    assert [prefix.num_blocks for prefix in step.prefixes] == [common] * (common > 0)


def test_every_step_is_measured_and_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two layers once. Float32 is off from plain torch by its rounding alone. With int8 keys both
    may round an element of a rotated key to different sides: its score moves by a hundredth, and
    the average over the keys by that share of one key's part."""
    path = tmp_path / "attention.json"
    attention.main(["--layers", "2", "--repeats", "1", "--out", str(path)])
    document = json.loads(path.read_text())
    rows = {(row["batch"], row["kv"]): row for row in document["rows"]}
    assert list(rows) == [(batch.name, kv) for batch in BATCHES for kv in ("float32", "int8")]
    assert (document["threads"], document["repeats"], document["layers"]) == (1, 1, 2)
    shown = capsys.readouterr().out
    for batch in BATCHES:
        for kv, most in (("float32", 2e-5), ("int8", 2e-3)):
            row = rows[batch.name, kv]
            assert row["largest_difference"] < most, row
            assert 0 < row["lowest_cpu_s"] <= row["cpu_s"]
            assert row["wall_s"] > 0
            pairs = batch.pairs * 9 * 2
            assert row["ns_per_pair"] * pairs == pytest.approx(1e9 * row["cpu_s"])
            assert row["gflops"] == pytest.approx(4 * 64 / row["ns_per_pair"])
            assert f"| {batch.name} | {kv} |" in shown
