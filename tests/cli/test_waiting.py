"""The last line of a terminal while a command works: painted after a while, and gone before anything is printed."""

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, time
from dpbench.cli import epsilon, main, streams
streams.PATIENCE = 0.1
def slow(args):
    streams.tell("pld, 1 of 7 accountants")
    time.sleep(0.5)
    print("told", file=sys.stderr)
    time.sleep(1.2)
    print("answer")
    return 0
epsilon.run = slow
raise SystemExit(main("epsilon --sample-rate 0.1 --noise-multiplier 1 --steps 9 --delta 1e-5".split()))
"""


def run(stderr):
    return subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT, text=True)


def test_a_terminal_says_what_a_command_waits_for():
    ours, theirs = pty.openpty()
    done = run(theirs)
    os.close(theirs)
    said = os.read(ours, 10_000).decode()
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, "answer\n")
    line, told, *rest = said.split("\r\x1b[K")
    assert line == "\r0 s: pld, 1 of 7 accountants\x1b[K"
    assert told.startswith("told\r\n\r1 s: pld") and rest == [""]  # painted again, and wiped at the end


def test_nothing_is_painted_where_nobody_looks():
    done = run(subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "answer\n", "told\n")
