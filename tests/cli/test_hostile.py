"""What a person's files, paths and numbers may hold: one line says what is wrong, and nothing is written elsewhere."""

import csv
import io
import json
import os
from pathlib import Path

import pandas as pd
import pytest
from report_records import CPU, RunFile, save_no_pictures

from dpbench.cli import command_line, main
from dpbench.report import readable
from dpbench.report.output import files
from dpbench.report.parts import Part
from dpbench.trials import EpsilonTrial

HEAD = """
import sys
from dpbench.experiment import Experiment, MaxBatch
from dpbench.trials import EpsilonTrial, PeakTrial

def good(device):
    return [EpsilonTrial(accountant="rdp", sample_rate=0.1, delta=1e-5, noise_multiplier=1.0, steps=10)]

def make(cells=good, name="mine", **more):
    return Experiment(**{"name": name, "doc": "For a test.", "cells": cells, "smoke": cells, "rounds": 1, **more})

def search(**changes):
    return MaxBatch(**{"probe": PeakTrial(model="cnn", backend="ghost", batch_size=1, simulated=True), **changes})

def of_class(**names):
    return make(lambda device: [type("Mine", (EpsilonTrial,), names)(**good(device)[0].to_wire()["fields"])])

def boom(*arguments):
    raise KeyError("boom")

class Leaves(BaseException):
    pass

"""
NAMES = ("..", "../../away", "/away", "a/b", "a\\b", "", ".hidden", "-o", "a\0b", "a\nb", "\udc80", "x" * 200)
#: what the file goes on with -> what is said of it
EXPERIMENTS = {
    "def cells(device):\n    raise ValueError('boom\\nmore')\nEXPERIMENT = make(cells)": "ValueError: boom more",
    "EXPERIMENT = make(lambda device: None)": "'NoneType' object is not iterable",
    "EXPERIMENT = make(lambda device: [1, 'x'])": "expected a trial or a search in cells of mine, got 1",
    "EXPERIMENT = make(lambda device: [t.replace(noise_multiplier=float('nan')) for t in good(device)])": "not JSON",
    "EXPERIMENT = make(lambda device: [t.replace(steps=object()) for t in good(device)])": "not JSON serializable",
    "EXPERIMENT = make(lambda device: [t.replace(steps=10**400) for t in good(device)])": "steps: Expected `int` <= ",
    "EXPERIMENT = make(lambda device: [t.replace(accountant=None) for t in good(device)])": "trial.accountant",
    "EXPERIMENT = make(lambda device: sys.exit(0))": "SystemExit: 0",
    "sys.exit(0)": "SystemExit: 0",
    "EXPERIMENT = make(cells=[])": "TypeError: 'list' object is not callable",
    "EXPERIMENT = 3": "expected EXPERIMENT = Experiment(...) in ",
    "": "expected EXPERIMENT = Experiment(...) in ",
    "import no_such_module": "mine.py, got \"ModuleNotFoundError: No module named 'no_such_module'",
    "def (": "mine.py, got 'SyntaxError: ",
    "EXPERIMENT = make(doc=7)": "AttributeError: 'int' object has no attribute",
    "EXPERIMENT = make(rounds=0)": "expected at least 1 for rounds of mine, got 0",
    "EXPERIMENT = make(rounds=-3)": "got -3",
    "EXPERIMENT = make(rounds=10**400)": "expected at most 10000 for rounds of mine",
    **{f"EXPERIMENT = make(name={name!r})": "a name that a folder can have" for name in NAMES},
    "EXPERIMENT = make(name=None)": "AttributeError: 'NoneType' object has no attribute",
    "raise Leaves('boom')": "Leaves: boom",
    "def cells(device):\n    raise Leaves('boom')\nEXPERIMENT = make(cells)": "Leaves: boom",
    **{f"EXPERIMENT = of_class({name}=boom)": "KeyError: 'boom'" for name in ("describe", "modules", "label")},
    **{f"EXPERIMENT = of_class({name}=property(boom))": "KeyError: 'boom'" for name in ("alone", "id")},
    "EXPERIMENT = of_class(modules=lambda self: None)": "Mine: TypeError",
    "EXPERIMENT = of_class(label=lambda self: 7)": "Mine: an id, a label or modules that are no texts",
    "EXPERIMENT = of_class(__hash__=None)": "unhashable",
    "EXPERIMENT = make(lambda device: [t.replace(steps=[1]) for t in good(device)])": "EpsilonTrial: TypeError: ",
    **{
        f"EXPERIMENT = make(lambda device: [t.replace(timeout={value}) for t in good(device)])": "a timeout of "
        for value in ("None", "'5'", "-5", "0", "True", "float('nan')")
    },
    **{
        f"EXPERIMENT = make(lambda device: [search({name}={value})])": f"for {name}, got {value}"
        for name, value in (("start", 0), ("start", "'8'"), ("max_batch_size", 0), ("tolerance", -5), ("tolerance", 1))
    },
    "EXPERIMENT = make(lambda device: [search(probe=None)])": "MaxBatch: AttributeError",
    "EXPERIMENT = make(lambda device: [search(probe=good(device)[0])])": "MaxBatch: TypeError",
    "EXPERIMENT = make(lambda device: [search(then=7)])": "MaxBatch: AttributeError",
    "EXPERIMENT = make(rounds=True)": "expected at least 1 for rounds of mine, got True",
    **{f"EXPERIMENT = make(figures={value})": "expected names in figures of mine" for value in ("'x'", "5", "(5,)")},
}


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + "EXPERIMENT = make()\n")
    return path


