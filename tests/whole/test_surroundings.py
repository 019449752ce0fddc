"""What stands around the packages: the GitHub action, and the container for a GPU."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from report_records import RunFile

from dpbench.cli.command_line import _parse

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def action():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((ROOT / ".github/actions/compare/action.yml").read_text())


@pytest.mark.parametrize(("limits", "code"), [(None, 1), ("slower:400%", 0), ("* slower:5%", 2), ("", 0)])
def test_the_action_fails_where_a_cell_does(action, tmp_path, limits, code):
    for name, factor in (("a", 1.0), ("b; touch hit", 2.0)):
        rounds = {"nonprivate": [0.1] * 7, "ghost": [0.2 * factor + 0.001 * n for n in range(7)]}
        RunFile(tmp_path / name / "x.jsonl").overhead("cnn", rounds)
    inputs = {name: each.get("default", "") for name, each in action["inputs"].items()}
    inputs |= {"a": "a", "b": "b; touch hit", "python": sys.executable}
    if limits is not None:
        inputs["fail-on"] = limits
    (step,) = action["runs"]["steps"]
    given = {name: inputs[re.fullmatch(r"\$\{\{ inputs\.(\S+) \}\}", text)[1]] for name, text in step["env"].items()}
    given |= {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary"), "PYTHONPATH": str(ROOT)}
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]  # as GitHub runs it
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "${{" not in step["run"] and not (tmp_path / "hit").exists()
    if code < 2:
        summary = (tmp_path / "summary").read_text()
        assert summary == f"```\n{done.stdout}```\n" and "time ratio" in summary
        assert ("FAILED" in summary) == bool(code)


def test_the_container_copies_what_is_there_and_runs_what_dpbench_takes():
    lines = (ROOT / ".docker/Dockerfile").read_text().splitlines()
    words = {word: [line.split(maxsplit=1)[1] for line in lines if line.startswith(word)] for word in ("COPY", "CMD")}
    copied = {name for line in words["COPY"] for name in line.split()[:-1]}
    ignore = (ROOT / ".docker/Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)
    command, arguments = _parse(json.loads(words["CMD"][0]))
    assert (command.__name__, arguments.experiment, arguments.device) == ("dpbench.cli.run", "evidence", "cuda")
    documented = [line for line in lines if line.startswith("#   docker")]
    assert [shlex.split(line[1:], comments=False)[1] for line in documented] == ["build", "run"]
