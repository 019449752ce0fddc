"""The command line. One module a command, imported when that command is chosen: `add_arguments(parser)` and
`run(args) -> exit code`.

A command module imports at its top only what is light; what is heavy it imports in `run`.

Functions take:
    parser, args: of the command; what was typed, parsed by it.
"""

from dpbench.cli.command_line import main

__all__ = ["main"]
