"""What a person types: answers at once, and one line for everything that is wrong."""

import importlib
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processor import as_quick_as_imports
from waiting import PATIENCE

from dpbench.cli import main
from dpbench.cli.command_line import COMMANDS
from dpbench.cli.examples import EXAMPLES, QUESTIONS
from dpbench.errors import UsageError
from dpbench.execution.selection import parse_only, select
from dpbench.experiment import grid
from dpbench.trials import PeakTrial, StepTrial
from dpbench.trials.max_batch import MaxBatch

ROOT = Path(__file__).resolve().parents[2]


def dpbench(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dpbench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, **kwargs)


def test_help_answers_questions_and_every_command_has_an_example(capsys):
    assert set(EXAMPLES) == set(COMMANDS)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert all(question in out and f"dpbench {command}" in out for question, command in QUESTIONS)
    for word in ("--help", "--version"):
        with pytest.raises(SystemExit) as left:
            main([word])
        assert left.value.code in (None, 0) and "dpbench" in capsys.readouterr().out
    for name, examples in EXAMPLES.items():
        with pytest.raises(SystemExit):
            main([name, "--help"])
        out = capsys.readouterr().out
        assert examples
        for arguments, words in examples:
            assert f"dpbench {name} {arguments}".rstrip() in out and words in out


def test_every_example_is_one_that_the_command_takes(monkeypatch):
    for line in [*(f"{name} {arguments}" for name, examples in EXAMPLES.items() for arguments, _ in examples)] + [
        command for _, command in QUESTIONS
    ]:
        words = shlex.split(line)
        ran = []
        module = importlib.import_module(COMMANDS[words[0]][0])
        monkeypatch.setattr(module, "run", lambda arguments, ran=ran: ran.append(arguments) or 0)
        assert main(words) == 0 and len(ran) == 1


def test_list_names_everything_once_with_a_line_of_explanation(capsys):
    assert main(["list", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == ["experiments", "backends", "models", "accountants"]
    for entries in listed.values():
        names = [entry["name"] for entry in entries]
        assert len(names) == len(set(names)) > 0
        assert all(set(entry) == {"name", "doc"} and entry["doc"] and "\n" not in entry["doc"] for entry in entries)
    assert main(["list"]) == 0
    table = capsys.readouterr().out
    assert all(entry["name"] in table and entry["doc"] in table for entries in listed.values() for entry in entries)


EPSILON = ["epsilon", "--sample-rate", "0.01", "--steps", "10000", "--delta", "1e-5", "--noise-multiplier"]


@pytest.mark.parametrize(
    ("arguments", "libraries", "absent"),
    [
        (["list"], "numpy", "scipy"),
        (["plan", "stress_test", "--device", "cpu"], "numpy", "scipy"),
        ([*EPSILON, "4", "--accountant", "moments"], "numpy", "scipy"),
        pytest.param([*EPSILON, "1"], "dp_accounting.pld", "opacus", marks=pytest.mark.slow),
    ],
    ids=["list", "plan", "epsilon", "all accountants"],
)
def test_what_imports_no_torch_answers_at_once(arguments, libraries, absent):
    code = (
        "import sys; from dpbench.cli import main; code = main(sys.argv[2:])\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'sklearn', 'timm', 'transformers', 'ray', 'submitit', sys.argv[1]}\n"
        "print(code, *heavy & set(sys.modules), file=sys.stderr)"
    )
    told = []

    def command():
        words = [sys.executable, "-c", code, absent, *arguments]
        told.append(subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stderr.strip())

    assert as_quick_as_imports(command, libraries, times=4)
    assert set(told) == {"0"}


CELLS = [
    *grid(StepTrial, model=["cnn", "vgg11"], backend=["ghost", "vmap"], batch_size=[8, 16]),
    MaxBatch(probe=PeakTrial(model="cnn", backend="ghost", batch_size=1, simulated=True)),
]


def test_only_selects_by_fields():
    assert parse_only(["model=cnn,vgg11", "backend=ghost", "model=vgg13"]) == {
        "model": ["cnn", "vgg11", "vgg13"],
        "backend": ["ghost"],
    }
    assert parse_only(["compiled=true,False"]) == {"compiled": ["True", "False"]}
    assert len(select(CELLS, {})) == len(CELLS)
    assert len(select(CELLS, {"model": ["cnn"]})) == 5
    assert len(select(CELLS, {"model": ["cnn"], "backend": ["ghost"]})) == 3
    assert len(select(CELLS, {"batch_size": ["16"]})) == 4
    assert len(select(CELLS, {"kind": ["peak"]})) == 1


def test_only_that_selects_nothing_says_so():
    with pytest.raises(UsageError, match="model=vgg11 kind=peak"):
        select(CELLS, {"model": ["vgg11"], "kind": ["peak"]})


def test_files_of_ones_own_take_no_name_of_ours(tmp_path):
    """The command line imports nothing from the current folder; where Python would, the file is named."""
    for name in ("clipping", "accounting", "experiments"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not mine')\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def run(*words):
        return subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert run("-m", "dpbench", "list").returncode == 0
    said = run("-c", "import dpbench").stderr
    assert f"got {tmp_path / 'accounting.py'}: give that file another name" in said


WAITING = """
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


def waited(stderr):
    return subprocess.run([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT, text=True)


def painted() -> list[str]:
    """What a terminal sees, cut where the line was wiped."""
    ours, theirs = pty.openpty()
    done = waited(theirs)
    os.close(theirs)
    said = os.read(ours, 10_000).decode()
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, "answer\n")
    return said.split("\r\x1b[K")


def test_a_terminal_says_what_a_command_waits_for():
    """It is painted again after what is told, and wiped at the end."""
    wanted = ["\r0 s: pld, 1 of 7 accountants\x1b[K", "told\r\n\r1 s: pld, 1 of 7 accountants\x1b[K", ""]
    seen = [painted()]
    while seen[-1] != wanted and len(seen) < 3:  # a busy machine may delay it by a second
        seen.append(painted())
    assert seen[-1] == wanted, seen


def test_nothing_is_painted_where_nobody_looks():
    done = waited(subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "answer\n", "told\n")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    pytest.importorskip("shtab", reason="shtab is not installed")
    path = tmp_path_factory.mktemp("completion") / "script"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["--print-completion", "bash"]) == 0
    return path


def test_bash_completes(script):
    for typed, completed in [
        ("re", "recommend report"),
        ("run memory_", "memory_accuracy memory_speed"),
        ("explain resnet15", "resnet152"),
        ("check --backend gh", "ghost"),
        ("epsilon --accountant p", "prv pld"),
        ("report --out", "--output"),
        ("compare --format j", "json"),
    ]:
        words = ["dpbench", *typed.split()]
        program = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_dpbench; echo "${COMPREPLY[*]}"'
        done = subprocess.run(["bash", "-c", program, script, *words], capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (completed, "")
