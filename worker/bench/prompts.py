"""A user's own prompts as a workload: a JSONL file in any form that `headrace run` accepts.

Token ids for engines that are run side by side; requests as they stand for a service. Knows no
engine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from headrace.producer.bulk.errors import BadLine
from headrace.producer.bulk.idset import IdSet
from headrace.producer.bulk.lines import LineParser
from headrace.producer.bulk.reader import open_input, read_tasks
from headrace.producer.schemas import Request
from headrace.worker.bench.workloads import BenchRequest


class BenchTokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]: ...


def read_requests(path: Path, limit: int | None = None) -> list[Request]:
    """The file's requests, at most `limit`. Raises UnusableInput for a file that can't be read and
    ClickException for a bad line: a measurement over part of a file would mislead."""
    requests: list[Request] = []
    with open_input(path) as file:
        for item in read_tasks(file, LineParser(), IdSet()):
            if isinstance(item, BadLine):
                raise click.ClickException(f"{path}, line {item.line}: {item.code}: {item.message}")
            requests.append(item.request)
            if len(requests) == limit:
                break
    if not requests:
        raise click.ClickException(f"{path} has no request")
    return requests


def to_workload(
    requests: Sequence[Request], tokenizer: BenchTokenizer, default_max_tokens: int
) -> list[BenchRequest]:
    """Token ids and lengths. Every answer is made `max_tokens` long (the end of sequence is
    ignored), so that all systems do the same work; other sampling settings are left out."""
    return [
        BenchRequest(index, _ids(request, tokenizer), request.max_tokens or default_max_tokens)
        for index, request in enumerate(requests)
    ]


def _ids(request: Request, tokenizer: BenchTokenizer) -> list[int]:
    if request.messages is not None:
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        kwargs: Mapping[str, Any] = request.chat_template_kwargs or {}
        return tokenizer.apply_chat_template(messages, **kwargs)
    if isinstance(request.prompt, str):
        return tokenizer.encode(request.prompt, add_special_tokens=True)
    return list(request.prompt or ())
