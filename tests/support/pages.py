"""Extracts programs and commands from Markdown pages, and checks that they are valid."""

import importlib
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

from dpbench.cli.command_line import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


def blocks(text, language):
    """The code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text):
    """The commands of all shell blocks, without their comments."""
    lines = [re.split(r"\s#\s", line)[0].strip() for block in blocks(text, "sh") for line in block.splitlines()]
    return [line for line in lines if line]


def assert_taken(line, monkeypatch):
    """Check that the command line accepts these arguments, make has this target, or the extras to install exist."""
    words = shlex.split(line)
    if words[:3] == ["python", "-m", "dpbench"]:
        ran = []
        monkeypatch.setattr(importlib.import_module(COMMANDS[words[3]][0]), "run", lambda args: ran.append(args) or 0)
        assert main(words[3:]) == 0 and len(ran) == 1
    elif words[0] == "make":
        told = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
    else:
        assert words[:2] == ["pip", "install"], f"nobody checks {line}"
        assert_extras(line)


def assert_extras(text):
    """Check that every '.[extra]' in the text is an extra of the project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {each for found in re.findall(r"'\.\[([\w,]+)\]'", text) for each in found.split(",")}
    assert named <= set(extras)
