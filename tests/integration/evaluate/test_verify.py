"""`headrace verify` as its user runs it, on tiny models through the real engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tiny import write_checkpoint

from headrace.engine.evaluate.cli import verify

SMALL = ["--kv-cache-memory", "4M", "--num-threads", "1", "--max-num-seqs", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("verify") / "tiny", "llama"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The ferry left the harbour at seven in the morning. " * 8)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(verify, [*arguments, *SMALL])


def own_answers(model: str, text: str, folder: Path) -> str:
    """Questions whose right answers are what the model itself says: any change loses."""
    path = folder / "questions.jsonl"
    rows: list[dict[str, Any]] = [
        {
            "id": f"q{index}",
            "category": "letters" if index % 2 else "digits",
            "prompt": f"{index} and {chr(97 + index)} make",
            "max_tokens": 12,
            "score": {"type": "regex", "pattern": "[\\s\\S]"},
        }
        for index in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(
        *(model, "--quantization", "int8", "--questions", str(path), "--text", text, "--json"),
        "--max-drop=1",
    )
    answers = json.loads(result.stdout)["tried"][0]["reference"]["answers"]
    for row, answer in zip(rows, answers, strict=True):
        row["score"] = {"type": "exact", "answer": answer["text"] or "?"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def questions(model: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return own_answers(model, text, tmp_path_factory.mktemp("questions"))


def test_a_close_scheme_holds_and_a_coarse_one_does_not(
    model: str, questions: str, text: str, tmp_path: Path
) -> None:
    """The same weights as floats are the same model; three bits of random ones are another."""
    same = run(
        *(model, "--quantization", "float32", "--against-quantization", "float"),
        *("--questions", questions, "--text", text, "--json"),
    )
    assert same.exit_code == 0, same.output
    found = json.loads(same.stdout)["tried"][0]
    assert found["accuracy"]["lost"] == found["accuracy"]["gained"] == 0
    assert found["token_agreement"] == {"identical": 1.0, "shared": 1.0}
    assert found["candidate"]["distance"]["kl_max"] < 1e-9
    coarse = run(
        *(model, "--quantization", "int3-g32", "--questions", questions, "--text", text),
        *("--out", str(tmp_path / "out")),
    )
    assert coarse.exit_code == 1, coarse.output
    assert coarse.stdout.startswith("# tiny int3-g32 against tiny float: does not hold")
    document = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert document["chosen"] is None
    candidate = document["tried"][0]["candidate"]
    assert document["tried"][0]["accuracy"]["lost"] > 5
    assert candidate["distance"]["kl_mean"] > 0.01
    assert candidate["cost"]["weights"]["linear"] < 0.3 * 4 * 90112
    assert candidate["cost"]["kv_bytes_per_token"] == 512
    assert "does not hold" in (tmp_path / "out" / "verify.md").read_text()
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_fallback_prints_the_first_that_holds_and_what_it_passed_over(
    model: str, questions: str, text: str, tmp_path: Path
) -> None:
    """A scheme that cannot run is passed over by name."""
    result = run(
        *(model, "--fallback", "int3-g32,gptq,fp32,int8", "--questions", questions),
        *("--text", text, "--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "fp32\n"
    assert "tiny int3-g32: does not hold" in result.stderr
    assert "tiny gptq: cannot run: quantization 'gptq' is not what" in result.stderr
    document = json.loads((tmp_path / "verify.json").read_text())
    assert document["chosen"] == "fp32"
    assert [one["holds"] for one in document["tried"]] == [False, False, True]
    none = run(model, "--fallback", "int3-g32", "--questions", questions, "--text", text)
    assert none.exit_code == 1 and none.stdout == "" and "none of them holds" in none.stderr


def test_eight_bit_keys_and_values_can_be_the_only_change(
    model: str, questions: str, text: str
) -> None:
    result = run(
        *(model, "--against-quantization", "float", "--kv-cache-dtype", "int8"),
        *("--questions", questions, "--text", text, "--json", "--max-drop", "1"),
    )
    found = json.loads(result.stdout)["tried"][0]
    assert found["label"] == "tiny, kv int8"
    assert found["candidate"]["cost"]["kv_bytes_per_token"] == 2 * 2 * 2 * (16 + 4)
    assert 0 < found["candidate"]["distance"]["kl_mean"] < 0.1


def test_the_shipped_questions_and_text_are_the_default(model: str) -> None:
    """A random model knows nothing; whatever it says must be scored."""
    result = run(
        *(model, "--quantization", "int8", "--max-tokens", "4", "--text-tokens", "64", "--json"),
        *("--max-drop", "1", "--significance", "0.0001"),
    )
    found = json.loads(result.stdout)["tried"][0]
    assert found["accuracy"]["total"] == 50
    assert found["candidate"]["style"]["json_asked"] == 12
    assert found["candidate"]["text"]["num_tokens"] == 63


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "both sides are the same"),
        (["--quantization", "int8", "--fallback", "int4-g32"], "name two candidates"),
        (["--fallback", " , "], "names nothing"),
        (["--quantization", "int8", "--questions", "missing.jsonl"], "cannot be read"),
        (["--quantization", "int8", "--text", "missing.txt"], "cannot be read"),
        (["--quantization", "int8", "--kv-cache-memory", "lots"], "--kv-cache-memory"),
        (["--against", "/nowhere/model"], "/nowhere/model does not exist"),
        (["--against", "/nowhere/model", "--quantization", "int5"], "'int5' is not supported"),
        (["--fallback", "int8,int2-g32"], "'int2-g32' is not supported"),
    ],
)
def test_bad_input_is_named_and_ends_with_status_2(
    model: str, arguments: list[str], message: str
) -> None:
    extra = SMALL if "--kv-cache-memory" not in arguments else []
    chosen = arguments or ["--against-quantization", "none", "--quantization", "none"]
    result = CliRunner().invoke(verify, [model, *extra, *chosen])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_bad_question_lines_are_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "x", "score": {"type": "exact", "answer": "y"}}\n{"prompt": "x"}\n')
    result = run("/nowhere/model", "--quantization", "int8", "--questions", str(path))
    assert result.exit_code == 2
    assert "line 2: score is None" in result.stderr
