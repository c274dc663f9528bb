"""`headrace status`: queues and workers at a glance, or one batch or job."""

from dataclasses import asdict

import click

from headrace.producer.client import Client
from headrace.producer.commands import options
from headrace.producer.errors import JobNotFound
from headrace.producer.operations import BatchStatus
from headrace.producer.overview import queue_depths


@click.command()
@click.argument("name", required=False, metavar="[BATCH|JOB]")
@options.redis_url
@options.as_json
def status(name: str | None, redis_url: str | None, as_json: bool) -> None:
    """Queues and workers, or how far a batch or a job is."""
    with Client(redis_url, retry_for=2.0) as client:
        if name is None:
            _overview(client, as_json)
            return
        try:
            batch = client.batch(name)
        except JobNotFound:
            state = client.status(name)
            if as_json:
                options.print_json({"job": name, "state": state.value})
            else:
                click.echo(state.value)
        else:
            _show_batch(batch, as_json)


def _show_batch(batch: BatchStatus, as_json: bool) -> None:
    if as_json:
        options.print_json({**asdict(batch), "done": batch.done})
        return
    click.echo(
        f"{batch.batch_id}: {batch.state}, {batch.done} of {batch.total} done"
        f" ({batch.succeeded} succeeded, {batch.failed} failed, {batch.expired} expired,"
        f" {batch.cancelled} cancelled)"
    )


def _overview(client: Client, as_json: bool) -> None:
    queues = queue_depths(client)
    workers = client.workers()
    if as_json:
        options.print_json(
            {
                "queues": [asdict(queue) for queue in queues],
                "workers": [
                    {"name": w.name, "state": w.state, "model": w.model, "queues": w.queues}
                    for w in workers
                ],
            }
        )
        return
    if not queues:
        click.echo("no queues yet")
    for queue in queues:
        dead = f", {queue.dead} dead" if queue.dead else ""
        click.echo(
            f"queue {queue.queue}: {queue.queued} queued, {queue.running} running,"
            f" {queue.scheduled} scheduled{dead}"
        )
    if not workers:
        click.echo("no live worker")
    for worker in workers:
        running = worker.facts.get("running", "?")
        slots = worker.facts.get("slots", "?")
        click.echo(
            f"worker {worker.name}: {worker.state}, {worker.model}, {running} of {slots} slots,"
            f" reads {', '.join(worker.queues)}"
        )
