"""The README's programs run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    assert len(README.splitlines()) <= 130


def program(with_text):
    """The one block of Python that has this text in it."""
    found = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if with_text in block]
    assert len(found) == 1
    return found[0]


def test_the_quick_start_trains_privately_and_prints_epsilon(tmp_path):
    code = program("engine.attach(optimizer)")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 15
    checked = code + "print((model(x).argmax(1) == y).double().mean().item() > 0.85)\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", checked], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    said, learned = done.stdout.splitlines()
    wanted = r"ε = (1\.9\d*|2) at δ = 0\.000278 after 160 steps \(upper bound by prv; Poisson.*\)"
    assert re.fullmatch(wanted, said) and "NOT PRIVATE" not in said and learned == "True"


def test_the_accounting_example_gives_the_numbers_beside_it():
    code = program("calibrate_noise_multiplier(")
    names = {}
    exec(code, names)
    for line in code.splitlines():
        expression, found, number = line.partition("  # ")
        if found:
            assert abs(eval(expression, names) - float(number)) < 0.001, line


def test_the_example_of_a_backend_clips():
    model = torch.nn.Linear(3, 2)
    names = {
        "model": model,
        "loss_fn": lambda outputs, targets: ((outputs - targets) ** 2).sum(1),
        "inputs": 10 * torch.ones(4, 3),
        "targets": torch.zeros(4, 2),
    }
    exec(program("load_backend"), names)
    out = names["out"]
    assert out.norms.shape == out.losses.shape == (4,) and out.norms.min() > 1
    length = sum(float(grad.square().sum()) for grad in out.grads.values()) ** 0.5
    assert abs(length - 4.0) < 1e-2  # four records that are alike, each clipped to 1


def test_every_sharp_edge_names_a_test_that_there_is():
    text = sharp_edges.__doc__ or ""
    named = re.findall(r"`(test_\w+)`", text)
    there = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 20 and set(named) <= there, set(named) - there
