"""The root command keeps what its own help promises of all others."""

import click
import pytest
from click.testing import CliRunner

from headrace.producer import cli

# INPUT's own worker options (`headrace run FILE -- ...`) are those of `headrace worker`.
COMMANDS = [[name] for name in cli._COMMANDS if name not in ("dead", "autoscale")]
COMMANDS += [["dead", "list"], ["dead", "show"], ["autoscale", "simulate"]]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_names_the_variable_of_every_option(words: list[str]) -> None:
    if cli._COMMANDS[words[0]].extra:
        pytest.importorskip("torch", reason="the base installation has no such command")
    shown = CliRunner().invoke(cli.main, [*words, "--help"], terminal_width=200)
    assert shown.exit_code == 0, shown.output
    command: click.Command | None = cli.main
    context = click.Context(cli.main)
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(context, word)
    assert command is not None
    options = [one for one in command.params if isinstance(one, click.Option)]
    assert options
    told = " ".join(shown.output.split())
    assert told.count("[env var: HEADRACE_") == len([one for one in options if not one.hidden])
