"""Starts and steers a run of fake trials by its command line, and reads the records and processes it leaves."""

import io
import os
import subprocess
import sys
import uuid
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE, lines, of_process, soon, until

from dpbench.cli import main
from dpbench.records.store import read_records

BODIES = Path(__file__).with_name("bodies.py")
ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """
from dpbench.experiment import Experiment, grid
from dpbench.trials.reference import load_module
bodies = load_module({bodies!r})

def cells(device):
    return {cells}

EXPERIMENT = Experiment(name="fake", doc="for the tests", cells=cells, smoke=cells, rounds={rounds},
    in_order={in_order})
"""


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for the process to end; returns (stdout, stderr)."""
    try:
        return process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for the process to end with this exit code and no traceback; returns its standard error."""
    _, err = finish(process)
    assert process.returncode == code and "Traceback" not in err, err
    return err


class Fake:
    """An experiment of fake trials, and commands on it."""

    def __init__(self, folder: Path, cells: str, rounds: int = 1, in_order: bool = False) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.mark = uuid.uuid4().hex
        self.file = folder / "fake.py"
        cells = cells.replace("FOLDER", repr(str(folder)))
        text = EXPERIMENT.format(bodies=str(BODIES), cells=cells, rounds=rounds, in_order=in_order)
        self.file.write_text(text)
        self.output = folder / "out"

    def start(self, *arguments: str, command: str = "run", shell: str = ":") -> subprocess.Popen[str]:
        """Start the command. `shell`: shell code to run first."""
        line = [sys.executable, "-m", "dpbench", command, str(self.file), "--output", str(self.output), *arguments]
        return subprocess.Popen(
            ["bash", "-c", f'{shell}; exec "$@"', "bash", *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "DPBENCH_TEST": self.mark},
            start_new_session=True,
        )

    def run(self, *arguments: str, command: str = "run") -> subprocess.CompletedProcess[str]:
        """Run the command to its end in this process; trials have processes of their own, with our mark."""
        words = [command, str(self.file), "--output", str(self.output), *arguments]
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setenv("DPBENCH_TEST", self.mark)
            code = main(words)
        return self._ended(words, code, out.getvalue(), err.getvalue())

    def run_apart(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end as a person starts it."""
        process = self.start(*arguments)
        out, err = finish(process)
        return self._ended(process.args, process.returncode, out, err)

    def _ended(self, words: Any, code: int, out: str, err: str) -> subprocess.CompletedProcess[str]:
        assert "Traceback" not in err or "KeyError" in err, err
        return subprocess.CompletedProcess(words, code, out, err)

    def halfway(self, *arguments: str, done: int = 1, shell: str = ":") -> subprocess.Popen[str]:
        """Start a run of `waiters` in order; returns when `done` trials have ended and the next one waits."""
        if done:  # `go` without numbers is for all
            self.go(*range(done))
        process = self.start(*arguments, shell=shell)
        self.wait_for(done + 1, "begun")
        return process

    def go(self, *numbers: int) -> None:
        """Let the waiters of these numbers end, or all waiters."""
        for name in [f"go {number}" for number in numbers] or ["go"]:
            (self.folder / name).touch()

    @property
    def records(self) -> list[dict]:
        def fail(warning: str) -> None:
            raise AssertionError(warning)

        return read_records(self.output / "fake", fail)

    @property
    def numbers(self) -> Counter[int]:
        """The number of records of each trial's number."""
        return Counter(record["trial"]["number"] for record in self.records)

    def trace(self, name: str) -> list[int]:
        return [int(line.split()[0]) for line in lines(self.folder / name)]

    def wait_for(self, count: int, name: str = "ended") -> None:
        until(lambda: len(self.trace(name)) >= count, f"{count} x {name}")

    def processes(self, command: str = "") -> list[int]:
        """Processes that inherited our mark and have `command` in their command line."""
        mark = f"DPBENCH_TEST={self.mark}".encode()
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [
            pid for pid in pids if mark in of_process(pid, "environ") and command.encode() in of_process(pid, "cmdline")
        ]

    def left_over(self) -> list[int]:
        """Our processes that are still there after `PATIENCE`."""
        soon(lambda: not self.processes())
        return self.processes()


def sleepers(count: int, seconds: float = 0.0) -> str:
    """Trials that end by themselves."""
    return f"grid(bodies.Act, action='sleep', number={list(range(count))}, seconds={seconds}, folder=FOLDER)"


def waiters(count: int, kind: str = "bodies.Act") -> str:
    """Trials that wait until `Fake.go` lets them end."""
    return f"grid({kind}, action='wait', number={list(range(count))}, folder=FOLDER)"
