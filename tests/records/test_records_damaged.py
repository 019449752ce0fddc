"""Lines that are JSON and no whole records: named, counted and passed over by all that reads them. No traceback."""

import codecs
import copy
import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from marks import slow_unless
from report_every import everything
from report_records import RunFile, save_no_pictures

from accounting.base import rounded
from dpbench.cli import main
from dpbench.execution import machines
from dpbench.experiment import load_experiment
from dpbench.records import environment, store
from dpbench.records.reader import from_line
from dpbench.records.store import read_runs
from dpbench.report import FIGURES, style, write_report
from dpbench.report.output import files
from dpbench.trials import line_shapes as whole
from dpbench.trials.line_shapes import flaw_of_line, flaw_of_result
from dpbench.trials.max_batch import Probe, probes_of
from dpbench.trials.shapes import DEPTH

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(path.name for path in (ROOT / "results").iterdir() if any(path.glob("*.jsonl")))
#: Of each experiment, so many mutated lines beside so many that are whole.
MUTATED, WHOLE = 40, 10
JUNK: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 0.5, -1.5, -0.0, 5e-324, 1e199, 1e308, 2**62, 10**30, 10**400),
    *("", "x", "ok", "oom", "mismatch", "cuda", "nonprivate", "step", "epsilon", "device", "profile", "inf", "nan"),
    *("\ud800", "../../x", "=1+1", "<b>", "2026-02-31T00:00:00Z", "x" * 3000),
    *([], [[]], [None], ["x"], {}, {"a": 1}),
)
ENVIRONMENT = {"type": "environment", "schema": store.SCHEMA, "run": "r", "utc": "2026-01-01T00:00:00.000000Z"}
ENVIRONMENT |= {"environment": {"device": "cpu", "device_name": "CPU"}}
STEP = {"model": "cnn", "backend": "ghost", "batch_size": 8, "device": "cpu", "precision": "float32", "steps": 3}
STEP |= {"image_size": 32, "num_classes": 10}
MEMORY = {"source": "rss", "peak_bytes": 2**20}


def trial(**changes: Any) -> dict[str, Any]:
    line = {"type": "trial", "schema": store.SCHEMA, "experiment": "e", "id": "i", "round": 0, "fingerprint": "f"}
    line |= {"trial": {"kind": "of ours"}, "outcome": "ok", "evidence": None, "seconds": 1.0, "result": {"n": 1}}
    return line | {"utc": "2026-01-01T00:00:00.000000Z"} | changes


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all that is inside; of a long list to its first entries."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def mutated(line: dict[str, Any], pick: random.Random) -> dict[str, Any]:
    """The line with one value gone, nested deeply, or another."""
    line = copy.deepcopy(line)
    *way, last = pick.choice(list(places(line)))
    at: Any = line
    for key in way:
        at = at[key]
    how = pick.randrange(5)
    if how == 0:
        del at[last]
    else:
        at[last] = nested(pick.choice([3, DEPTH, 900])) if how == 1 else copy.deepcopy(pick.choice(JUNK))
    return line


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("name", slow_unless(lambda name: name in EXPERIMENTS[::4], EXPERIMENTS))
def test_no_mutation_of_a_real_record_ends_a_reader(name, tmp_path, monkeypatch, capsys):
    """Some 1,000 of them: a record of each experiment in `results`, with a value that is gone, null, nested or junk."""
    save_no_pictures(monkeypatch)
    for module in (environment, machines):  # so that the records are those of today's sources, and count
        monkeypatch.setattr(module, "seal", lambda *_: "f" * 16)
    pick = random.Random(name)
    files = sorted((ROOT / "results" / name).glob("*.jsonl"))
    head, *lines = map(json.loads, pick.choice(files).read_text().splitlines())
    whole = [line | {"fingerprint": "f" * 16} for line in pick.sample(lines, min(len(lines), WHOLE))]
    write(tmp_path / name / "20260101T000000Z-x-1.jsonl", [head, *whole])
    write(
        tmp_path / name / "20260102T000000Z-x-1.jsonl",
        [head, *(mutated(pick.choice(whole), pick) for _ in range(MUTATED))],
    )
    write(tmp_path / name / "20260103T000000Z-x-1.jsonl", [mutated(head, pick), *whole])
    output = ["--output", str(tmp_path)]
    assert main(["plan", name, "--device", "cpu", *output]) == 0
    assert main(["report", str(tmp_path / name), "--output", str(tmp_path / "report")]) == 0
    assert main(["compare", str(tmp_path / name), str(tmp_path / name)]) in (0, 2)  # 2: none that can be compared
    said = capsys.readouterr().err
    assert f"{tmp_path / name / '20260102T000000Z-x-1.jsonl'}:" in said and "passed over" in said