@pytest.mark.parametrize("command", ["plan", "run"])
def test_an_experiment_that_cannot_be_is_one_line(command, tmp_path, dpbench):
    for number, (text, expected) in enumerate(EXPERIMENTS.items()):
        path = tmp_path / str(number) / "mine.py"
        path.parent.mkdir()
        path.write_text(HEAD + text + "\n")
        code, out, err = dpbench(command, path, "--device", "cpu", "--output", tmp_path / "out" / "deep")
        assert (code, out, err.count("\n")) == (2, "", 1) and expected in err, (text, err)
        assert not (tmp_path / "out").exists(), "nothing is written"


def test_what_a_declaration_prints_is_no_part_of_the_answer(tmp_path, dpbench):
    path = tmp_path / "mine.py"
    text = "print('imported')\ndef cells(device):\n    print('declared')\n    yield from good(device)\n"
    path.write_text(HEAD + text + "EXPERIMENT = make(cells)\n")
    code, out, err = dpbench("plan", path, "--device", "cpu", "--format", "json", "--output", tmp_path)
    assert (code, json.loads(out)["experiment"], err) == (0, "mine", "imported\ndeclared\n")


def test_an_unknown_figure_is_said_before_anything_is_measured(tmp_path, dpbench):
    path, output = tmp_path / "mine.py", tmp_path / "results"
    path.write_text(HEAD + "EXPERIMENT = make(figures=('epsilon_epoch',))\n")
    code, _, said = dpbench("run", path, "--device", "cpu", "--output", output)
    assert code == 2 and "expected a figure, got" in said and "did you mean 'epsilon_epochs'? (one of" in said
    assert not list(tmp_path.rglob("*.jsonl"))


def test_steps_of_400_digits_have_an_answer(dpbench):
    given = ["--target-epsilon", "1", "--sample-rate", "0.1", "--delta", "1e-5", "--accountant", "rdp", "--steps"]
    code, out, _ = dpbench("calibrate", *given, "9" * 400)
    assert code == 1 and "no noise multiplier meets" in out


@pytest.mark.parametrize("what", ["a pipe", "brackets", "a number"])
@pytest.mark.parametrize("command", [["epsilon"], ["plan", "memory_speed", "--cluster"]])
def test_a_file_of_toml_that_is_none_is_one_line(command, what, tmp_path, dpbench):
    path = tmp_path / "a.toml"
    if what == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text("x = " + ("[" * 20_000 + "]" * 20_000 if what == "brackets" else "9" * 5000))
    code, out, err = dpbench(*command, path)
    assert (code, out, err.count("\n")) == (2, "", 1) and str(path) in err


def test_a_template_s_name_that_is_not_utf_8(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["template", "\udcff.py"]) == 0
    (path,) = tmp_path.iterdir()
    compile(path.read_text(encoding="utf-8"), "mine.py", "exec")
    before = path.read_bytes()
    assert main(["template", "\udcff.py"]) == 2 and path.read_bytes() == before


