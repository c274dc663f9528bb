"""`headrace validate`: what `run` would say of a file, without running it."""

from pathlib import Path

import click

from headrace.producer.bulk.errors import UnusableInput
from headrace.producer.bulk.lines import LineParser
from headrace.producer.bulk.output import bad_line_fields
from headrace.producer.bulk.reader import ReadOptions, scan
from headrace.producer.commands import options
from headrace.producer.commands.options import option


@click.command()
@click.argument("file", type=options.FILE)
@option(
    "--model",
    env="SERVED_MODEL_NAME",
    help="The model's name that lines must ask for, if they ask for one.",
)
@option("--max-shown", default=20, show_default=True, help="Most bad lines to show.")
@options.line_limits
@options.as_json
@click.pass_context
def validate(
    ctx: click.Context,
    file: Path,
    model: str | None,
    max_shown: int,
    max_tasks: int | None,
    max_line_bytes: int,
    as_json: bool,
) -> None:
    """Check FILE line by line. Exit status: 0 all good, 1 some bad lines, 2 unusable."""
    try:
        found = scan(
            file,
            LineParser(expected_model=model),
            ReadOptions(max_line_bytes, max_tasks),
            max_examples=max_shown,
        )
    except UnusableInput as error:
        if as_json:
            problem = {"code": error.code, "line": error.line, "message": error.message}
            options.print_json({"file": str(file), "valid": False, "errors": [problem]})
        raise
    if as_json:
        options.print_json(
            {
                "file": str(file),
                "valid": not found.bad,
                "requests": found.tasks,
                "bad_lines": found.bad_lines,
                "codes": dict(found.bad),
                "errors": [bad_line_fields(bad) for bad in found.examples],
                "sha256": found.sha256,
            }
        )
    else:
        for bad in found.examples:
            click.echo(f"line {bad.line}: {bad.code}: {bad.message}")
        if found.bad_lines > len(found.examples):
            click.echo(f"... and {found.bad_lines - len(found.examples)} more")
        click.echo(f"{file}: {found.tasks} requests, {found.bad_lines} bad lines")
    ctx.exit(1 if found.bad else 0)