PROFILED = {"kind": "profile", "model": "cnn", "backends": [], "batch_size": 1, "precision": "float32"}
LINES: dict[str, bytes | dict[str, Any]] = {
    "nothing but a type": b'{"type":"trial","schema":4}',
    "a hundred thousand brackets": b"[" * 100_000,
    "brackets in a result": trial(result={"a": nested(500)}),
    "a number": b"7",
    "a schema that is true": b'{"type": "trial", "schema": true}',
    "a trial that is a text": trial(schema=5, trial="step"),
    "no number of JSON": trial(seconds=float("nan")),
    "a number of 5,000 digits": b'{"type": "trial", "schema": 4, "round": ' + b"9" * 5000 + b"}",
    "no UTF-8": b'{"type": "\xff"}',
    "an outcome that is none": trial(outcome="fine"),
    "a day that is none": trial(utc="2026-02-31T00:00:00.000000Z"),
    "a time of another zone": trial(utc="2026-01-31T00:00:00+02:00"),
    "half a face, and no number": trial(result={"a": "\ud83d", "b": float("nan")}),
    "a step without times": trial(trial={"kind": "step"}),
    "a way to another folder": trial(trial=PROFILED, result={"files": {"trace": "../../secret"}}),
}


def test_a_line_that_is_no_whole_record_is_named_by_file_and_line(tmp_path):
    for bad in LINES.values():
        path = tmp_path / "a.jsonl"
        text = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
        good = [json.dumps(line).encode() for line in (ENVIRONMENT, trial(id="1"), trial(id="2"))]
        path.write_bytes(b"\n".join([*good[:2], text, good[2], b""]))
        said: list[str] = []
        (run,) = read_runs(tmp_path, said.append)
        assert [record["id"] for record in run.records] == ["1", "2"]
        (warning,) = said
        assert warning.startswith(f"{path}:3: not a record (") and warning.endswith("); passed over")
        assert "\n" not in warning and len(warning) < 600


def test_many_bad_lines_are_counted_and_the_first_named(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, [ENVIRONMENT, *[trial(round=None)] * 500, trial()])
    said: list[str] = []
    assert len(read_runs(tmp_path, said.append)[0].records) == 1
    assert len(said) == 11 and said[-1] == f"{path}: 500 of 502 lines are no records"


def test_records_after_an_environment_that_is_none_are_counted(tmp_path):
    write(tmp_path / "a.jsonl", [ENVIRONMENT | {"environment": None}, *[trial()] * 30])
    said: list[str] = []
    assert read_runs(tmp_path, said.append) == []
    assert [":1: not a record" in said[0], "30 lines with no whole 'environment'" in said[1], len(said)] == [1, 1, 2]


def test_a_field_that_a_kind_needs_is_asked_for():
    step = {"model": "m", "backend": "b", "batch_size": 1, "device": "cpu", "precision": "float32", "steps": 3}
    step |= {"kind": "step", "image_size": None, "num_classes": None}
    assert whole.flaw_of_trial(step) is None
    for name in ("batch_size", "image_size"):
        assert name in str(whole.flaw_of_trial({key: value for key, value in step.items() if key != name}))


