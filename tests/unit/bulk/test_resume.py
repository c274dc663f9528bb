"""What a crash leaves on disk is read back rightly."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.producer.bulk.errors import BadLine, UnusableOutput
from headrace.producer.bulk.ledger import Ledger
from headrace.producer.bulk.ordered import InOrder
from headrace.producer.bulk.output import bad_line, result_line
from headrace.producer.bulk.resume import cut_torn_end, drop_retryable, read_ended
from headrace.producer.bulk.sidecar import (
    Fingerprint,
    Sidecar,
    new_sidecar,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from headrace.producer.bulk.writer import AppendFile, OutputLock, errors_path
from headrace.producer.run_settings import run_settings
from headrace.producer.schemas import Choice, Failure, Result


def good(custom_id: str) -> bytes:
    result = Result(job_id="j", choices=[Choice(index=0, text="x", finish_reason="stop")])
    return result_line(custom_id, result)[0]


def failed(custom_id: str, code: str, retryable: bool = False) -> bytes:
    failure = Failure(code=code, message="m", retryable=retryable)
    return result_line(custom_id, Result(job_id="j", failure=failure))[0]


@given(st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_wherever_a_write_was_torn_only_whole_lines_remain(cut: int) -> None:
    whole = good("a") + good("b") + good("c")
    cut = min(cut, len(whole))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.jsonl"
        path.write_bytes(whole[:cut])
        removed = cut_torn_end(path)
        kept = path.read_bytes()
    assert kept == whole[: len(kept)]
    assert kept == b"" or kept.endswith(b"\n")
    assert removed == cut - len(kept) < len(good("a"))


def test_zeros_at_the_end_after_a_power_loss_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(good("a") + b"\0" * 4096)
    cut_torn_end(path)
    assert path.read_bytes() == good("a")


def test_damage_in_the_middle_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(good("a") + b"not ours\n" + good("b"))
    before = path.read_bytes()
    with pytest.raises(UnusableOutput) as raised:
        cut_torn_end(path)
    assert raised.value.line == 2
    assert path.read_bytes() == before


def test_a_duplicate_line_number_does_not_end_its_namesake(tmp_path: Path) -> None:
    """Line 5 repeats the custom_id of line 1: quarantining it must not mark line 1 as done."""
    out, errors = tmp_path / "o.jsonl", tmp_path / "e.jsonl"
    out.write_bytes(good("b"))
    errors.write_bytes(
        bad_line("run", BadLine(5, "duplicate_custom_id", "m", "a"))
        + bad_line("run", BadLine(6, "invalid_json_line", "m"))
        + failed("c", "invalid_request")
    )
    ended = read_ended(out, errors)
    assert ended.bad_lines == {5, 6}
    assert "a" not in ended.custom_ids
    assert "b" in ended.custom_ids and "c" in ended.custom_ids
    assert (ended.succeeded, ended.failed) == (1, 3)


def test_retry_errors_takes_out_only_what_may_succeed_next_time(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    keep = [
        failed("a", "invalid_request"),
        bad_line("run", BadLine(2, "invalid_json_line", "m")),
        failed("dead", "dead"),
    ]
    path.write_bytes(
        keep[0] + failed("b", "worker_lost") + keep[1] + failed("c", "x", True) + keep[2]
    )
    assert drop_retryable(path) == 2
    assert path.read_bytes() == b"".join(keep)
    path.write_bytes(failed("b", "expired"))
    assert drop_retryable(path) == 1
    assert not path.exists()
    assert drop_retryable(path) == 0


def test_sidecar_survives_and_says_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert read_sidecar(out) is None
    sidecar = new_sidecar(Fingerprint("abc", "m", {"seed": 1}))
    write_sidecar(out, sidecar)
    again = read_sidecar(out)
    assert again == sidecar
    assert again.fingerprint.differences(Fingerprint("abc", "m", {"seed": 1})) == []
    said = " ".join(again.fingerprint.differences(Fingerprint("xyz", "n", {"seed": 2})))
    for word in ("input", "m then, n now", "seed=1 then, seed=2 now"):
        assert word in said
    assert Sidecar(sidecar.fingerprint, "r", 2).job_prefix == "rr2"
    sidecar_path(out).write_text("{}")
    with pytest.raises(UnusableOutput):
        read_sidecar(out)


def test_a_run_that_never_came_to_an_answer_does_not_bind_its_output(tmp_path: Path) -> None:
    """A mistyped model is put right by typing the command again; one answer, or one failure in an
    error file of whatever name, and another model is refused."""
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    wrong, right = Fingerprint("abc", "modle"), Fingerprint("abc", "model")
    other = Fingerprint("abc", "other", settings={"error file": "failed.jsonl"})
    for typed in (wrong, other, right):
        with Ledger(out, errors, typed) as ledger:
            assert read_sidecar(out) == ledger.sidecar and ledger.sidecar.fingerprint == typed
    out.write_bytes(good("a"))
    with pytest.raises(UnusableOutput, match="model then, modle now") as raised:
        Ledger(out, errors, wrong)
    assert raised.value.code == "other_run" and read_sidecar(out) == ledger.sidecar
    out.write_bytes(b"")
    write_sidecar(out, new_sidecar(other))
    (tmp_path / "failed.jsonl").write_bytes(failed("a", "expired"))
    with pytest.raises(UnusableOutput, match="other then, model now"):
        Ledger(out, errors, right)


def test_one_run_per_output(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with OutputLock(out), pytest.raises(UnusableOutput) as raised, OutputLock(out):
        pass
    assert raised.value.code == "locked"
    with OutputLock(out):
        pass


def test_appending_goes_on_after_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for name in ("a", "b"):
        file = AppendFile(path)
        file.add(good(name))
        file.sync()
        file.close()
    assert [json.loads(line)["custom_id"] for line in path.open()] == ["a", "b"]
    unused = AppendFile(tmp_path / "none")
    unused.close()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [
        ("o.jsonl", "o.errors.jsonl"),
        ("o", "o.errors.jsonl"),
        ("a.b.jsonl", "a.b.errors.jsonl"),
    ],
)
def test_error_file_is_named_after_the_output(given_name: str, expected: str) -> None:
    assert errors_path(Path(given_name)).name == expected


@given(st.permutations(range(30)), st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_in_order_gives_input_order_within_its_memory(order: list[int], memory: int) -> None:
    buffer = InOrder(memory)
    out: list[bytes] = []
    for position in order:
        line = b"%d:" % position + b"x" * position
        out += buffer.put(position, line)
        assert buffer.bytes_in_memory <= memory
    buffer.close()
    assert out == [b"%d:" % n + b"x" * n for n in range(30)]
    assert buffer.waiting == 0


def test_in_order_refuses_a_position_twice() -> None:
    buffer = InOrder()
    assert buffer.put(1, b"b") == []
    with pytest.raises(ValueError, match="twice"):
        buffer.put(1, b"b")
    assert buffer.put(0, b"a") == [b"a", b"b"]
    with pytest.raises(ValueError, match="twice"):
        buffer.put(0, b"a")


def test_what_decides_answers_is_part_of_what_a_resume_must_share(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(b"a" * 10_000)
    out, errors = tmp_path / "o.jsonl", tmp_path / "o.errors.jsonl"

    def fingerprint(*arguments: str, **variables: str) -> Fingerprint:
        found = run_settings(out, errors, str(model), arguments, variables)
        return Fingerprint("abc", "m", {}, found)

    plain = fingerprint("--num-threads", "2", "--port", "0")
    write_sidecar(out, new_sidecar(plain))
    again = read_sidecar(out)
    assert again is not None and again.fingerprint == plain
    assert plain.differences(fingerprint("--num-threads", "1")) == []
    for other, said in (
        (fingerprint("--dtype", "float32"), "the worker's --dtype (none then, float32 now)"),
        (fingerprint("--quantization=int8"), "the worker's --quantization (none then, int8 now)"),
        (fingerprint("--deterministic"), "the worker's --deterministic (none then, on now)"),
        (fingerprint(HEADRACE_DTYPE="float32"), "the worker's --dtype (none then, float32 now)"),
    ):
        assert plain.differences(other) == [said]
    (model / "weights").write_bytes(b"b" * 10_000)
    (said,) = plain.differences(fingerprint())
    assert said.startswith("the content of the model's files")
