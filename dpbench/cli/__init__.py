"""The command line: one module a command, with `add_arguments(parser)` and `run(args) -> exit code`.

A module is imported when its command is chosen. It imports light modules at its top and heavy ones in `run`. Any
function raises a `UsageError` for what a person typed and cannot be, before anything is measured or written.

Functions take:
    parser, args: the command's parser, and the parsed arguments.
    text: as typed.
    line, words: for the person: a line without its end; a few words.
    stream: a standard one.
    model: its reference.
    rows: of a table, of equally many cells, the header first; or of the command's answer.
    trials: to run, in any order.
"""

from dpbench.cli.command_line import main

__all__ = ["main"]
