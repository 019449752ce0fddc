"""The README's programs run as they stand there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import assert_extras, assert_taken, blocks, commands

from dpbench.integrations import sharp_edges

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_at_is_there(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"`((?:clipping|accounting|dpbench|experiments|tests|engine|execution|process)/[\w./]*)`", text)
    there = [any((root / path).exists() for root in (ROOT, ROOT / "dpbench")) for path in named]
    assert [path for path, found in zip(named, there, strict=True) if not found] == []


def test_the_first_page_fits_three_screens():
    assert len(README.splitlines()) <= 130 and len(README.split()) <= 700


def test_the_first_command_is_the_benchmark_and_the_table_agrees_with_the_figure_above_it():
    assert blocks(README, "sh")[0].startswith("make stress_test ")
    (folder,) = {path.rpartition("/")[0] for path in re.findall(r"\((results/training_step/[^)]*\.png)\)", README)}
    rows = {}
    for path in (ROOT / folder).glob("training_step-*-way-eager.md"):
        for cells in (line[1:-1].split("|") for line in path.read_text(encoding="utf-8").splitlines()):
            names = [cell.strip() for cell in cells]
            if names[0] == "Model":
                time, memory = names.index("Time ratio"), names.index("Memory ratio")
            elif len(names) > 9:
                rows[names[0].partition(", T=")[0], names[1], names[2]] = (names[time], names[memory])
    lines = [line for line in README.splitlines() if line.startswith("|")]
    columns = ["BK mixed", *(cell.strip() for cell in lines[0].strip("|").split("|")[2:])]
    assert len(lines) > 6
    for line in lines[2:]:
        what, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        model, batch_size, _ = what.split(", ")
        for column, cell in zip(columns, cells, strict=True):
            said = tuple(cell.strip("*").split(", ")) if cell != "–" else ("", "")
            known = rows[model, batch_size, column]
            assert said == known or (cell == "–" and known[1] == ""), (what, column, cell, known)


@pytest.mark.parametrize("line", commands(README))
def test_every_command_is_taken(line, monkeypatch):
    assert_taken(line, monkeypatch)


def test_extras_that_are_named_exist():
    assert_extras(README)


@pytest.mark.slow
def test_commands_that_take_seconds_do_what_is_said(tmp_path):
    """As they stand, one after the other, in an empty folder; others are tested where they are made."""
    lines = [line for line in commands(README) if re.search(r" (template|epsilon|calibrate|check) ", line)]
    assert len(lines) == 4
    for line in lines:
        command = [sys.executable, *shlex.split(line)[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, (line, done.stderr)
    assert (tmp_path / "mine.py").exists()
    explain = [sys.executable, "-m", "dpbench", "explain", "mine.py:build"]
    assert subprocess.run(explain, cwd=tmp_path, capture_output=True).returncode == 0


def test_the_quick_start_trains_privately_and_prints_accuracy_and_epsilon(tmp_path):
    (code,) = blocks(README, "python")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 15
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    wanted = (
        r"accuracy (\d\d)% .*; ε = (1\.9\d*|2) at δ = 0\.000278 after 160 steps \(upper bound by prv; Poisson.*\)\n"
    )
    said = re.fullmatch(wanted, done.stdout)
    assert said and int(said[1]) > 85 and "NOT PRIVATE" not in done.stdout, done.stdout


def test_every_sharp_edge_names_a_test_that_there_is():
    text = sharp_edges.__doc__ or ""
    named = re.findall(r"`(test_\w+)`", text)
    there = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 20 and set(named) <= there, set(named) - there
