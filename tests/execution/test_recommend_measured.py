"""What a process of `dpbench recommend` measures and searches, and the whole of it on a person's own model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE

from clipping import BACKENDS, load_backend
from dpbench.execution.recommend.agenda import GROUPS
from dpbench.execution.recommend.findings import Finding, take_group
from dpbench.trials import LargestTrial, RecommendTrial

ROOT = Path(__file__).resolve().parents[2]


MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
"""


def dpbench(folder, *arguments):
    command = [sys.executable, "-m", "dpbench", "recommend", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=PATIENCE, env=environment)


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return f"{tmp_path / 'mine.py'}:build"


def recommended(model, *backends, **fields):
    from dpbench.measure.recommend import run

    options = {"batch_size": 4, "rounds": 3, "max_seconds": 0.0} | fields
    return run(RecommendTrial(model=model, backends=("nonprivate", *backends), **options))


def test_what_one_process_finds_enters_as_ratios_exactness_and_memory(model):
    found = recommended(model, "mixed_ghost", "fastdp" if load_backend("fastdp").unavailable() else "vmap")
    assert found["inputs"] == [[4, 3, 32, 32]] and found["parameters"] == 3 * 4 * 9 + 4 + 2560 + 10
    findings = {name: Finding(name) for name in BACKENDS}
    take_group(findings, found["backends"])
    exact = findings["mixed_ghost"]
    assert exact.candidate and len(exact.ratios) == 3 and exact.verification["max_norm_error"] < 1e-6
    assert exact.memory_ratio > 0.5 and exact.memory_source == "cpu_allocator"
    assert sum(exact.coverage.values()) == pytest.approx(1.0)
    assert findings["nonprivate"].ratios == [1.0] * 3 and not findings["nonprivate"].verification
    assert findings["vmap"].status == "ok" or findings["fastdp"].reason


def test_what_comes_too_late_is_left_out_but_for_the_first(model):
    found = recommended(model, "mixed_ghost", "ghost", "vmap", within=0.0)["backends"]
    assert [entry["outcome"] for entry in found.values()] == ["ok", "ok", "timeout", "timeout"]
    assert [len(found[name]["turns"]) for name in ("nonprivate", "mixed_ghost")] == [1, 1]
    assert found["vmap"]["evidence"] == "left out for want of time"


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


def test_a_model_that_cannot_be_built_is_one_line(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    done = dpbench(tmp_path, "mine.py:biuld", "--batch-size", "4")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "did you mean 'build'?" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_persons_own_model_all_the_way(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    done = dpbench(
        tmp_path, "mine.py:build", "--batch-size", "4", "--memory", "256MiB", "--format", "json", "--seconds", "100"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["backend"]: row for row in found["backends"]}
    assert set(rows) == {"nonprivate", *(name for group in GROUPS for name in group.backends)}
    assert found["seconds"] <= 100 and found["recommended"] in rows and found["reason"].startswith("take ")
    chosen = rows[found["recommended"]]
    assert chosen["status"] == "ok" and chosen["max_norm_error"] < 1e-6 and chosen["time_ratio"] > 0
    assert sum(chosen["coverage"].values()) == pytest.approx(1.0)
    assert rows["nonprivate"]["time_ratio"] == rows["nonprivate"]["memory_ratio"] == 1.0
    assert rows["nonprivate"]["max_batch_size"] > 4
    assert "time and memory beside ordinary training: bk_mixed" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}
