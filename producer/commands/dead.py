"""`headrace dead`: jobs that were given up, and what to do with them."""

import time
from typing import Any

import click

from headrace.producer import dead as dead_letter
from headrace.producer.client import Client
from headrace.producer.commands import options
from headrace.producer.commands.options import option


@click.group()
def dead() -> None:
    """Jobs given up after too many crashes or attempts."""


@dead.command("list")
@option("--limit", default=100, show_default=True, help="Most jobs a queue, the newest first.")
@options.queue
@options.redis_url
@options.as_json
def list_(limit: int, queue: str | None, redis_url: str | None, as_json: bool) -> None:
    """The dead jobs of one queue, or of all."""
    with Client(redis_url, retry_for=2.0) as client:
        queues = [queue] if queue else [n for n, _ in client.run(dead_letter.queues_with_dead())]
        found = [job for name in queues for job in client.run(dead_letter.list_dead(name, limit))]
    if as_json:
        options.print_json([_fields(job) for job in found])
        return
    for job in found:
        ago = max(0.0, time.time() - job.died_at)
        why = f"{job.failure.code}: {job.failure.message}" if job.failure else "no reason kept"
        click.echo(
            f"{job.job_id}  {job.queue}  {ago:.0f} s ago, {job.crashes} crashes,"
            f" {job.attempts} attempts  {why}"
        )
    if not found:
        click.echo("no dead jobs")


@dead.command()
@click.argument("job")
@options.redis_url
@options.as_json
def show(job: str, redis_url: str | None, as_json: bool) -> None:
    """What happened to JOB, oldest first."""
    with Client(redis_url, retry_for=2.0) as client:
        found = client.run(dead_letter.show(job))
    if as_json:
        options.print_json(_fields(found))
        return
    click.echo(
        f"{found.job_id} in {found.queue}: {found.crashes} crashes, {found.attempts} attempts"
    )
    for event in found.history:
        details = ", ".join(f"{name}={value}" for name, value in event.items() if name != "at")
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event.get("at", 0))))
        click.echo(f"{stamp}  {details}")
    if found.failure is not None:
        click.echo(f"{found.failure.code}: {found.failure.message}")


@dead.command()
@click.argument("jobs", nargs=-1, required=True)
@options.redis_url
@click.pass_context
def requeue(ctx: click.Context, jobs: tuple[str, ...], redis_url: str | None) -> None:
    """Give JOBS another start, their attempts and crashes forgotten."""
    with Client(redis_url, retry_for=2.0) as client:
        done = client.run(dead_letter.requeue(jobs, client.settings))
    _report(ctx, jobs, set(done), "requeued")


@dead.command()
@click.argument("jobs", nargs=-1, required=True)
@options.redis_url
@click.pass_context
def drop(ctx: click.Context, jobs: tuple[str, ...], redis_url: str | None) -> None:
    """Delete JOBS with their history."""
    with Client(redis_url, retry_for=2.0) as client:
        done = {job for job in jobs if client.run(dead_letter.drop([job], client.settings))}
    _report(ctx, jobs, done, "dropped")


def _report(ctx: click.Context, jobs: tuple[str, ...], done: set[str], word: str) -> None:
    for job in jobs:
        click.echo(f"{job}: {word if job in done else 'no failed job of that id'}")
    ctx.exit(0 if len(done) == len(set(jobs)) else 1)


def _fields(job: dead_letter.DeadJob) -> dict[str, Any]:
    return {
        "job": job.job_id,
        "queue": job.queue,
        "died_at": job.died_at,
        "crashes": job.crashes,
        "attempts": job.attempts,
        "failure": job.failure.model_dump() if job.failure else None,
        "history": list(job.history),
    }
