"""`headrace cancel`: end jobs, or a whole batch."""

import click

from headrace.producer.client import Client
from headrace.producer.commands import options
from headrace.producer.errors import JobNotFound


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="BATCH|JOB...")
@options.redis_url
@options.as_json
@click.pass_context
def cancel(
    ctx: click.Context, names: tuple[str, ...], redis_url: str | None, as_json: bool
) -> None:
    """End each BATCH or JOB, waiting or running, and say what it was doing.

    Exit status 1 when one of them is unknown.
    """
    told: dict[str, str] = {}
    unknown = False
    with Client(redis_url) as client:
        for name in names:
            try:
                batch = client.cancel_batch(name)
            except JobNotFound:
                outcome = client.cancel(name)
                told[name] = outcome.value
                unknown = unknown or outcome.value == "not_found"
            else:
                told[name] = f"batch {batch.state}: {batch.cancelled} of {batch.total} cancelled"
    if as_json:
        options.print_json(told)
    else:
        for name, what in told.items():
            click.echo(f"{name}: {what}")
    ctx.exit(1 if unknown else 0)
