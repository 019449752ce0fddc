"""What a person sees of a run: a bar below the lines on a terminal, and nothing but the lines anywhere else."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from fake_run import ROOT, Fake, sleepers
from waiting import until

from dpbench.execution.progress import Progress
from dpbench.execution.schedule import Run
from dpbench.trials import StepTrial

FIRST = Run(StepTrial(model="resnet18", backend="ghost", batch_size=16), 0)
SECOND = Run(StepTrial(model="resnet18", backend="vmap", batch_size=16), 1)
OK = {"outcome": "ok", "seconds": 6.42, "evidence": None}
ERROR = {"outcome": "error", "seconds": 0.5, "evidence": "Traceback\n  a line\nKeyError: 'no such thing'\n"}


def shown(text: str) -> list[str]:
    """The rows of a terminal to which this was written, if all after a "\\r" wipes what was there."""
    return [row.rpartition("\r")[2].replace("\x1b[K", "").rstrip() for row in text.split("\n")]


class Terminal(io.StringIO):
    """A terminal without a size of its own: COLUMNS says its width."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[str]:
        return shown(self.getvalue())


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return Terminal()


@pytest.fixture
def seconds(monkeypatch):
    """A clock that goes on when it is told to."""
    clock = [1000.0]
    monkeypatch.setattr("dpbench.execution.progress.time.monotonic", lambda: clock[0])

    def pass_by(more: float) -> None:
        clock[0] += more

    return pass_by


def test_a_bar_with_trials_time_left_and_what_runs(terminal, seconds):
    progress = Progress(terminal)
    progress.now([FIRST], 12, 45.2, None)
    assert terminal.rows == [
        "[12/57]  21%|███▏           | time left not known yet: step resnet18 ghost 16, round 1 (0 s)"
    ]
    seconds(8)
    progress.now([FIRST, SECOND], 12, 45.2, 200.0)
    running = "step resnet18 ghost 16, round 1 (8 s), step resnet18 vmap 16, round 2 (0 s)"
    assert terminal.rows == [f"[12/57]  21%|███▏           | about 3 min 20 s left: {running}"[:119]]


def test_what_stays_is_whole_and_above_the_bar(terminal, seconds):
    progress = Progress(terminal)
    progress.say("before there is a bar")
    progress.now([FIRST, SECOND], 0, 4, 60.0)
    seconds(2)
    progress.say("a line")
    lines = ["before there is a bar", "a line"]
    assert terminal.rows[:-1] == lines and terminal.rows[-1].startswith("[0/4]   0%|  ")
    progress.ended(FIRST, OK, 1, 3, 30.0)
    lines.append("[1/4] step resnet18 ghost 16, round 1: ok in 6.4 s; about 30 s left")
    bar = "[1/4]  25%|███▊           | about 30 s left: step resnet18 vmap 16, round 2 (2 s)"
    assert terminal.rows == [*lines, bar], "the bar is that of the line above it"
    progress.ended(SECOND, ERROR, 2, 0, 0.0)
    lines += ["[2/2] step resnet18 vmap 16, round 2: error in 0.5 s", "    KeyError: 'no such thing'"]
    assert terminal.rows == [*lines, f"[2/2] 100%|{'█' * 15}| about 0 s left"]
    progress.close()
    assert terminal.rows == [*lines, ""]
    progress.say("after it")
    assert terminal.rows == [*lines, "after it", ""]


def test_the_bar_is_cut_to_the_width_of_the_terminal_which_may_change(terminal, seconds, monkeypatch):
    progress = Progress(terminal)
    for columns, bar in [
        (80, "[12/57]  21%|██        | about 3 min 20 s left: step resnet18 ghost 16, round 1 "),
        (40, "[12/57]  21%|█    | about 3 min 20 s le"),
        (5, "[12/"),
        (1, "["),
    ]:
        monkeypatch.setenv("COLUMNS", str(columns))
        seconds(100)
        progress.now([FIRST, SECOND], 12, 45, 200.0)
        assert terminal.rows == [bar.rstrip()]
    progress.close()
    assert terminal.rows == [""]


def test_without_a_terminal_only_the_lines():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.now([FIRST], 0, 2, None)
    progress.say("a line")
    progress.ended(FIRST, OK, 1, 1.4, 200.0)
    progress.ended(SECOND, ERROR, 2, 0, None)
    progress.close()
    assert stream.getvalue() == (
        "a line\n"
        "[1/2] step resnet18 ghost 16, round 1: ok in 6.4 s; about 3 min 20 s left\n"
        "[2/2] step resnet18 vmap 16, round 2: error in 0.5 s\n"
        "    KeyError: 'no such thing'\n"
    )


def test_a_run_in_a_terminal(tmp_path):
    fake = Fake(tmp_path, sleepers(2, 0.5))
    command = [sys.executable, "-m", "dpbench", "run", str(fake.file), "--device", "cpu", "--output", str(fake.output)]
    environ = {**os.environ, "COLUMNS": "300"}  # not that of this terminal
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    os.set_blocking(ours, False)
    text = b""

    def ended() -> bool:
        nonlocal text
        over = process.poll() is not None
        with contextlib.suppress(OSError):  # nothing more now
            while True:  # while nobody reads, a few thousand characters alone can be written
                text += os.read(ours, 1 << 16)
        return over

    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        until(ended, "the end of the run")
    *lines, last = shown(text.decode().replace("\r\n", "\n"))
    assert process.returncode == 0 and last == "", text
    assert not [line for line in lines if "%|" in line], "nothing is left of the bar"
    for begin, end in (("[1/2] act, round 1: ok in ", " s left"), ("[2/2] act, round 1: ok in ", " s")):
        assert [line for line in lines if line.startswith(begin) and line.endswith(end)], lines
    assert [line for line in lines if line.startswith("dpbench: recorded 2 trials (2 ok) in ")], lines
    bars = [line.split("\x1b")[0] for line in text.decode().split("\r") if "%|" in line]
    assert any(bar.startswith("[0/2]   0%|") and "left not known yet: act, round 1 (0 s)" in bar for bar in bars), bars
    assert any(bar.startswith("[1/2]  50%|███████▌       | about ") and " s left: act" in bar for bar in bars), bars
    assert max(map(len, bars)) < 120
