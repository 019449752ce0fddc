"""What must be installed to run, and what is said of the two packages that may be missing.

Each test has a virtual environment of its own that holds links to what is allowed, and nothing else: what is not in it
is as absent as on a machine that never had it, in every process that a run starts.
"""

import functools
import importlib.metadata
import json
import subprocess
import sysconfig
import venv
from collections.abc import Collection
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from waiting import ROOT, python

from dpbench.records.store import read_records

NEEDED = {"torch", "torchvision", "pandas", "matplotlib", "jinja2", "msgspec", "scipy", "scikit-learn", "tqdm"}
OPTIONAL = {"opacus", "dp-accounting"}
MODELS = {"timm", "transformers"}
EVIDENCE = {"training_step", "device", "norms", "overhead", "parts", "profile", "peak"}
"""Kinds of its trials, but for searches."""


@functools.cache
def installed() -> dict[str, importlib.metadata.Distribution]:
    return {canonicalize_name(found.metadata["Name"]): found for found in importlib.metadata.distributions()}


def with_what_they_need(names: Collection[str]) -> set[str]:
    """These distributions and, as far as they are installed, all that they require in turn."""
    todo = [(name, "") for name in names]
    found: set[tuple[str, str]] = set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in found or name not in installed():
            continue
        found.add((name, extra))
        for text in installed()[name].requires or []:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(wanted.name), each) for each in ("", *wanted.extras)]
    return {name for name, _ in found}


def python_with(folder: Path, names: Collection[str]) -> Path:
    """The interpreter of a new environment that has these distributions, and no other."""
    venv.create(folder, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)}, scheme="venv")
    for name in names:
        for file in installed()[name].files or []:
            top = file.parts[0]
            link = Path(paths["purelib"]) / top
            if top not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(Path(installed()[name].locate_file(top)).absolute())
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A Python that has neither of the two."""
    missing = sorted(NEEDED - set(installed()))
    assert missing == [], f"not installed here: {missing}"
    return python_with(tmp_path_factory.mktemp("bare"), with_what_they_need(NEEDED) - OPTIONAL - MODELS)


def run(executable: Path, output: Path, *arguments: str) -> list[dict]:
    command = ["-m", "dpbench", "run", *arguments, "--smoke", "--device", "cpu", "--output", output]
    python(*command, executable=executable, PYTHONPATH=str(ROOT))
    assert list(output.rglob("*.svg")) and list(output.rglob("report.html"))
    return read_records(output / f"{arguments[0]}-smoke")


@pytest.mark.slow
def test_the_stress_test_runs_with_what_is_needed_and_says_that_opacus_is_missing(bare, tmp_path):
    found: dict[str, set[str]] = {}
    for record in run(bare, tmp_path, "stress_test"):
        entries = (record["result"] or {}).get("backends") or {record["trial"]["backend"]: record}
        for backend, entry in entries.items():
            found.setdefault(backend, set()).add(entry["outcome"])
            if backend == "opacus_hooks":
                assert "opacus is not importable" in entry["evidence"] and "pip install" in entry["evidence"]
    assert found.pop("opacus_hooks") == {"unsupported"}
    assert len(found) == 7 and all("ok" in outcomes <= {"ok", "over_budget"} for outcomes in found.values()), found


@pytest.mark.slow
def test_pld_answers_by_its_own_composition_where_its_package_is_missing(bare, tmp_path):
    records = run(bare, tmp_path, "accountants")
    assert {record["outcome"] for record in records} == {"ok"}
    details = [record["result"]["detail"] for record in records if record["trial"]["accountant"] == "pld"]
    assert details and all(
        "composed_by" in detail and "dp-accounting" not in detail["composed_by"] for detail in details
    )


TRAINING = """
import sys, torch
import accounting, clipping
from dpbench import PrivacyEngine
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = PrivacyEngine(model, batch_size=4, sample_size=16, epochs=1, max_grad_norm=1.0, target_epsilon=3)
engine.attach(optimizer)
for x, y in engine.data_loader(torch.utils.data.TensorDataset(torch.randn(16, 3), torch.zeros(16).long())):
    optimizer.step(loss=torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
print(round(engine.privacy_spent().epsilon, 1), accounting.load_accountant("moments").kind, len(clipping.BACKENDS))

# Opacus' interface without Opacus
from dpbench.integrations.opacus import BatchMemoryManager, PrivacyEngine
net = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
engine = PrivacyEngine()
assert engine.get_compatible_module(net) is net
model, optimizer, loader = engine.make_private(
    module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
    data_loader=torch.utils.data.DataLoader(data, batch_size=10))
with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as pieces:
    for x, y in pieces:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
print(engine.engine.steps)
"""


def test_training_needs_torch_numpy_and_scipy_alone(tmp_path):
    executable = python_with(tmp_path / "three", with_what_they_need({"torch", "numpy", "scipy"}))
    epsilon, *others = python("-c", TRAINING, executable=executable, PYTHONPATH=str(ROOT)).split()
    assert others == ["upper_bound", "15", "4"] and float(epsilon) <= 3.0


LIBRARIES = {
    "huggingface": "transformers",
    "lightning": "lightning",
    "tutorials.digits": "lightning",
    "tutorials.memorisation": "peft",
}
MISSING = """
import contextlib, importlib, io, json, runpy, sys
from dpbench.cli import main

def told(act):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = act()
        except SystemExit as left:
            code = left.code
        except ImportError as error:
            code = str(error)
    return code, out.getvalue(), err.getvalue()

names, found = json.loads(sys.argv[1]), {}
for reference in ("timm:resnet18", "transformers:gpt2", "tiny:causal/gpt2"):
    for words in (["explain", reference], ["check", "--model", reference], ["recommend", reference]):
        found[" ".join(words)] = told(lambda: main(words))
found["torch"] = "torch" in sys.modules
for name in names:
    found["-m " + name] = told(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))
    found["import " + name] = told(lambda: importlib.import_module(name))