def test_what_a_sweep_says_of_its_machine_is_asked_for():
    sweep = {"name": "n", "cluster": "c", "driver": "d", "versions": {}}
    where = ENVIRONMENT["environment"] | {"executor": sweep}
    assert "host" in str(flaw_of_line(ENVIRONMENT | {"environment": where}, {}))
    assert flaw_of_line(ENVIRONMENT | {"environment": where | {"host": "h"}}, {}) is None


@pytest.mark.parametrize("name", ["a pipe", "a folder", "a dangling link", "a link to itself"])
def test_what_is_named_like_a_file_of_records_and_is_none(name, tmp_path, capsys):
    folder = tmp_path / "e"
    write(folder / "a.jsonl", [ENVIRONMENT, trial()])
    odd = folder / "b.jsonl"
    if name == "a pipe":
        os.mkfifo(odd)  # opened for reading, it would be waited for
    elif name == "a folder":
        odd.mkdir()
    else:
        odd.symlink_to(odd if name == "a link to itself" else folder / "nowhere")
    assert [len(run.records) for run in read_runs(folder)] == [1]
    assert f"{odd}: not a file of records (" in capsys.readouterr().err
    assert main(["report", str(folder), "--output", str(tmp_path / "out")]) == 0


def test_every_record_that_is_kept_here_is_whole():
    """A shape that asks for more than bodies give would lose what was measured."""
    said: list[str] = []
    files = sorted((ROOT / "results").glob("*/*.jsonl"))
    assert sum(len(run.records) for path in files for run in read_runs(path, said.append)) > 4000 and said == []


def test_every_kind_that_a_figure_is_drawn_of_has_a_shape():
    drawn = {kind for figure in FIGURES.values() for kind in figure.kinds}
    assert drawn <= set(whole._TRIALS) and drawn <= set(whole._RESULTS) and len(drawn) > 10


def test_a_failed_trial_has_a_whole_result_or_none(tmp_path):
    """A figure that finds one field of a result may use the others."""
    everything(RunFile(tmp_path / "e" / "a.jsonl"))
    (run,) = read_runs(tmp_path / "e")
    kept = set()
    for line in (line for line in run.records if line["outcome"] == "ok"):
        failed, kind = line | {"outcome": "error"}, line["trial"]["kind"]
        assert from_line(failed, run.environment, "r").result == line["result"]
        for name in line["result"]:
            less = {key: value for key, value in line["result"].items() if key != name}
            for result in (less, less | {name: None}, {name: line["result"][name]}, None):
                found = from_line(failed | {"result": result}, run.environment, "r").result
                assert found == {} or (found == result and whole._flaw_of_whole(kind, found) is None)
                kept |= {kind} if found else set()
    assert {"overhead", "training_step"} <= kept < {line["trial"]["kind"] for line in run.records}


def test_a_search_with_null_in_place_of_its_probes_has_one():
    line = trial(trial={"kind": "largest", "batch_size": 7}, outcome="oom", result={"probes": None})
    assert probes_of(line) == {7: Probe(False)}


def test_a_field_that_a_figure_reads_is_asked_for():
    entry = {"outcome": "error", "compile_seconds": {"plain": 1.0}}
    assert "missing required field `private`" in str(flaw_of_result("training_step", {"backends": {"jax": entry}}))
    (cell, *_) = load_experiment("correlated_noise").cells("cpu")
    described = json.loads(json.dumps(cell.describe()))
    assert whole.flaw_of_trial(described) is None
    assert "trial.noise" in str(whole.flaw_of_trial(described | {"noise": "blt:x"}))


