"""`headrace submit`: a file or a prompt to a running service, without waiting."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from headrace.producer.bulk.errors import UnusableInput
from headrace.producer.bulk.idset import IdSet
from headrace.producer.bulk.lines import LineParser, Task
from headrace.producer.bulk.reader import ReadOptions, open_input, read_tasks, scan
from headrace.producer.client import Client
from headrace.producer.commands import options
from headrace.producer.commands.options import option
from headrace.producer.errors import JobNotFound
from headrace.producer.schemas import Request

_CHUNK = 256


@click.command()
@click.argument("file", required=False, type=options.FILE)
@option("--prompt", help="One prompt instead of a file.")
@option(
    "--model",
    env="SERVED_MODEL_NAME",
    help="The model's name; by default what the live workers serve.",
)
@option(
    "--batch", help="The batch's id; by default a new one. The same id again adds nothing twice."
)
@option(
    "--on-bad-line",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="fail: nothing is sent; skip: the good lines are.",
)
@option(
    "--priority",
    type=click.Choice(["high", "normal", "low"]),
    default="normal",
    show_default=True,
)
@option("--tenant", help="Shares the workers fairly with other tenants.")
@option("--block", type=float, help="Seconds to wait while the queue is full.")
@options.queue
@options.redis_url
@options.line_limits
@options.sampling
@options.as_json
def submit(
    file: Path | None,
    prompt: str | None,
    model: str | None,
    batch: str | None,
    on_bad_line: str,
    priority: Any,
    tenant: str | None,
    block: float | None,
    queue: str | None,
    redis_url: str | None,
    max_tasks: int | None,
    max_line_bytes: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Send FILE as a batch, or one --prompt, to the queue; prints the batch's or the job's id.

    `headrace results ID --follow` reads what comes of it.
    """
    defaults = options.take_sampling(given)
    source = prompt if file is None else file
    if source is None or (file is not None and prompt is not None):
        raise click.UsageError("give a file or --prompt")
    place: dict[str, Any] = {"queue": queue, "priority": priority, "tenant": tenant}
    with Client(redis_url) as client:
        if isinstance(source, str):
            job = client.submit(source, model=model, **place, **defaults)
            if as_json:
                options.print_json({"job": job.id})
            else:
                click.echo(job.id)
            return
        read = ReadOptions(max_line_bytes, max_tasks)
        found = scan(source, _parser(model, defaults), read)
        if found.bad and (on_bad_line == "fail" or not found.tasks):
            first = found.examples[0]
            raise UnusableInput(
                first.code,
                f"{found.bad_lines} bad lines, nothing was sent; line {first.line}:"
                f" {first.message}. `headrace validate` shows all; --on-bad-line skip sends the"
                " good ones",
                first.line,
            )
        manifest = {"file": source.name, "sha256": found.sha256, "requests": found.tasks}
        if batch is not None:
            _refuse_another_file(client, batch, manifest)
        batch = batch or "batch-" + secrets.token_hex(6)
        client.create_batch(batch, manifest)
        sent = 0
        for tasks in _chunks(source, _parser(model, defaults), read):
            client.submit_many(
                [_addressed(task.request, model) for task in tasks],
                job_ids=[f"{batch}-{task.line}" for task in tasks],
                batch=batch,
                block=block,
                **place,
            )
            sent += len(tasks)
        if as_json:
            options.print_json({"batch": batch, "requests": sent, "bad_lines": found.bad_lines})
        else:
            click.echo(batch)


def _refuse_another_file(client: Client, batch: str, manifest: dict[str, Any]) -> None:
    """Before anything of the batch that is there is written over."""
    try:
        there = client.batch(batch).manifest
    except JobNotFound:
        return
    if there.get("sha256", manifest["sha256"]) != manifest["sha256"]:
        raise UnusableInput(
            "batch_exists",
            f"batch {batch} was sent from {there.get('file', 'a file')} with other lines; nothing"
            f" was sent. Choose another --batch for {manifest['file']}",
        )


def _parser(model: str | None, defaults: dict[str, Any]) -> LineParser:
    return LineParser(defaults=defaults, expected_model=model)


def _addressed(request: Request, model: str | None) -> Request:
    return request.model_copy(update={"model": model}) if model and not request.model else request


def _chunks(file: Path, parser: LineParser, read: ReadOptions) -> Iterator[list[Task]]:
    with open_input(file) as source, IdSet() as ids:
        tasks: list[Task] = []
        for item in read_tasks(source, parser, ids, read):
            if isinstance(item, Task):
                tasks.append(item)
            if len(tasks) == _CHUNK:
                yield tasks
                tasks = []
        if tasks:
            yield tasks
