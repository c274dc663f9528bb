"""A user's prompts become a workload, or the run stops at the line that can't."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from headrace.worker.bench import prompts, workloads


class Letters:
    """One id a character; a chat is its contents between brackets."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1, *map(ord, text)] if add_special_tokens else list(map(ord, text))

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self.encode("".join(f"[{m['role']}:{m['content']}]" for m in messages))


def lines(path: Path, *values: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_text_ids_and_chats_are_all_taken(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl",
        {"prompt": "ab", "max_tokens": 3},
        {"prompt": [5, 6, 7]},
    )
    work = prompts.to_workload(prompts.read_requests(file), Letters(), default_max_tokens=9)
    assert [r.prompt_token_ids for r in work] == [[1, 97, 98], [5, 6, 7]]
    assert [r.max_tokens for r in work] == [3, 9]
    chat = {"role": "user", "content": "x"}
    file = lines(
        tmp_path / "b.jsonl",
        {
            "custom_id": "q",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [chat], "max_tokens": 2},
        },
    )
    (only,) = prompts.to_workload(prompts.read_requests(file), Letters(), 9)
    assert only.prompt_token_ids == Letters().encode("[user:x]")
    assert only.max_tokens == 2


def test_a_bad_line_stops_the_run_by_its_number(tmp_path: Path) -> None:
    """Measuring the rest would give figures for a workload that nobody has."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "fine"}\n{"prompt": \n')
    with pytest.raises(click.ClickException, match="line 2"):
        prompts.read_requests(file)
    assert len(prompts.read_requests(file, limit=1)) == 1
    file.write_text("\n")
    with pytest.raises(click.ClickException, match="no request"):
        prompts.read_requests(file)


def test_texts_are_the_parts_that_are_tokenized() -> None:
    """A service that is sent text and an engine that is handed ids get the same prompts."""
    for name in workloads.WORKLOADS:
        ids = workloads.build(name, lambda text: [ord(letter) for letter in text])
        texts = workloads.texts(name)
        assert ["".join(map(chr, r.prompt_token_ids)) for r in ids] == [t for t, _ in texts]
        assert [r.max_tokens for r in ids] == [length for _, length in texts]