def test_results_of_kinds_of_ones_own_have_any_form():
    assert flaw_of_result("of ours", {"anything": [None, {"at": "all"}]}) is None
    assert flaw_of_result("explain", {}) is not None and flaw_of_result("explain", {"usage": "expected"}) is None
    assert flaw_of_result("of ours", [1]) is not None and flaw_of_result("of ours", {"a": nested(DEPTH)}) is not None


@pytest.mark.parametrize("kind", ["../../x", "/etc/x", "..", "", "x" * 3000, "a\nb", "é"])
def test_a_kind_s_table_lies_in_the_folder_of_its_report(kind, tmp_path, monkeypatch):
    save_no_pictures(monkeypatch)
    write(tmp_path / "a" / "b" / "e" / "a.jsonl", [ENVIRONMENT, trial(trial={"kind": kind, "model": "cnn"})])
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["report", str(tmp_path / "a" / "b" / "e"), "--output", str(tmp_path / "a" / "b" / "out")]) == 0
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert len(written) == 4 and all(path.is_relative_to(tmp_path / "a" / "b" / "out") for path in written)


def test_a_file_s_name_that_is_no_text_is_shown_by_escapes(tmp_path):
    """A warning in a caption names it, in every format."""
    line = trial(trial={"kind": "step"} | STEP, result={"step_seconds": [1.0], "memory": MEMORY}, load=99.0)
    where = ENVIRONMENT["environment"] | {"cpus_available": 2}
    write(tmp_path / "e" / "\udcff.jsonl", [ENVIRONMENT | {"environment": where}, line, line | {"round": 1}])
    write_report(tmp_path / "e", tmp_path / "out", ["memory_speed_table"])
    (path,) = (tmp_path / "out").rglob("*.md")
    assert "\\udcff" in path.read_text(encoding="utf-8")


def test_a_text_with_half_a_character_is_written(tmp_path):
    files.write_text(tmp_path / "a.md", "\udcff é")
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == "\\udcff é"


@pytest.mark.parametrize("model", ["transformers:x@" + "9" * 5000, "x" + "9" * 5000, "x²"])
def test_a_model_s_name_may_have_any_digits(model):
    assert style.model(model) and style.model_key(model) > style.model_key("cnn")


def test_a_byte_order_mark_is_passed_over(tmp_path):
    write(tmp_path / "a.jsonl", [ENVIRONMENT, trial()])
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + (tmp_path / "a.jsonl").read_bytes())
    assert [len(run.records) for run in read_runs(tmp_path)] == [1]


def test_an_epsilon_that_is_no_number_is_not_infinite():
    shown = [rounded(value, "upper_bound") for value in (math.nan, math.inf, 1.23456)]
    assert shown == ["nan", "inf", "1.235"]


def test_a_run_goes_on_beside_damaged_records(tmp_path, dpbench):
    """What it lost is measured again, once; what is whole is not."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from dpbench.experiment import Experiment, grid\nfrom dpbench.trials import EpsilonTrial\n"
        "def cells(device):\n"
        "    return grid(EpsilonTrial, accountant='rdp', sample_rate=0.1, delta=1e-5, noise_multiplier=1.0, "
        "steps=[1, 2, 3, 4, 5, 6])\n"
        "EXPERIMENT = Experiment(name='mine', doc='d', cells=cells, smoke=cells, rounds=1)\n"
    )
    run = ["run", path, "--device", "cpu", "--output", tmp_path / "out"]
    assert dpbench(*run)[0] == 0
    (kept,) = (tmp_path / "out" / "mine").glob("*.jsonl")
    head, *lines = map(json.loads, kept.read_text().splitlines())
    for line, field in zip(lines[:4], ("seconds", "utc", "result", "trial"), strict=True):
        del line[field]
    write(kept, [head, *lines])
    code, _, said = dpbench(*run)
    assert code == 0 and "recorded 4 trials (4 ok)" in said
    assert f"{kept}:2: not a record (Object missing required field `seconds`" in said
    code, _, said = dpbench(*run)
    assert code == 0 and "nothing is left to run" in said
