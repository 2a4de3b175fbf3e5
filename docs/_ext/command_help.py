"""The directive `command-help`: what `torchremat COMMAND --help` prints, as it prints it."""

from typing import ClassVar

import click
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from torchremat.cli.app import main


def help_of(command: str) -> str:
    """The help of a command, of the whole if `command` is empty; 80 columns wide."""
    found: click.Command = main.commands[command] if command else main
    with click.Context(main, info_name="torchremat") as whole:
        if not command:
            return found.get_help(whole)
        return found.get_help(click.Context(found, info_name=command, parent=whole))


class CommandHelp(Directive):
    """`{command-help} plan`."""

    optional_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        """The help as a block of text."""
        text = help_of(self.arguments[0] if self.arguments else "")
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
