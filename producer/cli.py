"""`headrace`: the root command. Subcommands load when they are called, so that those which only
talk to a service answer at once and need no torch."""

import errno
import importlib
import importlib.util
import os
import sys
from typing import Any, NamedTuple

import click

from headrace.producer.errors import HeadraceError

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class _Command(NamedTuple):
    place: str
    summary: str
    extra: str = ""


_COMMANDS: dict[str, _Command] = {
    "run": _Command(
        "headrace.producer.commands.run:run", "Answer a file of prompts, start to end, resumably."
    ),
    "validate": _Command(
        "headrace.producer.commands.validate:validate", "Check a file of prompts line by line."
    ),
    "submit": _Command(
        "headrace.producer.commands.submit:submit", "Send a file or a prompt to a running service."
    ),
    "status": _Command(
        "headrace.producer.commands.status:status", "Queues and workers, or one batch or job."
    ),
    "results": _Command(
        "headrace.producer.commands.results:results", "Results of a batch or a job, as they come."
    ),
    "cancel": _Command(
        "headrace.producer.commands.cancel:cancel", "End jobs or a batch in whatever state."
    ),
    "explain": _Command("headrace.producer.commands.explain:explain", "Why a job is not done yet."),
    "dead": _Command(
        "headrace.producer.commands.dead:dead", "Jobs that were given up: list, requeue, drop."
    ),
    "doctor": _Command(
        "headrace.producer.commands.doctor:doctor", "Check Redis, machine and model."
    ),
    "demo": _Command(
        "headrace.producer.commands.demo:demo", "The whole system on one file, in one minute."
    ),
    "worker": _Command("headrace.worker.cli:worker", "Run a worker for one model.", "worker"),
    "exporter": _Command("headrace.worker.exporter:exporter", "Queue depth for Prometheus."),
    "autoscale": _Command(
        "headrace.worker.autoscale.cli:autoscale", "Simulate and explain scaling rules."
    ),
    "plan": _Command(
        "headrace.engine.planner.cli:plan", "What fits on which machine, and how fast."
    ),
    "bench": _Command("headrace.worker.bench.__main__:main", "Measure this machine.", "worker"),
    "quantize": _Command("headrace.engine.quantize.cli:quantize", "Compress a model.", "worker"),
    "verify": _Command(
        "headrace.engine.evaluate.cli:verify", "Check a compressed model's quality.", "worker"
    ),
}


class LazyGroup(click.Group):
    """Knows its commands by name and a line of help; imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, command in _COMMANDS.items() if _is_installed(command)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = _COMMANDS.get(cmd_name)
        if command is None:
            return None
        module, _, attribute = command.place.partition(":")
        try:
            found: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise click.ClickException(_missing(cmd_name, command, error)) from error
        _show_variables(found)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(n, _COMMANDS[n].summary) for n in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            print(f"headrace: {error}", file=sys.stderr)
            ctx.exit(2)
        except KeyboardInterrupt:
            ctx.exit(130)
        except BrokenPipeError:
            # Whoever read our output has seen enough; Python's own flush at exit must not complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(1)
        except OSError as error:
            # A file or a folder that a command was told to use: its name and the system's words.
            if error.filename is None and error.errno not in _DISK:
                raise
            place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
            print(f"headrace: {place}{error.strerror}", file=sys.stderr)
            ctx.exit(2)


def _show_variables(command: click.Command) -> None:
    """`--help` names each option's variable, whoever wrote the command."""
    for option in command.params:
        if isinstance(option, click.Option):
            option.show_envvar = True
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _show_variables(inner)


def _is_installed(command: _Command) -> bool:
    try:
        return importlib.util.find_spec(command.place.partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False


def _missing(name: str, command: _Command, error: ModuleNotFoundError) -> str:
    if (error.name or "").startswith("headrace"):
        return f"this installation has no `headrace {name}`"
    extra = command.extra or "worker"
    return (
        f"`headrace {name}` needs {error.name}, which is not installed:"
        f" pip install 'headrace[{extra}]'"
    )


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headrace")
def main() -> None:
    """Queue-driven batch inference for language models.

    Start with `headrace demo`, then `headrace run prompts.jsonl -o answers.jsonl`. Every option can
    also be given as a HEADRACE_ variable; `--help` of a command names them.
    """


if __name__ == "__main__":
    main(prog_name="headrace")
