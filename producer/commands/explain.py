"""`headrace explain`: why a job is not done yet."""

from dataclasses import asdict

import click

from headrace.producer import explain as explaining
from headrace.producer.client import Client
from headrace.producer.commands import options


@click.command()
@click.argument("job")
@options.redis_url
@options.as_json
def explain(job: str, redis_url: str | None, as_json: bool) -> None:
    """State, position, what is ahead of it, attempts, crashes, and when it should start."""
    with Client(redis_url, retry_for=2.0) as client:
        found = client.explain(job)
    if as_json:
        options.print_json({**asdict(found), "state": found.state.value})
        return
    for line in explaining.lines(found):
        click.echo(line)
