"""Finds and runs the command, and turns errors of use into one line.

Exit codes: 0 success; 1 a check or a verdict failed, or a run could not continue; 2 usage; 130 Ctrl-C; 141 the reader
of standard output has gone. Only the chosen command's module is imported, so that ``list``, ``plan`` and ``epsilon``
start at once.
"""

import argparse
import contextlib
import importlib
import re
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from dpbench.cli import streams
from dpbench.cli.examples import EXAMPLES, QUESTIONS
from dpbench.errors import RunEnded, UsageError, nearest, one_of
from dpbench.records.environment import VERSION

#: command -> (its module, its help in a line)
COMMANDS = {
    "list": ("dpbench.cli.listing", "experiments, backends, models, accountants"),
    "plan": ("dpbench.cli.plan", "what an experiment has done, pruned and left, and how long the rest takes"),
    "run": ("dpbench.cli.run", "run the rest of an experiment, then draw its figures"),
    "check": ("dpbench.cli.check", "are the backends exact? norms and gradients against the microbatch oracle"),
    "explain": ("dpbench.cli.explain", "the route that each use of each parameter takes, and the cost of each route"),
    "recommend": ("dpbench.cli.recommend", "compare every backend on one model, on this machine, and recommend one"),
    "template": ("dpbench.cli.template", "write a file for your own model, for the other commands"),
    "compare": ("dpbench.cli.compare", "compare two runs: faster, slower, same or inconclusive for each cell"),
    "report": ("dpbench.cli.report", "figures and tables from records"),
    "history": (
        "dpbench.cli.history",
        "an experiment's times and memory over versions of the code, with the steps found",
    ),
    "scorecard": ("dpbench.cli.scorecard", "one page of every backend and every claim, from all records"),
    "epsilon": ("dpbench.cli.epsilon", "the ε of a training run, by each accountant"),
    "calibrate": ("dpbench.cli.calibrate", "the noise, steps or sample rate for a target ε, by each accountant"),
}
#: The command that shows its own progress on a terminal.
_OWN_PROGRESS = "dpbench.cli.run"
_TYPES = {"int": "a whole number", "float": "a number"}


class _Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`: one line, with the expected and the given value."""

    def error(self, message: str) -> NoReturn:
        about, _, what = message.partition(": ")
        option = about.removeprefix("argument ")
        if match := re.fullmatch(r"invalid (\w+) value: '(.*)'", what):
            raise UsageError(f"{_TYPES.get(match[1], match[1])} for {option}", match[2])
        if about.startswith("the following arguments are required"):
            raise UsageError(f"{what} after {self.prog}", "nothing")
        if about.startswith("argument ") and what.startswith("expected"):
            raise UsageError(f"{what.removeprefix('expected ')} after {option}", "none")
        raise UsageError(f"arguments as {self.prog} --help shows them", message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = sorted(self._option_string_actions)
            options = [word for word in unknown if word.startswith("-")]
            if options:
                name = options[0].partition("=")[0]
                raise UsageError(f"an option of {self.prog}", name, nearest(name, known), known)
            raise UsageError(f"no further argument for {self.prog}", " ".join(unknown))
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None:
            one_of(f"{'/'.join(action.option_strings) or action.dest}", str(value), map(str, action.choices))


def _describe_commands() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {doc}" for name, (_, doc) in COMMANDS.items()]
    asked = "\n".join(f"  {question}\n      dpbench {command}" for question, command in QUESTIONS)
    return (
        "commands:\n" + "\n".join(lines) + f"\n\nquestions, and what answers them:\n{asked}\n\n"
        "`dpbench COMMAND --help` shows a command's options, and more examples.\n"
        '`eval "$(dpbench --print-completion bash)"` completes names on TAB (bash, zsh, tcsh; needs shtab).'
    )


def _describe_examples(name: str) -> str:
    examples = [(f"dpbench {name} {arguments}".rstrip(), words) for arguments, words in EXAMPLES.get(name, ())]
    return "examples:\n" + "\n".join(f"  {line}\n      {words}" for line, words in examples) if examples else ""


def _with_commands(top: _Parser) -> _Parser:
    """The parser with every command as a subparser, for completion."""
    commands = top.add_subparsers()
    for name, (module, doc) in COMMANDS.items():
        importlib.import_module(module).add_arguments(commands.add_parser(name, help=doc))
    return top


def _parse(argv: Sequence[str]) -> tuple[ModuleType, argparse.Namespace] | None:
    """The command's module and its arguments; None after printing help or the version."""
    top = _Parser(
        prog="dpbench",
        usage="dpbench COMMAND ...",
        description="Which clipping backend for differentially private training: measured, and verified.",
        epilog=_describe_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"dpbench {VERSION}")
    if not argv:
        top.print_help()
        return None
    if argv[0] == "--print-completion":
        from dpbench.cli import completion

        print(completion.script(argv[1:], _with_commands(top)))
        return None
    if argv[0].startswith("-"):
        top.parse_known_args(argv[:1])  # --help and --version print and exit
        if any(word in COMMANDS for word in argv):
            raise UsageError(f"a command before {argv[0]}", "none")
        top.parse_args(argv[:1])
    name = one_of("a command", argv[0], COMMANDS)
    module, doc = COMMANDS[name]
    command = importlib.import_module(module)
    parser = _Parser(
        prog=f"dpbench {name}",
        description=f"{doc[0].upper()}{doc[1:]}.",
        epilog=_describe_examples(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return command, parser.parse_args(argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: without the program's name; None for the arguments of the process.
    """
    streams.prepare()
    try:
        parsed = _parse(sys.argv[1:] if argv is None else argv)
        if parsed is None:
            return 0
        command, arguments = parsed
        with contextlib.nullcontext() if command.__name__ == _OWN_PROGRESS else streams.waiting.shown("starting"):
            code = int(command.run(arguments))
        sys.stdout.flush()
        return code
    except RunEnded as error:
        return _complain(error, 1)
    except UsageError as error:
        return _complain(error)
    except BrokenPipeError:
        streams.discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        streams.discard(sys.stdout)
        return _complain(error)
    except KeyboardInterrupt:
        print("dpbench: interrupted", file=sys.stderr)
        return 130


def _complain(error: Exception, code: int = 2) -> int:
    print("dpbench: " + " ".join(str(error).split()), file=sys.stderr)
    return code
