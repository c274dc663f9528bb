"""`headrace run`: the main job."""

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import click

from headrace.producer.bulk.pump import MAX_JOBS
from headrace.producer.commands import options
from headrace.producer.commands.options import option
from headrace.producer.errors import HeadraceError
from headrace.producer.progress import say
from headrace.producer.run import run as run_file
from headrace.producer.run_options import RunOptions, Summary


@click.command()
@click.argument("input_file", metavar="INPUT", type=options.FILE)
@option("-o", "--output", type=options.FILE, required=True, help="Where the answers go.")
@option("--errors", type=options.FILE, help="Failed lines; by default OUTPUT's .errors.jsonl.")
@option(
    "--model",
    help="A folder, a .gguf file, a hub id or the demo model; by default the demo model, or what"
    " the given Redis serves.",
)
@option("--served-model-name", help="The model's name in requests and answers.")
@options.redis_url
@options.queue
@option(
    "--local-worker/--no-local-worker",
    default=None,
    help="Start a worker here; by default only if none serves the model.",
)
@option(
    "--on-bad-line",
    type=click.Choice(["quarantine", "fail", "skip"]),
    default="quarantine",
    show_default=True,
    help="quarantine: to the error file; fail: nothing runs; skip: only counted.",
)
@option("--ordered", is_flag=True, help="Answers in the order of the input.")
@option("--retry-errors", is_flag=True, help="Run failed lines again that may succeed now.")
@option("--restart", is_flag=True, help="Throw away what an earlier run wrote.")
@option(
    "--max-jobs",
    type=click.IntRange(1),
    default=MAX_JOBS,
    show_default=True,
    help="Most jobs in Redis at once.",
)
@option(
    "--deterministic",
    is_flag=True,
    help="The local worker's answers do not depend on what else it is running; slower.",
)
@option("--worker-log", type=options.FILE, help="Keep the local worker's log here.")
@options.line_limits
@options.sampling
@options.as_json
@click.argument("worker_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORKER OPTIONS]")
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Answer every line of INPUT (OpenAI Batch lines, or plain {"prompt": ...}) into OUTPUT.

    Needs nothing but the file: without --redis-url a private Redis runs for as long as this
    command, and a local worker with it. Interrupted or killed, the same command goes on where it
    stopped; each line ends exactly once in OUTPUT or in the error file. `-` reads stdin.

    Exit status: 0 all succeeded, 1 some failed, 2 unusable input or set-up, 130 interrupted.
    """
    as_json = given.pop("as_json")
    defaults = options.take_sampling(given)
    source = given.pop("input_file")
    if given.pop("deterministic"):
        given["worker_arguments"] = (*given["worker_arguments"], "--deterministic")
    with contextlib.ExitStack() as stack:
        if str(source) == "-":
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-in-"))
            source = _spool(sys.stdin.buffer, Path(scratch))
        elif source.is_fifo():
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-in-"))
            with source.open("rb") as pipe:
                source = _spool(pipe, Path(scratch))
        try:
            summary = run_file(RunOptions(input=source, defaults=defaults, **given))
        except HeadraceError as error:
            if as_json:
                told = {"code": getattr(error, "code", "unusable"), "message": str(error)}
                options.print_json({"error": {**told, "line": getattr(error, "line", None)}})
            raise
    if as_json:
        options.print_json(summary.as_json())
    _report(summary)
    ctx.exit(summary.exit_code)


def _spool(stream: BinaryIO, folder: Path) -> Path:
    path = folder / "stdin.jsonl"
    with path.open("wb") as file:
        while chunk := stream.read(2**20):
            file.write(chunk)
    return path


def _report(summary: Summary) -> None:
    """On stderr: stdout is for results and --json."""
    lines = [
        f"{summary.succeeded} of {summary.total} succeeded"
        + (f", {summary.failed} failed" if summary.failed else "")
        + (f", {summary.skipped} bad lines skipped" if summary.skipped else "")
        + (f" ({summary.resumed} in earlier runs)" if summary.resumed else "")
    ]
    if summary.totals.jobs:
        lines.append(
            f"{summary.jobs_per_second:.2f} jobs/s,"
            f" {summary.output_tokens_per_second:.1f} output tokens/s,"
            f" {summary.prefix_cache_hit_rate:.0%} of prompt tokens from the prefix cache"
        )
    lines.append(f"answers: {summary.output}")
    if summary.errors is not None:
        lines.append(f"errors:  {summary.errors}")
    if summary.interrupted:
        lines.append("interrupted: run the same command again to go on")
    say("".join(f"{line}\n" for line in lines))
