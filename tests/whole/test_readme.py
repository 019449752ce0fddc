"""The README's programs run as they stand there, and its numbers are in the records."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from pages import ROOT, blocks, commands
from waiting import python

from dpbench.integrations import sharp_edges
from dpbench.report import readme

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
    words = [word for word in README.split() if re.search(r"\w", word)]  # a table's rules and marks are none
    assert len(README.splitlines()) <= 130 and len(words) <= 700


def test_the_first_command_is_the_benchmark():
    assert blocks(README, "sh")[0].startswith("make stress_test ")


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The pages and results that git knows, without records that were added here since."""
    listed = subprocess.run(["git", "ls-files", "README.md", "results"], cwd=ROOT, capture_output=True, text=True)
    folder = tmp_path_factory.mktemp("committed")
    for path in listed.stdout.splitlines():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
    return folder if listed.stdout else ROOT


@pytest.mark.parametrize("page", readme.PAGES)
def test_the_command_writes_every_number_of_a_page(page, committed):
    """`python -m dpbench report --readme` changes nothing, and outside of its blocks nothing looks measured."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert readme.filled(committed, page) == text
    typed = re.sub(r"<!-- \w+: .*?<!-- end -->|```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    units = r"×|%|x\b|times|of \d|ms\b|s\b|minutes|hours|[KMG]i?B|percent"
    assert re.findall(rf"\d[\d.,]* ?(?:{units})|[=≤≥<>] ?\d", typed) == []


def test_every_experiment_with_records_has_a_section():
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    there = {path.parent.name for path in (ROOT / "results").glob("*/*.jsonl")}
    assert set(re.findall(r"<!-- (\w+): \w+ -->", text)) == there


@pytest.mark.slow
def test_commands_that_take_seconds_do_what_is_said(tmp_path):
    """As they stand, one after the other, in an empty folder; others are tested where they are made."""
    lines = [line for line in commands(README) if re.search(r" (template|epsilon|calibrate|check) ", line)]
    assert len(lines) == 4
    for line in lines:
        assert python(*shlex.split(line)[1:], cwd=tmp_path), line
    assert (tmp_path / "mine.py").exists()
    python("-m", "dpbench", "explain", "mine.py:build", cwd=tmp_path)


def test_the_quick_start_trains_privately_and_prints_accuracy_and_epsilon(tmp_path):
    (code,) = blocks(README, "python")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 15
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    wanted = (
        r"accuracy (\d\d)%.*; ε = (1\.9\d*|2\.000) at δ = 0\.000278 after 160 steps \(upper bound by prv; Poisson.*\)\n"
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
