"""What a person types: answers at once, and one line for everything that is wrong."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
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
EPSILON = ["epsilon", "--sample-rate", "0.01", "--noise-multiplier", "4", "--steps", "1000", "--delta", "1e-5"]


def dpbench(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dpbench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, **kwargs)


def test_what_is_wrong_is_one_line_and_exit_2(capsys):
    for arguments, said in [
        (["lst"], ["a command, got 'lst'; did you mean 'list'? (one of list"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["run"], ["EXPERIMENT", "nothing"]),
        (["run", "no_such"], ["an experiment, one of", "stress_test", "'no_such'"]),
        (["plan", "stres_test"], ["did you mean 'stress_test'?"]),
        (["plan", "nowhere.py"], ["'nowhere.py'"]),
        (["run", "stress_test", "--device", "tpu"], ["--device", "auto, cpu, cuda", "'tpu'"]),
        (["run", "stress_test", "--rounds", "many"], ["a whole number for --rounds", "'many'"]),
        (["run", "stress_test", "--rounds", "0"], ["at least 1 for --rounds", "0"]),
        (["run", "stress_test", "--rounds"], ["one argument after --rounds", "none"]),
        (["run", "stress_test", "--minutes", "nine"], ["a number for --minutes", "'nine'"]),
        (["run", "stress_test", "--minutes", "0"], ["a positive number for --minutes", "0.0"]),
        (["plan", "stress_test", "--minutes", "-1"], ["a positive number for --minutes", "-1.0"]),
        (["run", "stress_test", "--minutes", "9", "--executor", "ray"], ["--executor local", "'--executor ray'"]),
        (["plan", "stress_test", "--device", "cpu", "--minutes", "9", "--cluster", "c"], ["without --cluster"]),
        (["run", "stress_test", "--retry", "eror"], ["an outcome for --retry", "did you mean 'error'?"]),
        (["run", "stress_test", "--retry", "ok"], ["an outcome for --retry", "'ok'"]),
        (["run", "stress_test", "--devise", "cpu"], ["'--devise'", "did you mean '--device'?"]),
        (["run", "stress_test", "accountants"], ["no further argument", "'accountants'"]),
        (["plan", "stress_test", "--device", "cpu", "--only", "model"], ["--only field=value", "'model'"]),
        (["plan", "stress_test", "--device", "cpu", "--only", "modle=cnn"], ["'modle'", "did you mean 'model'?"]),
        (["plan", "stress_test", "--device", "cpu", "--only", "backend=gost"], ["'gost'", "did you mean 'ghost'?"]),
        (["list", "--format", "xml"], ["--format", "table, json", "'xml'"]),
        ([*EPSILON[:2], "x", *EPSILON[3:]], ["--sample-rate", "'x'"]),
        (["epsilon"], ["--noise-multiplier", "nothing"]),
        (["epsilon", "--noise-multiplier", "1", "--delta", "1e-5"], ["--sample-rate, or --batch-size", "--steps or"]),
    ]:
        code = main(arguments)
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("dpbench: ") and err.count("\n") == 1
        for words in said:
            assert words in err


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").exists(), reason="there is a GPU")
def test_cuda_where_there_is_none(capsys, tmp_path):
    assert main(["run", "stress_test", "--device", "cuda", "--output", str(tmp_path / "out")]) == 2
    assert "a CUDA device on this machine" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["run", "accountants", "--output", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(tmp_path / "file") in err


def test_an_experiment_that_raises_is_one_line(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0")
    assert main(["plan", str(tmp_path / "mine.py")]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_no_command_is_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_every_command_has_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0 and f"dpbench {name}" in capsys.readouterr().out


def test_help_answers_questions_and_every_command_has_an_example(capsys):
    assert set(EXAMPLES) == set(COMMANDS)
    main([])
    out = capsys.readouterr().out
    assert all(question in out and f"dpbench {command}" in out for question, command in QUESTIONS)
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


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version(arguments):
    done = dpbench(*arguments)
    assert done.returncode == 0 and "dpbench" in done.stdout and done.stderr == ""


def test_list_names_everything_once_with_a_line_of_explanation():
    listed = json.loads(dpbench("list", "--format", "json").stdout)
    assert list(listed) == ["experiments", "backends", "models", "accountants"]
    for entries in listed.values():
        names = [entry["name"] for entry in entries]
        assert len(names) == len(set(names)) > 0
        assert all(set(entry) == {"name", "doc"} and entry["doc"] and "\n" not in entry["doc"] for entry in entries)
    table = dpbench("list").stdout
    assert all(entry["name"] in table and entry["doc"] in table for entries in listed.values() for entry in entries)


@pytest.mark.parametrize(
    "arguments", [["list"], ["plan", "stress_test", "--device", "cpu"]], ids=lambda arguments: arguments[0]
)
def test_what_imports_no_torch_answers_at_once(arguments):
    """`epsilon`, too: test_command_epsilon."""
    code = (
        "import sys; from dpbench.cli import main; code = main(sys.argv[1:])\n"
        "print(code, *{'torch', 'pandas', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )
    told = []

    def command():
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
        told.append(done.stderr.strip())

    assert as_quick_as_imports(command, "numpy", times=4)
    assert set(told) == {"0"}


def test_a_reader_that_goes_away_ends_it_in_silence():
    """As it ends every command of a pipe, 141; or all was in the pipe before it went."""
    command = f"{sys.executable} -m dpbench list --format json | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in (0, 128 + signal.SIGPIPE) and (done.stdout, done.stderr) == ("{", "")


def test_it_works_from_any_folder(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dpbench", "run", "accountants", "--smoke", "--only", "accountant=rdp"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "results" / "accountants-smoke").glob("*.jsonl"))) == 1
    printed = [Path(line) for line in done.stdout.splitlines()]
    assert printed and all((tmp_path / path).is_file() for path in printed)  # the figures, and nothing else


CELLS = [
    *grid(StepTrial, model=["cnn", "vgg11"], backend=["ghost", "vmap"], batch_size=[8, 16]),
    MaxBatch(probe=PeakTrial(model="cnn", backend="ghost", batch_size=1, simulated=True)),
]


def test_only_selects_by_fields():
    assert parse_only(["model=cnn,vgg11", "backend=ghost", "model=vgg13"]) == {
        "model": ["cnn", "vgg11", "vgg13"],
        "backend": ["ghost"],
    }
    assert len(select(CELLS, {})) == len(CELLS)
    assert len(select(CELLS, {"model": ["cnn"]})) == 5
    assert len(select(CELLS, {"model": ["cnn"], "backend": ["ghost"]})) == 3
    assert len(select(CELLS, {"batch_size": ["16"]})) == 4
    assert len(select(CELLS, {"kind": ["peak"]})) == 1


def test_only_takes_a_boolean_as_people_type_it():
    assert parse_only(["compiled=true,False"]) == {"compiled": ["True", "False"]}


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ({"colour": ["red"]}, "a field of this experiment's trials"),
        ({"model": ["vgg12"]}, "did you mean 'vgg11'"),
        ({"model": ["vgg11"], "kind": ["peak"]}, "model=vgg11 kind=peak"),
    ],
)
def test_only_that_selects_nothing_says_so(only, said):
    with pytest.raises(UsageError, match=said):
        select(CELLS, only)


@pytest.mark.parametrize("text", ["model", "=cnn", "model=", ""])
def test_only_of_another_form(text):
    with pytest.raises(UsageError, match="--only field=value"):
        parse_only([text])


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
