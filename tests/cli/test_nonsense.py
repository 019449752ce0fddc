"""Nonsense of every kind, typed at every command: one line on standard error, exit code 2, and nothing written."""

import shlex
from pathlib import Path

import pytest

from dpbench.cli import main
from dpbench.cli.command_line import COMMANDS

EPSILON = "epsilon --noise-multiplier 1 --sample-rate .1 --steps 10 --delta 1e-5"
CALIBRATE = "calibrate --target-epsilon 1 --sample-rate .1 --steps 10 --delta 1e-5"
NUMBERS = ("''", "nan", "-1", "x", "1e400", "1/0")
LINES = [
    *("''", "'' list", "nope", "--nope", "--format json", "list x", "list --format ''", "list --format xml"),
    *(f"plan {name}" for name in ("", "''", "folder", "file", "nope.py", "file:X")),
    *(f"plan stress_test --rounds {value}" for value in ("''", "nan", "-1", "0", "1e9")),
    *(f"plan stress_test --minutes {value}" for value in ("''", "nan", "-1")),
    *(f"plan stress_test --device cpu --only {value}" for value in ("''", "=", "model=", "=cnn", "model=cn")),
    *("plan stress_test --device ''", "plan stress_test --retry ,", "plan stress_test --output ''"),
    *(
        "plan stress_test --device cpu --output file",
        "plan stress_test --cluster nope",
        "plan stress_test --cluster ''",
    ),
    *("run", "run ''", "run folder", "run stress_test --executor x"),
    *("run stress_test --cpus -1", "run stress_test --output ''"),
    *(
        "check --model ''",
        "check --model folder",
        "check --backend ''",
        "check --dtype ''",
        "check --device tpu",
        "check x",
    ),
    *(f"explain {name}" for name in ("", "''", "folder", "folder:build", "file:build", "timm:", "'cnn?x'", "cnn cnn")),
    *(f"explain cnn --batch-size {value}" for value in ("''", "nan", "-1", "0", "1e3", 10**20)),
    *("explain cnn --image-size -1", "explain cnn --num-classes 0", "explain cnn --format yaml"),
    *("template", "template ''", "template folder", "template file/x.py", "template /proc/x.py"),
    *(
        f"compare {runs}"
        for runs in ("", "folder", "'' ''", "folder folder", "file file", "nope nope", "folder /dev/null")
    ),
    *(f"compare folder folder --fail-on {limit}" for limit in ("''", "slower:", "slower:nan%", "slower:-5%", "slow")),
    *(
        f"report {name}"
        for name in ("", "''", "folder", "file", "nope", "records --output ''", "records --output file")
    ),
    *(
        f"history {name}"
        for name in ("", "''", "folder", "file", "nope", "records --output ''", "records --output file")
    ),
    *(
        f"scorecard {name}"
        for name in ("''", "folder", "file", "nope", "records --output ''", "records --output folder")
    ),
    *(f"report records --output {name}" for name in ("/proc/y", "file/x")),
    *(f"{EPSILON} --{name} {value}" for name in ("delta", "steps") for value in NUMBERS),
    *(f"{EPSILON} --noise-multiplier {value}" for value in NUMBERS if value != "1e400"),  # infinite noise is private
    *(f"{EPSILON} --sample-rate {value}" for value in (*NUMBERS, "2", "a/b", "1/2/3")),
    *(
        f"{EPSILON} {rest}"
        for rest in ("--accountant ''", "--accountant folder.py:X", "--sampling ''", "--adjacency x")
    ),
    *(f"{EPSILON} {rest}" for rest in ("--epochs 1", "--batch-size 1", "--dataset-size -1", "--format x")),
    *(f"{CALIBRATE} --target-epsilon {value}" for value in NUMBERS),
    *(f"{CALIBRATE} {rest}" for rest in ("--solve ''", "--solve steps", "--steps 1e400")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("here")
    for name in ("folder", "records"):
        (path / name).mkdir()
    (path / "file").write_text("x")
    results = Path(__file__).resolve().parents[2] / "results" / "accountants"
    (path / "records" / "a.jsonl").write_bytes(next(iter(sorted(results.glob("*.jsonl")))).read_bytes())
    return path


@pytest.mark.parametrize("command", [*sorted(COMMANDS.keys() - {"recommend"}), "none"])
def test_it_is_one_line(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    of_it = [line for line in LINES if (line.split()[0] if line.split()[0] in COMMANDS else "none") == command]
    assert of_it
    for line in of_it:
        code = main(shlex.split(line))
        out, err = capsys.readouterr()
        one = err.count("\n") == 1 and err.startswith("dpbench: ")
        assert (code, out) == (2, "") and one, f"{line}: {code}, {out}, {err}"
        assert sorted(folder.rglob("*")) == before, line
