"""What a process of `dpbench recommend` measures and searches, and the whole of it on a person's own model."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import PATIENCE

from clipping import BACKENDS, load_backend
from dpbench.execution.recommend.agenda import ORDER
from dpbench.execution.recommend.findings import Finding, take_race
from dpbench.measure.race import Race
from dpbench.trials import LargestTrial, RecommendTrial

ROOT = Path(__file__).resolve().parents[2]


MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
"""


BROKEN = """
import torch
from torch import nn

class Broken(nn.Linear):
    def forward(self, x):
        outputs = super().forward(x)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient / "nothing")
        return outputs

def build():
    return Broken(5, 2), (torch.randn(4, 5), torch.randint(0, 2, (4,)))
"""


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return f"{tmp_path / 'mine.py'}:build"


@pytest.fixture
def quick(monkeypatch):
    for name in ("HEAT_SECONDS", "FINAL_SECONDS"):
        monkeypatch.setattr(f"dpbench.measure.race.{name}", 0.02)
    monkeypatch.setattr("dpbench.measure.race.FAR", math.inf)  # all are in the finals, whatever a short turn says
    monkeypatch.setattr("dpbench.measure.recommend.busy_cpus", lambda: 1.5)


def recommended(model, *backends, seconds=100.0, **fields):
    from dpbench.measure.recommend import run

    options = {"batch_size": 4, "until": time.monotonic() + seconds} | fields
    return run(RecommendTrial(model=model, backends=("nonprivate", *backends), **options))


def test_a_race_gives_ratios_exactness_and_memory(model, tmp_path, quick):
    notes = tmp_path / "notes.json"
    absent = "fastdp" if load_backend("fastdp").unavailable() else "vmap"
    found = recommended(model, "mixed_ghost", "fastgradclip", absent, notes=str(notes))
    assert found["inputs"] == [[4, 3, 32, 32]] and found["parameters"] == 3 * 4 * 9 + 4 + 2560 + 10
    assert found["threads"] >= 1 and found["busy"] == 1.5 and found["slow"] is None
    findings = {name: Finding(name) for name in BACKENDS}
    take_race(findings, found["backends"], 4)
    exact = findings["mixed_ghost"]
    assert len(exact.ratios) >= 5 and exact.smaller is None and exact.verification["max_norm_error"] < 1e-6
    assert exact.memory_ratio > 0.5 and exact.memory_source == "cpu_allocator"
    assert sum(exact.coverage.values()) == pytest.approx(1.0)
    assert set(findings["nonprivate"].ratios) == {1.0} and not findings["nonprivate"].verification
    assert len(findings["fastgradclip"].ratios) >= 3 and findings[absent].reason
    told = json.loads(notes.read_text())
    assert told["opening"] is None and set(told["result"]["backends"]) == set(found["backends"])


def test_with_no_time_nothing_is_compared_and_the_step_is_told(model):
    found = recommended(model, "mixed_ghost", seconds=0.0)
    assert found["slow"]["samples"] == 1 and found["slow"]["seconds"] > 0
    assert found["backends"]["mixed_ghost"]["evidence"] == "left out for want of time"


def test_a_backend_that_fails_in_the_race_ends_alone(model, quick, monkeypatch):
    ghost, heats = load_backend("ghost").__call__, Race.heats

    def broken(self, inputs, targets):
        raise RuntimeError("no more")

    def heats_of_a_broken_one(race, runners, until):
        with monkeypatch.context() as patched:
            patched.setattr(load_backend("ghost"), "__call__", broken)
            return heats(race, runners, until)

    monkeypatch.setattr(Race, "heats", heats_of_a_broken_one)
    found = recommended(model, "ghost", "fastgradclip")["backends"]
    assert load_backend("ghost").__call__ is ghost  # it could go on, but is out
    assert found["ghost"]["outcome"] == "error" and "no more" in found["ghost"]["evidence"]
    assert len(found["fastgradclip"]["ratios"]) >= 5


def test_a_model_that_cannot_be_trained_is_one_line(tmp_path, quick):
    (tmp_path / "mine.py").write_text(BROKEN)
    said = recommended(f"{tmp_path / 'mine.py'}:build", "ghost")["usage"]
    assert "mine.py:build to train, got " in said and "TypeError: " in said and "\n" not in said


def test_a_model_that_cannot_be_built_is_said_and_not_raised(model):
    assert "did you mean 'build'?" in recommended(model.replace("build", "biuld"), "ghost")["usage"]


def largest(model, **fields):
    from dpbench.measure.largest import run

    return run(LargestTrial(model=model, backend="mixed_ghost", batch_size=8, **fields))


def test_the_largest_batch_is_one_that_was_seen_to_fit(model):
    budget = 4 * 2**20
    found = largest(model, memory_budget=budget)
    seen = {probe["batch_size"]: probe for probe in found["probes"]}
    assert found["ended"] == "bracketed" and len(seen) <= 5
    assert seen[found["batch_size"]]["fits"] and seen[found["batch_size"]]["peak_bytes"] <= budget
    assert any(not probe["fits"] and size <= 1.03 * found["batch_size"] for size, probe in seen.items())
    full = largest(model, memory_budget=budget, unused=0.1)
    assert full["ended"] == "full" and len(full["probes"]) < len(seen)
    assert 0.85 * found["batch_size"] <= full["batch_size"] <= found["batch_size"]


def test_a_search_says_why_it_ended(model):
    assert largest(model, memory_budget=2**30, max_batch_size=16)["ended"] == "limit"
    nothing = largest(model, memory_budget=1000)
    assert (nothing["ended"], nothing["batch_size"]) == ("nothing", 0)
    cut = largest(model, memory_budget=2**30, max_seconds=0.0)
    assert (cut["ended"], cut["batch_size"], len(cut["probes"])) == ("time", 8, 1)


def test_a_model_that_cannot_be_raced_is_one_line(tmp_path, dpbench, trials_here):
    (tmp_path / "mine.py").write_text("from torch import nn\n\ndef build():\n    return nn.Flatten()\n")
    code, out, err = dpbench("recommend", f"{tmp_path / 'mine.py'}:build", "--batch-size", "4")
    assert (code, out, err.count("\n")) == (2, "", 1) and "a model with parameters to train, got" in err


@pytest.mark.slow
def test_a_persons_own_model_all_the_way(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    words = ("--batch-size", "4", "--memory", "256MiB", "--format", "json", "--seconds", "100")
    command = [sys.executable, "-m", "dpbench", "recommend", "mine.py:build", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["backend"]: row for row in found["backends"]}
    assert set(rows) == {"nonprivate", *ORDER}
    assert found["seconds"] <= 100 and found["recommended"] in rows and found["reason"].startswith("take ")
    chosen = rows[found["recommended"]]
    assert chosen["status"] == "ok" and chosen["max_norm_error"] < 1e-6 and chosen["time_ratio"] > 0
    assert sum(chosen["coverage"].values()) == pytest.approx(1.0)
    assert rows["nonprivate"]["time_ratio"] == rows["nonprivate"]["memory_ratio"] == 1.0
    assert rows["nonprivate"]["max_batch_size"] > 4
    assert rows["opacus_hooks"]["time_ratio"] > 0 and done.stderr == ""
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}