def test_paths_that_are_not_utf_8(tmp_path, capsys, monkeypatch):
    """Their bytes are shown as escapes; what is run, recorded, found again and drawn is the same as elsewhere."""
    save_no_pictures(monkeypatch)
    folder = tmp_path / os.fsdecode(b"f\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("a file system that has text alone for names")
    path, output = folder / os.fsdecode(b"e\xfe.py"), folder / os.fsdecode(b"o\xfd")
    path.write_text(HEAD + "EXPERIMENT = make(figures=('epsilon_epochs',))\n")
    for stream in ("stdout", "stderr"):  # as a terminal has them: strict
        monkeypatch.setattr(command_line.sys, stream, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    for command in ("run", "plan"):
        assert main([command, str(path), "--device", "cpu", "--output", str(output)]) == 0
    assert main(["report", str(output / "mine")]) == 0
    assert main(["plan", str(path) + "x"]) == 2
    assert rb"o\udcfd" in (output / "mine" / "report.html").read_bytes()
    command_line.sys.stdout.flush()
    assert (
        rb"o\udcfd" in command_line.sys.stdout.buffer.getvalue()
        and b"done 1, remaining 0" in command_line.sys.stdout.buffer.getvalue()
    )


def test_a_trial_s_path_that_is_not_utf_8_is_one_trial():
    """In its record, its description and its identity alike; what runs has the path itself."""
    trial = EpsilonTrial(accountant="a\udcff", sample_rate=0.1, delta=1e-5, noise_multiplier=1.0, steps=1)
    assert trial.describe()["accountant"] == r"a\udcff" and trial.to_wire()["fields"]["accountant"] == "a\udcff"
    assert EpsilonTrial.from_wire(trial.to_wire()).id == trial.id


ESCAPES = "\x1b[2J\x1b]0;owned\x07 \u202etxt"
MATHS = "$x^2_{$ \\frac{"


def test_no_text_of_a_record_is_taken_for_mathematics(tmp_path, dpbench, monkeypatch):
    """Wherever a figure or a table has it: a model, a backend, a device, a kind without a figure, a reason."""
    monkeypatch.setattr(files, "save_all", lambda drawn: None)  # the page draws each figure
    for number, environment in enumerate((CPU, CPU | {"device_name": MATHS})):
        file = RunFile(tmp_path / "some" / f"{number}.jsonl", environment=environment)
        file.step(MATHS, "ghost", [1.0]).step(MATHS, MATHS, [2.0]).step("cnn", "ghost", [1.0])
        file.search(MATHS, "ghost", fits=(8, 16), fails=(32,)).epsilon(MATHS, 100, 1.0)
        strange = EpsilonTrial(accountant="rdp", sample_rate=0.1, delta=1e-5, noise_multiplier=1.0, steps=1)
        file.add(strange, outcome="error", evidence=MATHS)
        lines = file.path.read_text().splitlines()
        kind = json.loads(lines[-1])
        kind["trial"] = {"kind": MATHS, "setting": MATHS}
        file.path.write_text("\n".join([*lines, json.dumps(kind)]) + "\n")
    code, _, err = dpbench("report", tmp_path / "some")
    assert code == 0 and "Traceback" not in err


def test_no_text_of_a_record_moves_the_cursor_of_a_terminal(tmp_path, dpbench):
    for name in ("a", "b"):
        environment = CPU | {"cpu": f"{ESCAPES}{name}", "driver": ESCAPES}
        file = RunFile(tmp_path / name / "x.jsonl", environment=environment)
        file.step(f"cnn{ESCAPES}", "ghost", [1.0]).step("cnn", f"ghost{ESCAPES}", [1.0])
        with file.path.open("a") as opened:
            opened.write('{"type": "\\u001b[2J"}\n')
    for command in (["compare", "a", "b"], ["report", "a"], ["plan", f"a{ESCAPES}"]):
        _, out, err = dpbench(command[0], *(tmp_path / name for name in command[1:]))
        assert not set("\x1b\x07\u202e") & set(out + err), command
        assert "\\x1b[2J" in out + err or command[0] == "report"


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", " =1"]


def test_no_text_of_a_record_is_a_formula_in_a_spreadsheet(tmp_path):
    plain = ["cnn", "-1.5", "+3", "-inf", "1 - 2", "a\nb", "'"]
    frame = pd.DataFrame({"=name": FORMULAS + plain, "number": [-1.0] * 13, "mixed": [None, -2, "=3", *[1.5] * 10]})
    files.write([Part("p", "t", "d", {}, [], frame, frame[["=name"]], "caption")], tmp_path)
    with (tmp_path / "d" / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["'=name"] for row in rows] == [f"'{text}" for text in FORMULAS] + plain
    assert {row["number"] for row in rows} == {"-1.0"}
    assert [row["mixed"] for row in rows[:4]] == ["", "-2", "'=3", "1.5"]


def test_no_tag_of_a_record_is_one_in_markdown(tmp_path, monkeypatch):
    save_no_pictures(monkeypatch)
    tag = "<img src=x onerror=alert(1)>"
    environment = {"device": "cpu", "device_name": f"CPU {tag}", "host": tag, "torch": f"2.15 {tag}", "threads": 2}
    RunFile(tmp_path / "a.jsonl", environment).step(tag, f"ghost{tag}", [1.0]).step(tag, "nonprivate", [1.0])
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    written = [path.read_text() for path in (tmp_path / "out").rglob("*.md")]
    assert written and all("<img" not in text for text in written) and any("&lt;img" in text for text in written)
    assert "<img src=x" not in (tmp_path / "out" / "report.html").read_text()
    assert (
        readable.no_html("p < 0.05 & q > 1, a<b, &lt; <!-- </p>")
        == "p < 0.05 & q > 1, a&lt;b, &amp;lt; &lt;!-- &lt;/p>"
    )
