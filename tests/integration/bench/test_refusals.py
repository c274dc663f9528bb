"""What a benchmark cannot measure, or not keep, is told in a line before anything is measured."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.producer import cli


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench", *arguments])


@pytest.mark.parametrize("mode", [[], ["--schemes"], ["--profile"], ["--cold-start"]])
def test_a_model_that_is_not_there_is_told_in_a_line(mode: list[str], tmp_path: Path) -> None:
    done = bench(*mode, "--model", "./nope", "--out", str(tmp_path))
    assert done.exit_code == 2, done.output
    assert "nope does not exist" in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("mode", [[], ["--ablate"], ["--cold-start"], ["--load"]])
def test_an_output_folder_that_cannot_be_written_is_told_before_the_model_is_looked_for(
    mode: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    done = bench(*mode, "--model", "./nope", "--out", str(tmp_path / "file" / "inside"))
    assert done.exit_code == 2
    told = done.output + "".join(capfd.readouterr())
    assert "Not a directory" in told and "nope does not exist" not in told


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rate", "nan"),
        ("--rate", "inf"),
        ("--duration", "inf"),
        ("--drain", "nan"),
        ("--p99", "nan"),
        ("--temperature", "nan"),
        ("--top-p", "nan"),
        ("--threads", "9" * 30),
        ("--kv-cache-memory", "1e308G"),
    ],
)
def test_a_number_that_means_nothing_is_refused_by_name(option: str, value: str) -> None:
    done = bench(option, value)
    assert done.exit_code == 2
    assert f"'{option}'" in done.output
