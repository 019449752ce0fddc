"""One file, or one file and one row: a backend, an operation's rule, an accountant, a figure and an experiment.

Each is added to a copy of the project, and listed, run and drawn there.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from waiting import ROOT, python

PACKAGES = ("accounting", "clipping", "dpbench", "experiments")

#: Row -> after which line of which file. Everything else is a new file.
ROWS = {
    "clipping/registry.py": (
        "BACKENDS: dict[str, BackendInfo] = {\n",
        '    "slowly": BackendInfo("clipping.slowly:Slowly", "for a test", "Slowly", "#123456", "o"),\n',
    ),
    "clipping/rules/handlers.py": (
        "HANDLERS: dict[Any, Handler] = {\n",
        "    torch.outer: __import__('clipping.rules.outer', fromlist=['outer']).outer,\n",
    ),
    "accounting/registry.py": (
        "ACCOUNTANTS: dict[str, AccountantInfo] = {\n",
        '    "doubled": AccountantInfo("accounting.doubled:Doubled", "for a test", "doubled", "#654321", "s"),\n',
    ),
}
FILES = {
    "clipping/slowly.py": '''
from clipping.backends.microbatch import Microbatch


class Slowly(Microbatch):
    """The definition once more."""

    name = "slowly"
''',
    "clipping/rules/outer.py": '''
import torch

from clipping.rules.elementwise import Broadcast


def outer(a, b):
    """y[i, j] = a[i] b[j]: the gradient of b for sample i is g[i] a[i]."""
    y = torch.outer(a, b)
    return y, [(b, Broadcast, y.shape, a.detach()[:, None])]
''',
    "accounting/doubled.py": '''
from accounting.rdp import Rdp


class Doubled(Rdp):
    """Twice ε: a bound, and a loose one."""

    def _inside(self, mechanism, steps, delta):
        epsilon, detail = super()._inside(mechanism, steps, delta)
        return 2 * epsilon, detail
''',
    "dpbench/report/figures/bare.py": '''
"""ε of each accountant, for a test."""

from dpbench.report.drawing import privacy_plots
from dpbench.report.figures import accounting
from dpbench.report.parts import FigureKind
from dpbench.report.readable import of, epsilon

FIGURE = FigureKind(
    doc="for a test",
    kinds=("epsilon",),
    table=accounting.epochs,
    text={"Accountant": of("accountant"), "ε": epsilon()},
    caption="For a test.",
    plot=privacy_plots.epochs,
)
''',
    "experiments/added.py": '''
"""For a test."""

from dpbench.experiment import Experiment, grid
from dpbench.trials import EpsilonTrial, StepTrial


def cells(device):
    common = {"sample_rate": 0.01, "noise_multiplier": 4.0, "delta": 1e-5}
    small = {"image_size": 16, "batch_size": 4, "steps": 2, "max_seconds": 0.1, "device": device}
    return [
        *grid(EpsilonTrial, accountant=["rdp", "doubled"], steps=[100, 1000], **common),
        StepTrial(model="cnn", backend="slowly", **small),
    ]


EXPERIMENT = Experiment(name="added", doc="for a test", cells=cells, smoke=cells, rounds=1, figures=("bare",))
''',
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the additions."""
    root = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package)  # what is compiled, too: Python compiles what is new
    for name, text in FILES.items():
        (root / name).write_text(text.lstrip())
    for name, (after, row) in ROWS.items():
        text = (root / name).read_text()
        assert text.count(after) == 1
        (root / name).write_text(text.replace(after, after + row))
    return root


def run(copy: Path, *words: str) -> str:
    return python(*words, cwd=copy, PYTHONPATH=str(copy))


def test_they_are_listed(copy):
    listed: dict[str, list[dict[str, Any]]] = json.loads(run(copy, "-m", "dpbench", "list", "--format", "json"))
    names = {kind: [entry["name"] for entry in entries] for kind, entries in listed.items()}
    assert "added" in names["experiments"] and "slowly" in names["backends"] and "doubled" in names["accountants"]


@pytest.mark.slow
def test_they_are_run_and_drawn(copy):
    written = run(copy, "-m", "dpbench", "run", "added", "--device", "cpu", "--output", "results").split()
    assert {"bare.svg", "bare.csv"} <= {Path(path).name for path in written}
    lines = [json.loads(line) for path in (copy / "results/added").glob("*.jsonl") for line in path.open()]
    ended = {line["trial"].get("backend", line["trial"].get("accountant")): line for line in lines[1:]}
    assert {name: line["outcome"] for name, line in ended.items()} == dict.fromkeys(("rdp", "doubled", "slowly"), "ok")
    assert ended["doubled"]["result"]["epsilon"] == 2 * ended["rdp"]["result"]["epsilon"]
    look = "from dpbench.report import style; print(style.backend('slowly').name, style.accountant('doubled').color)"
    assert run(copy, "-c", look).split() == ["Slowly", "#654321"]


def test_the_rule_is_taken_and_exact(copy):
    code = (
        "import torch; from torch import nn; from clipping import Flat, load_backend\n"
        "class Outer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.b = nn.Parameter(torch.linspace(-1, 1, 5).double())\n"
        "    def forward(self, x):\n"
        "        return torch.outer(x, self.b).tanh()\n"
        "x = torch.linspace(-2, 2, 7).double(); found = {}\n"
        "for name in ('microbatch', 'bk_mixed'):\n"
        "    with load_backend(name)(Outer(), lambda y, t: (y * t).sum(1), clip=Flat(max_grad_norm=0.3)) as backend:\n"
        "        found[name] = backend(x, x[:, None].cos()).grads['b']\n"
        "        coverage = backend.coverage\n"
        "torch.testing.assert_close(found['bk_mixed'], found['microbatch'], rtol=1e-9, atol=1e-15)\n"
        "print(coverage['fallback'])"
    )
    assert run(copy, "-c", code).strip() == "0.0"
