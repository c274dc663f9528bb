"""`headrace run` with nothing but a file and a model: private Redis, worker process, our engine."""

import json
import re
from pathlib import Path

import tiny
from bulk_support import headrace, read_lines, text_of, write_lines
from openai.types.chat import ChatCompletion

LIMIT = 128


def chat(custom_id: str, content: str, **body: object) -> dict[str, object]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **body},
    }


def test_bad_requests_fail_alone_and_typed_and_the_batch_goes_on(tmp_path: Path) -> None:
    model = tmp_path / "Tiny-Model"
    tiny.write_checkpoint(model)
    good = [chat(f"good-{i}", f"question {i}", temperature=0) for i in range(12)]
    bad = {
        "long": chat("long", "x" * 500),
        "hot": chat("hot", "a", temperature=-1),
        "top_p": chat("top_p", "a", top_p=1.5),
        "stop_id": chat("stop_id", "a", stop_token_ids=[999_999]),
        "bias": chat("bias", "a", logit_bias={"999999": 1.0}),
        "tools": chat("tools", "a", tools=[{"type": "function"}]),
        "model": chat("model", "a", model="another-model"),
        "empty": {"custom_id": "empty", "url": "/v1/chat/completions", "body": {"messages": []}},
    }
    lines = [*good[:6], *bad.values(), "not json", *good[6:]]
    source = write_lines(tmp_path / "in.jsonl", lines)
    out = tmp_path / "out.jsonl"
    worker = ["--num-threads", "1", "--kv-cache-memory", "16M", "--dtype", "float32", "--port", "0"]
    worker += ["--max-model-len", str(LIMIT)]
    done = headrace("run", source, "-o", out, "--model", model, "--json", "--", *worker)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["model"], told["succeeded"], told["failed"]) == ("tiny-model", 12, 9)
    assert told["prompt_tokens"] > 0 and told["completion_tokens"] > 0
    answers = {entry["custom_id"]: entry for entry in read_lines(out)}
    assert set(answers) == {line["custom_id"] for line in good}
    for entry in answers.values():
        body = ChatCompletion.model_validate(entry["response"]["body"], strict=True)
        assert body.model == "tiny-model" and isinstance(text_of(entry), str)
        assert body.usage is not None and body.usage.completion_tokens <= 4
    failed = read_lines(tmp_path / "out.errors.jsonl")
    rejected = {e["custom_id"]: e["response"] for e in failed if e["response"]}
    assert set(rejected) == {"long", "hot", "top_p", "stop_id", "bias"}
    for name, param in (("hot", "temperature"), ("top_p", "top_p"), ("stop_id", "stop_token_ids")):
        assert rejected[name]["status_code"] == 400
        assert rejected[name]["body"]["error"]["param"] == param
    too_long = rejected["long"]["body"]["error"]
    assert str(LIMIT) in too_long["message"], "it says the limit"
    assert any(str(n) in too_long["message"] for n in range(500, 560)), "and the length"
    never = {e["error"]["code"]: e["error"] for e in failed if e["error"]}
    assert set(never) == {
        "unsupported_parameter",
        "model_mismatch",
        "invalid_request",
        "invalid_json_line",
    }
    assert never["unsupported_parameter"]["param"] == "tools"


def test_demo_shows_machine_model_answers_rates_and_where_the_results_lie(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    tiny.write_checkpoint(model, max_position_embeddings=8192)
    folder = tmp_path / "demo"
    done = headrace(
        "demo",
        "--model",
        model,
        "--folder",
        folder,
        HEADRACE_NUM_THREADS="1",
        HEADRACE_DTYPE="float32",
    )
    assert done.returncode == 0, done.stderr
    assert len(read_lines(folder / "prompts.jsonl")) == 40
    assert len(read_lines(folder / "answers.jsonl")) == 40
    shown = done.stdout
    assert "machine: " in shown and f"model:   {model}" in shown
    assert shown.count("\n> Write one sentence about ") == 5
    assert "40 of 40 answered" in shown and "jobs/s" in shown and "output tokens/s" in shown
    (cached,) = re.findall(r"prefix cache: ([\d.]+)% of", shown)
    assert float(cached) > 85, "39 of 40 prompts begin with the same 2,900 tokens"
    assert f"results: {folder / 'answers.jsonl'}" in shown
    assert "40/40" in done.stderr, "the progress bar"