print(json.dumps(found))
"""


def test_a_library_that_is_missing_is_one_line(bare):
    """For its models, at once; for a program of ours that needs it; and what a program of theirs that imports it meets.

    All in one process: to import torch in each would take most of the time.
    """
    modules = {f"dpbench.integrations.{name}": library for name, library in LIBRARIES.items()}
    found = json.loads(python("-c", MISSING, json.dumps(list(modules)), executable=bare, PYTHONPATH=str(ROOT)))
    assert found.pop("torch") is False and len(found) == 17
    for name, library in modules.items():
        how = f"expected the package {library} to be installed (python -m pip install -e '{ROOT}["
        assert how in found.pop(f"import {name}")[0], name
        assert how in found[f"-m {name}"][2], name
    for what, (code, out, err) in found.items():
        assert (code, out, err.count("\n")) == (2, "", 1), what
        assert what[:2] == "-m" or f"pip install -e '{ROOT}[models]'" in err, what


IMPORTING = """
import importlib, pkgutil, torch
import accounting, clipping, dpbench, experiments
with torch.MODE():
    for package in (accounting, clipping, dpbench, experiments):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__") and "programs" not in found.name:
                importlib.import_module(found.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_importing_has_no_condition(mode):
    python("-c", IMPORTING.replace("MODE", mode))


@pytest.mark.slow
def test_the_figures_for_a_gpu_need_the_models_beside_them_and_nothing_else(tmp_path):
    """In miniature and on a CPU: every stage has trials, and each ends as it may; the page has a table for each."""
    executable = python_with(tmp_path / "models", with_what_they_need(NEEDED | MODELS) - OPTIONAL)
    records = run(executable, tmp_path, "evidence")
    assert {record["trial"]["kind"] for record in records} >= EVIDENCE
    assert "ok" in {record["outcome"] for record in records} <= {"ok", "unsupported"}
    for record in records:
        assert record["outcome"] == "ok" or record["evidence"]
        for name, entry in record["result"].get("backends", {}).items() if record["result"] else ():
            assert entry["outcome"] in ("ok", "unsupported"), (name, entry)
    budgets = {record["trial"]["memory_budget"] for record in records if record["trial"]["kind"] == "peak"}
    assert len(budgets) == 2  # those of searches, and those beside each other without a budget
    (page,) = tmp_path.rglob("report.html")
    for words in ("aten::", "are the sums finite", "ghost gram", "copy on the device"):
        assert words in page.read_text(), words


def test_make_gpu_installs_nothing():
    """One line, with the Python that is given; `install` and its virtual environment are not asked for."""
    words = ["make", "--no-print-directory", "--dry-run", "gpu", "PYTHON=/some/python", "MINUTES=4.5"]
    told = subprocess.run([*words, "ARGS=--output there"], capture_output=True, text=True, cwd=ROOT)
    line = "/some/python -m dpbench run evidence --device cuda --minutes 4.5 --output there"
    assert told.stdout.split("\n") == [line, ""], told.stderr
    assert "--minutes 9" in subprocess.run(["make", "-n", "gpu"], capture_output=True, text=True, cwd=ROOT).stdout
