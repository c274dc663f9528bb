"""`headrace results`: the lines of a batch or a job, as OpenAI's Batch API writes them."""

import sys
import time
from pathlib import Path
from typing import BinaryIO

import click
import orjson

from headrace.producer.bulk.output import result_line
from headrace.producer.client import Client
from headrace.producer.commands import options
from headrace.producer.commands.options import option
from headrace.producer.errors import JobError, JobNotFound
from headrace.producer.schemas import Result

_WAIT = 0.1
_LIMIT = 256


@click.command()
@click.argument("name", metavar="BATCH|JOB")
@option("--follow", is_flag=True, help="Wait for what has not ended yet.")
@option("-o", "--output", type=options.FILE, help="Write here instead of stdout.")
@option("--text", is_flag=True, help="Only the answers' text.")
@options.redis_url
@click.pass_context
def results(
    ctx: click.Context,
    name: str,
    follow: bool,
    output: Path | None,
    text: bool,
    redis_url: str | None,
) -> None:
    """Print the results of BATCH or JOB in order of completion, failures among them.

    Nothing is consumed: they can be read again, by anyone, until their time has passed. Exit
    status: 0 all that was read succeeded, 1 some failed, or have not ended and --follow is missing.
    """
    with Client(redis_url) as client, _sink(output) as sink:
        try:
            client.batch(name)
        except JobNotFound:
            complete = _one(client, name, follow, sink, text)
        else:
            complete = _batch(client, name, follow, sink, text)
        sink.flush()
    ctx.exit(0 if complete else 1)


def _sink(output: Path | None) -> BinaryIO:
    if output is None:
        return open(sys.stdout.fileno(), "wb", closefd=False)
    return output.open("wb")


def _batch(client: Client, batch: str, follow: bool, sink: BinaryIO, text: bool) -> bool:
    cursor = 0
    good = True
    while True:
        # Asked before reading, so that what ends in between is still read.
        ended = client.batch(batch).state in ("completed", "cancelled")
        part = client.completed(batch, cursor, _LIMIT)
        cursor = part.cursor
        for job_id, result in part.items:
            good = _write(sink, job_id, result, text) and good
        sink.flush()
        if part.items:
            continue
        if ended or not follow:
            return good and ended
        time.sleep(_WAIT)


def _one(client: Client, job_id: str, follow: bool, sink: BinaryIO, text: bool) -> bool:
    if not follow and not client.status(job_id).terminal:
        print(f"{job_id} has not ended; --follow waits for it", file=sys.stderr)
        return False
    try:
        return _write(sink, job_id, client.result(job_id), text)
    except JobError as error:
        return _write(sink, job_id, error.result, text)


def _write(sink: BinaryIO, job_id: str, result: Result | None, text: bool) -> bool:
    if result is None:
        error = {"code": "result_expired", "message": "the result was deleted; its time has passed"}
        line = {"id": f"batch_req_{job_id}", "custom_id": None, "response": None, "error": error}
        sink.write(orjson.dumps(line) + b"\n")
        return False
    if text and result.ok:
        sink.write(result.text.encode() + b"\n")
        return True
    line_bytes, ok = result_line(result.custom_id or job_id, result)
    sink.write(line_bytes)
    return ok
