"""Mistakes and nonsense, typed at every command: one line on standard error, exit code 2, and nothing written."""

import shlex

import pytest
from report_records import RunFile

from dpbench.cli.command_line import COMMANDS

EPSILON = "epsilon --noise-multiplier 1 --sample-rate .1 --steps 10 --delta 1e-5"
CALIBRATE = "calibrate --target-epsilon 1 --sample-rate .1 --steps 10 --delta 1e-5"
GIVEN = "--sample-rate .1 --delta 1e-5"
PLAN, RUN, COMPARE = "plan stress_test --device cpu", "run stress_test", "compare a.jsonl"
NINES = "9" * 400
#: what is typed -> what is said of it
MISTAKES = {
    "lst": "a command, got 'lst'; did you mean 'list'? (one of list",
    "--frobnicate": "--frobnicate",
    "--format json list": "a command before --format, got 'none'",
    "list --json": "an option of dpbench list, one of --format, --help, -h, got '--json'",
    "--print-completion fish": "a shell after --print-completion",
    "list --format xml": "--format, one of table, json, got 'xml'",
    "run": "EXPERIMENT after dpbench run, got 'nothing'",
    "run no_such": "an experiment, one of",
    "plan stres_test": "did you mean 'stress_test'?",
    "plan nowhere.py": "'nowhere.py'",
    f"{RUN} --device tpu": "one of auto, cpu, cuda",
    f"{RUN} --rounds many": "a whole number for --rounds, got 'many'",
    f"{RUN} --rounds 0": "at least 1 for --rounds, got 0",
    f"{RUN} --rounds": "one argument after --rounds, got 'none'",
    f"{RUN} --minutes nine": "a number for --minutes, got 'nine'",
    f"{RUN} --minutes 0": "a positive number for --minutes, got 0.0",
    f"{RUN} --minutes inf": "a positive number for --minutes, got inf",
    f"{RUN} --minutes 9 --executor ray": "--minutes with --executor local, got '--executor ray'",
    f"{RUN} --executor rey": "did you mean 'ray'?",
    f"{RUN} --address a:1": "--address with --executor ray, got '--executor local'",
    f"{RUN} --executor ray --partition p": "--partition with --executor slurm, got '--executor ray'",
    f"{RUN} --executor ray --cpus 0": "at least 1 for --cpus, got 0",
    f"{RUN} --executor slurm --cluster locall": "did you mean 'local'?",
    f"{RUN} --executor ray --address ''": "a name after --address, got ''",
    f"{RUN} --executor slurm --partition ''": "a name after --partition, got ''",
    f"{RUN} --retry eror": "an outcome for --retry, got 'eror'; did you mean 'error'?",
    f"{RUN} --devise cpu": "got '--devise'; did you mean '--device'?",
    f"{RUN} accountants": "no further argument for dpbench run, got 'accountants'",
    f"{PLAN} --minutes 9 --cluster c": "--minutes without --cluster",
    f"{PLAN} --only model": "--only field=value or field=value,value, got 'model'",
    f"{PLAN} --only modle=cnn": "got 'modle'; did you mean 'model'?",
    "run evidence --device cpu --only precision=bfloat17": "got 'bfloat17'; did you mean 'bfloat16'?",
    f"{PLAN} --only backend=gost": "got 'gost'; did you mean 'ghost'?",
    "plan captured --device cpu --only model=tiny:image/vitt": "did you mean 'tiny:image/vit'? (one of ",
    "check --model resnet18x": "did you mean 'resnet18'?",
    "check --model cnn --backend gost": "a backend, got 'gost'; did you mean 'ghost'? (one of",
    "check --model nowhere.py:f": "nowhere.py:f",
    "check --dtype float65": "float64",
    "check --dtype bfloat16-autocast": "without --sensitivity",
    "check --conformance --dtype float32": "no --dtype with the conformance cases",
    "check --conformance --backend nonprivate": "a backend that clips with --conformance, got 'nonprivate'",
    "check --conformance --backend gost": "did you mean 'ghost'?",
    "check --conformanc": "did you mean '--conformance'?",
    "check --sensitivity --model cnn": "--sensitivity without --model",
    "check --sensitivity --conformance": "without --model and --conformance",
    "check --sensitivity --backend nonprivate": "a backend that clips with --sensitivity, got 'nonprivate'",
    "check cnn": "no further argument for dpbench check, got 'cnn'",
    "explain": "MODEL after dpbench explain, got 'nothing'",
    "explain nope.py:f": "path/file.py:factory of an existing file, got 'nope.py:f'",
    "explain tim:vit": "got 'tim:vit'; did you mean 'timm'?",
    "explain cnn --batch-size 0": "at least 1 for --batch-size, got 0",
    "recommend resnet19": "did you mean 'resnet18'? (one of cnn",
    "recommend cnn --memory plenty": "a size for --memory such as 16GiB or 500MB, got 'plenty'",
    "recommend cnn --device cpu --precision tf32": "a precision that cpu has, as float32, got 'tf32'",
    "recommend cnn --seconds 1": "at least 20 for --seconds, got 1.0",
    "recommend cnn --seconds nan": "at least 20 for --seconds, got nan",
    "recommend cnn --memory '16 parsecs'": "a size for --memory such as 16GiB or 500MB, got '16 parsecs'",
    "compare nowhere nowhere2": "folder or file with records, got 'nowhere'",
    COMPARE: "B after dpbench compare",
    f"{COMPARE} folder": "records (*.jsonl) in folder, got 'none'",
    f"{COMPARE} blank.jsonl": "records in blank.jsonl, got 'none'",
    f"{COMPARE} memory_speed": "records in results/memory_speed (`python -m dpbench run memory_speed` makes them)",
    f"{COMPARE} memory_sped": "did you mean 'memory_speed'?",
    f"{COMPARE} a.jsonl --fail-on slow:5%": "a verdict for --fail-on, got 'slow'; did you mean 'slower'?",
    f"{COMPARE} a.jsonl --fail-on slower:five": "--fail-on as slower:5%, larger:10% or failed, got 'slower:five'",
    f"{COMPARE} a.jsonl --fail-on failed:5%": "--fail-on as slower:5%",
    "compare epsilon.jsonl epsilon.jsonl": "step, overhead or peak trials",
    "report stress_tset": "got 'stress_tset'; did you mean 'stress_test'?",
    "report stress_test": "records in results/stress_test (`python -m dpbench run stress_test` makes them)",
    "report folder": "records in folder (`python -m dpbench run EXPERIMENT` makes them), got 'none'",
    "report records --output file": "an output folder that can be written to, got 'file",
    "scorecard nope": "a folder with records, got 'nope'",
    "scorecard folder": "records in folder (`python -m dpbench run EXPERIMENT` makes them), got 'none'",
    "epsilon": "--noise-multiplier and --sample-rate, or --batch-size and --dataset-size and --steps or --epochs",
    f"{EPSILON} --sample-rate 1.5": "--sample-rate in [0, 1], got 1.5",
    f"{EPSILON} --sample-rate 1/0": "--sample-rate to be a number, got '1/0'",
    f"{EPSILON} --noise-multiplier -4": "--noise-multiplier to be a number >= 0, got -4",
    f"{EPSILON} --noise-multiplier four": "--noise-multiplier to be a number, got 'four'",
    f"{EPSILON} --steps 2.5": "--steps to be a whole number >= 0, got 2.5",
    f"{EPSILON} --delta -1e-5": "--delta in [0, 1], got -1e-05",
    f"{EPSILON} --accountant momets": "got 'momets'; did you mean 'moments'?",
    f"{EPSILON} --accountant RDP": "got 'RDP'; did you mean 'rdp'?",
    f"{EPSILON} --noise 1": "got '--noise'; did you mean '--noise-multiplier'?",
    f"{EPSILON} --sampling poison": "got 'poison'; did you mean 'poisson'?",
    f"{EPSILON} --adjacency replace": "got 'replace'; did you mean 'replace_one'?",
    f"{EPSILON} --sampling shuffled --adjacency add_remove": "zero_out or replace_one with sampling shuffled",
    f"{EPSILON} --max-batch-size 5": "--max-batch-size with truncated Poisson sampling only, not with poisson, got 5",
    f"{EPSILON} --sampling truncated_poisson": "--dataset-size under truncated Poisson sampling, got None",
    f"{EPSILON} --epochs 1": "either --steps or --epochs, got 'both'",
    f"{EPSILON} --batch-size 256": "--batch-size with --dataset-size, or --sample-rate",
    "epsilon --noise-multiplier 1 --batch-size 9 --dataset-size 8": "--batch-size to be at most --dataset-size",
    f"epsilon --noise-multiplier 1 --steps 9 --batch-size .5 --dataset-size {NINES}": "below 1e308, got '.5'",
    f"{EPSILON} --tuned 0.5": "--tuned to be a finite number >= 1, got '0.5'",
    f"{EPSILON} --tuned 3 --tuned-by poison": "did you mean 'poisson'",
    f"{EPSILON} --tuned-by poisson": "--tuned-by with --tuned",
    f"{EPSILON} --group-size 0": "--group-size to be a whole number >= 1, got 0",
    f"{EPSILON} --tuned 3 --risk --output a.png": "--output with --risk, and of one run",
    f"{EPSILON} --risk --output a.txt": "a suffix of --output",
    f"{EPSILON} --risk --output nowhere/a.png": "--output in an existing folder, got 'nowhere/a.png'",
    f"{CALIBRATE} --target-epsilon 0": "--target-epsilon to be a finite number > 0, got 0",
    f"{CALIBRATE} --target-epsilon one": "--target-epsilon to be a number, got 'one'",
    f"{CALIBRATE} --sample-rate 1.5": "--sample-rate in [0, 1], got 1.5",
    f"{CALIBRATE} --noise-multiplier 4": "no --noise-multiplier when solving for noise-multiplier, got '4'",
    f"{CALIBRATE} --noise-multiplier 4 --solve steps": "no --steps when solving for steps, got '10'",
    f"{CALIBRATE} --solve sigma": "noise_multiplier, steps, epochs, sample_rate, got 'sigma'",
    f"{CALIBRATE} --target-tpr .1": "one of --target-epsilon, --target-advantage or --target-tpr, got 'several'",
    f"{CALIBRATE} --fpr .1": "--fpr with --target-tpr, got '.1'",
    f"calibrate {GIVEN} --steps 9": "one of --target-epsilon, --target-advantage or --target-tpr, got 'none'",
    f"calibrate {GIVEN} --target-epsilon 1": "--steps when solving for noise-multiplier, got 'none'",
    f"calibrate {GIVEN} --target-epsilon 1 --epochs -3": "at a sample rate above 0, got '-3'",
    f"calibrate {GIVEN} --steps 9 --target-advantage 1": "--target-advantage",
}
NUMBERS = ("''", "nan", "-1", "x", "1e400", "1/0")
SOURCES = ("''", "folder", "file", "nope", "records --output ''")
#: The begin of a line -> its ends.
ENDS = {
    "": ("''", "'' list", "nope", "--nope", "--format json", "--print-completion", "--print-completion ''"),
    "list": ("x", "--format ''"),
    "plan": ("", "''", "folder", "file", "nope.py", "file:X", "~nosuchuser/x.py"),
    PLAN: ("--output file", "--output ''", "--device ''", "--retry ,", "--cluster nope", "--cluster ''"),
    f"{PLAN} --rounds": ("''", "nan", "-1", "1e9", 10_001, NINES, "9" * 5000),
    f"{PLAN} --minutes": ("''", "nan", "-1"),
    f"{PLAN} --only": ("''", "=", "model=", "=cnn", "model=cn"),
    "run": ("''", "folder", "~nosuchuser/x.py:f"),
    RUN: ("--executor x", "--cpus -1", "--output ''", "--output file", "--minutes 1e400"),
    "check": ("--dtype ''", "--device tpu"),
    "check --model": ("''", "folder", "~nosuchuser/x.py:f"),
    "check --backend": ("''", "~nosuchuser/x.py:f"),
    "explain": ("''", "folder", "folder:build", "file:build", "timm:", "'cnn?x'", "cnn cnn", "~nosuchuser/x.py:f"),
    "explain cnn": ("--image-size -1", "--num-classes 0", "--format yaml"),
    "explain cnn --batch-size": ("''", "nan", "-1", "1e3", 10**20, f"{NINES}0000x"),
    "recommend": ("~nosuchuser/x.py:f",),
    "recommend cnn --memory": ("''", "GiB", "-1GiB", "0", "1.2.3GB", "inf"),
    "template": ("", "''", "folder", "file/x.py", "/proc/x.py"),
    "compare": ("", "folder", "'' ''", "folder folder", "file file", "nope nope", "folder /dev/null"),
    "compare folder folder --fail-on": ("''", "slower:", "slower:nan%", "slower:-5%", "slow"),
    "report": ("", *SOURCES, *(f"records --output {name}" for name in ("file", "file/x", "/proc/y")), "~nosuchuser/x"),
    "history": ("", *SOURCES, "records --output file"),
    "scorecard": (*SOURCES, "records --output folder"),
    f"{EPSILON} --delta": (*NUMBERS, NINES),
    f"{EPSILON} --steps": (*NUMBERS, f"-{NINES}"),
    f"{EPSILON} --noise-multiplier": [value for value in NUMBERS if value != "1e400"],  # infinite noise is private
    f"{EPSILON} --sample-rate": (*NUMBERS, "2", "a/b", "1/2/3", NINES),
    f"{EPSILON} --accountant": ("''", "folder.py:X"),
    EPSILON: ("--sampling ''", "--adjacency x", "--batch-size 1", "--dataset-size -1", "--format x"),
    f"{CALIBRATE} --target-epsilon": (*NUMBERS, NINES),
    CALIBRATE: (f"--epochs {NINES}", "--solve ''", "--solve steps", "--steps 1e400"),
}
LINES = [f"{begin} {end}".strip() for begin, ends in ENDS.items() for end in ends]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("here")
    (path / "folder").mkdir()
    (path / "file").write_text("x")
    (path / "blank.jsonl").touch()
    RunFile(path / "a.jsonl").step("cnn", "ghost", [1.0, 1.0])
    for name in ("epsilon.jsonl", "records/a.jsonl"):
        RunFile(path / name).epsilon("moments", 100, 1.0)
    return path


@pytest.mark.parametrize("command", [*sorted(COMMANDS), "none"])
def test_it_is_one_line(command, folder, monkeypatch, dpbench):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    for line, said in [*MISTAKES.items(), *((line, "") for line in LINES)]:
        if (line.split()[0] if line.split()[0] in COMMANDS else "none") != command:
            continue
        code, out, err = dpbench(*shlex.split(line))
        one = err.count("\n") == 1 and err.startswith("dpbench: ") and len(err) < 2000 + len(line)
        assert (code, out) == (2, "") and one and said in err, f"{line}: {code}, {out}, {err}"
        assert sorted(folder.rglob("*")) == before, line
