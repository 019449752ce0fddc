"""``import dpbench`` as a library: lazy, tidy frames, runs of experiments, of objects and of lists of trials."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
from fake_run import BODIES, ROOT
from report_records import RunFile
from waiting import PATIENCE

import dpbench
from dpbench.errors import UsageError
from dpbench.experiment import Experiment, grid
from dpbench.trials import EpsilonTrial, StepTrial, Trial
from dpbench.trials.reference import load_module

SETTING = {"sample_rate": 0.01, "noise_multiplier": 4.0, "delta": 1e-5}
TRIALS = grid(EpsilonTrial, accountant=["simple", "strong"], steps=[100, 1000], **SETTING)


def test_importing_dpbench_imports_nothing_heavy_and_so_does_asking_for_its_functions():
    code = (
        "import sys, dpbench; dpbench.load, dpbench.run; assert {'load', 'run'} <= set(dir(dpbench)); "
        "print({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr
    with pytest.raises(AttributeError, match="'dpbench' has no attribute 'lod'"):
        dpbench.lod  # noqa: B018


def test_a_step_is_a_row_a_round(tmp_path):
    file = RunFile(tmp_path / "a.jsonl")
    file.step("cnn", "ghost", [3.0, 1.0, 2.0], peak=77, round=1).step("cnn", "ghost", [4.0], round=0)
    file.add(StepTrial(model="cnn", backend="vmap", batch_size=8), outcome="oom", evidence="no memory left")
    frame = dpbench.load(tmp_path / "a.jsonl")
    assert list(frame["round"]) == [1, 0, 0] and list(frame.backend) == ["ghost", "ghost", "vmap"]
    first, last = frame.iloc[0], frame.iloc[2]
    assert (first.step_seconds, first.samples, first.peak_bytes, first.memory) == (2.0, [3, 1, 2], 77, "cpu_allocator")
    assert (first.env_torch, first.env_threads, first.precision, first.ghost) == ("2.15.0", 2, "float32", 1.0)
    assert first.max_grad_error == 1e-7 and first.result["loss"] == 2.3 and first.run == "a"
    assert (last.outcome, last.evidence) == ("oom", "no memory left") and pd.isna(last.step_seconds)
    assert str(frame.dtypes["peak_bytes"]) == "Int64"


def test_a_trial_of_several_backends_is_a_row_for_each_turn_of_each(tmp_path):
    series = {"nonprivate": [1.0, 2.0, 4.0], "ghost": [2.0, None, 8.0]}
    RunFile(tmp_path / "a.jsonl").overhead("cnn", series, failed={"vmap": ("unsupported", "no rule")})
    frame = dpbench.load(tmp_path)
    assert list(zip(frame.backend, frame.turn.astype(object), strict=True))[:5] == [
        *(("nonprivate", turn) for turn in range(3)),
        *(("ghost", turn) for turn in (0, 2)),
    ]
    table = frame.pivot_table("step_seconds", "turn", "backend")
    assert list((table.ghost / table.nonprivate).dropna()) == [2.0, 2.0]
    (refused,) = frame[frame.outcome == "unsupported"].itertuples()
    assert (refused.backend, refused.evidence) == ("vmap", "no rule")


def test_an_epsilon_may_be_infinite_and_a_newer_record_replaces_an_older_one(tmp_path):
    RunFile(tmp_path / "a.jsonl").epsilon("simple", 10, "inf").epsilon("moments", 10, 1.5).epsilon("moments", 10, 1.25)
    frame = dpbench.load(tmp_path)
    assert list(frame.epsilon) == [float("inf"), 1.25] and list(frame.epsilon_kind) == ["upper_bound"] * 2
    assert len(dpbench.load(tmp_path, superseded=True)) == 3


def test_records_are_found_by_the_name_of_their_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunFile(Path("results/memory_speed/a.jsonl")).step("cnn", "ghost", [1.0])
    assert len(dpbench.load("memory_speed")) == 1
    with pytest.raises(UsageError, match="did you mean 'memory_speed'"):
        dpbench.load("memory_sped")
    with pytest.raises(UsageError, match="records in results/stress_test"):
        dpbench.load("stress_test")


def test_a_list_of_trials_is_run_and_not_run_again(tmp_path, capsys):
    frame = dpbench.run(TRIALS, output=tmp_path, rounds=1)
    assert len(frame) == 4 and set(frame.outcome) == {"ok"} and set(frame.accountant) == {"simple", "strong"}
    assert "[4/4]" in capsys.readouterr().err
    again = dpbench.run(TRIALS[:1], output=tmp_path, rounds=1, quiet=True)
    assert list(again.utc) == list(frame[frame.id == TRIALS[0].id].utc)  # the rows that were asked for, as recorded
    assert capsys.readouterr().err == "" and len(list((tmp_path / "notebook").glob("*.jsonl"))) == 1
    assert len(dpbench.load(tmp_path / "notebook")) == 4


def test_an_experiment_object_or_reference_is_run_with_the_options_of_the_command(tmp_path):
    declared = Experiment(name="mine", doc="d", cells=lambda device: TRIALS, smoke=lambda device: TRIALS[:1], rounds=2)
    only = {"accountant": "strong", "steps": [100]}
    with ThreadPoolExecutor() as pool:  # a thread that is not the main one can run, too
        frame = pool.submit(dpbench.run, declared, output=tmp_path, only=only, quiet=True, retry="error").result()
    assert list(frame.accountant) == ["strong"] * 2 and sorted(frame["round"]) == [0, 1]
    assert len(dpbench.load(declared, results=tmp_path)) == 2
    (tmp_path / "own.py").write_text(
        "from dpbench.experiment import Experiment\nfrom dpbench.trials import EpsilonTrial\n"
        f"def cells(device): return [EpsilonTrial(accountant='simple', steps=10, **{SETTING})]\n"
        "SMALL = Experiment(name='small', doc='d', cells=cells, smoke=cells, rounds=1)\n"
    )
    assert len(dpbench.run(f"{tmp_path}/own.py:SMALL", output=tmp_path, smoke=True, quiet=True)) == 1
    assert (tmp_path / "small-smoke").is_dir()


def test_what_its_time_is_too_short_for_is_no_row_and_the_same_call_goes_on(tmp_path, capsys):
    trial = load_module(str(BODIES)).Act(action="wait", folder=str(tmp_path))
    for minutes in (0.02, 0.1, 0.5):  # a slow machine has not begun it within the first
        assert len(dpbench.run(trial, output=tmp_path, rounds=1, minutes=minutes)) == 0
        said = capsys.readouterr().err
        if "passed over" in said:
            break
    assert f"dpbench: --minutes {minutes} is too little for what is passed over: act (" in said
    (tmp_path / "go").touch()
    assert list(dpbench.run(trial, output=tmp_path, rounds=1, minutes=PATIENCE / 60).outcome) == ["ok"]


def test_all_that_is_recorded_here_can_be_loaded():
    """Among it training without noise, which has no ε."""
    for name in sorted(path.name for path in (ROOT / "results").iterdir() if any(path.glob("*.jsonl"))):
        assert len(dpbench.load(ROOT / "results" / name)) > 0


ODD = ({"memory": 7}, {"memory": {}}, {"epsilon": "x"}, {"epsilon": [1]}, {"turns": 5}, {"turns": [{}]})
ODD += ({"step_seconds": "x"}, {"step_seconds": [None]}, {"verification": 3, "coverage": [1], "loss": {}})


def test_results_of_a_kind_of_ones_own_may_be_anything(tmp_path):
    file = RunFile(tmp_path / "a.jsonl")
    for number, result in enumerate(ODD):
        file.add(Own(number=number), result)
    frame = dpbench.load(tmp_path)
    assert list(frame.result) == list(ODD) and frame.step_seconds.isna().all() and frame.epsilon.isna().all()


@dataclass(frozen=True, kw_only=True)
class Own(Trial):
    kind: ClassVar[str] = "of our own"
    body: ClassVar[str] = "nowhere:to_be_found"
    number: int


def test_mistakes_are_usage_errors(tmp_path):
    for arguments, said in [
        ({"experiment": "no_such"}, "an experiment, one of"),
        ({"experiment": []}, "trials"),
        ({"experiment": [1]}, "trials"),
        ({"experiment": TRIALS, "rounds": 0}, "at least 1"),
        ({"experiment": TRIALS, "minutes": 0}, "a positive number for --minutes"),
        ({"experiment": TRIALS, "retry": ["ok"]}, "an outcome for --retry"),
        ({"experiment": TRIALS, "device": "tpu"}, "expected a device, got .*one of auto, cpu, cuda"),
        ({"experiment": TRIALS, "only": {"acountant": "simple"}}, "did you mean 'accountant'"),
        (
            {"experiment": StepTrial(model="cnn", backend="ghost", batch_size=2), "device": "cuda"},
            "trials of one device",
        ),
    ]:
        with pytest.raises(UsageError, match=said):
            dpbench.run(**arguments, output=tmp_path)
        assert os.listdir(tmp_path) == []
