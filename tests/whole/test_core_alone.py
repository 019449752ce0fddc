"""The definition stands on the ground, the mathematics on it, and hardware on the mathematics."""

import os
import shutil
from pathlib import Path

import pytest
from waiting import ROOT, python

EXACT = ("exact", "families", "routes")


def run(folder: Path, *words: str) -> str:
    return python(*words, cwd=folder, PYTHONPATH=os.pathsep.join([str(folder), str(folder / "tests/support")]))


def test_the_definition_loads_nothing_but_core():
    code = """
import sys, clipping.core.reference, clipping.core.vmap
loaded = {name for name in sys.modules if name.startswith("clipping.")}
print(*sorted(loaded - {"clipping.registry"}))
"""
    loaded = run(ROOT, "-c", code)
    assert {name.rpartition(".")[0] for name in loaded.split()} <= {"clipping", "clipping.core"}
    assert "clipping.core" in loaded
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "clipping/core").glob("*.py"))
    assert lines <= 800


@pytest.fixture(scope="module")
def without_accel(tmp_path_factory) -> Path:
    """A copy of the packages and of the tests in which nothing makes a step faster."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("accounting", "clipping", "dpbench", "experiments", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.rmtree(folder / "clipping/accel")
    (folder / "clipping/accel").mkdir()  # where the project is installed for editing, its own would be found
    (folder / "clipping/accel/__init__.py").write_text("raise ModuleNotFoundError('deleted', name='clipping.accel')\n")
    return folder


def test_a_step_needs_nothing_of_accel(without_accel):
    code = """
import sys, torch, clipping
from clipping import Flat, load_backend
from torch import nn
assert clipping.__file__.startswith(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).double()
x, y = torch.randn(5, 3, 8, 8, dtype=torch.float64), torch.arange(5)
found = {}
for name in ("microbatch", "bk_mixed", "ghost"):
    with load_backend(name)(model, nn.CrossEntropyLoss(reduction="none"), clip=Flat(max_grad_norm=0.1)) as backend:
        found[name] = backend(x, y)
for name, result in found.items():
    for parameter, grad in result.grads.items():
        torch.testing.assert_close(grad, found["microbatch"].grads[parameter], rtol=1e-6, atol=1e-12)
"""
    run(without_accel, "-c", code, str(without_accel))


@pytest.mark.slow
def test_every_exactness_test_passes_without_accel(without_accel):
    files = [f"tests/clipping/test_clipping_{name}.py" for name in EXACT]
    run(without_accel, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *files)
