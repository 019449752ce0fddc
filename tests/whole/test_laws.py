"""Promises about the code as a whole."""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

from waiting import ROOT, python

from dpbench import __version__
from dpbench.trials.reference import load_object

PACKAGES = ("accounting", "clipping", "dpbench", "experiments")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    """The top-level names that a module imports anywhere in it."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add((node.module or "").partition(".")[0])
    return found


def test_accounting_imports_no_torch():
    assert [str(p) for p in MODULES if p.is_relative_to(ROOT / "accounting") and "torch" in imports(p)] == []


def test_clipping_imports_torch_alone():
    """The peers, and no other module, import what they wrap; programs are written in Triton, in four modules."""
    peers = {"opacus": {"opacus"}, "fastdp": {"fastDP"}, "private_cnn": {"private_CNN"}}
    programs = ("cuda_programs", "sum_programs", "reading_programs", "fused_programs", "chacha_program")
    wrapped = peers | {name: {"triton"} for name in programs}
    allowed = {"clipping", "torch", *sys.stdlib_module_names}
    clipping = [path for path in MODULES if path.is_relative_to(ROOT / "clipping")]
    foreign = {path.stem: imports(path) - allowed - wrapped.get(path.stem, set()) for path in clipping}
    assert {name: found for name, found in foreign.items() if found} == {}


#: From the ground up: a room imports from floors below its own, and from nowhere else.
FLOORS = (
    ("dpbench.errors", "accounting", "clipping.core", "clipping.cache"),
    ("clipping.native",),
    ("clipping.numerics",),
    ("clipping.noise", "clipping.provenance"),
    ("clipping.rules",),
    ("clipping.tape",),
    ("clipping.norms",),
    ("clipping.distributed",),
    ("clipping.checks",),
    ("clipping.planning", "clipping.program"),
    ("clipping.backends",),
    ("clipping.peers", "clipping.explain", "clipping.accel"),
    ("clipping",),
    ("dpbench.trials", "dpbench.engine"),
    ("dpbench.experiment", "dpbench.models", "dpbench.process"),
    ("dpbench.records", "dpbench.conformance"),
    ("dpbench.execution",),
    ("dpbench.measure", "dpbench"),
    ("dpbench.training", "dpbench.integrations"),
    ("dpbench.report", "experiments"),
    ("dpbench.cli", "dpbench.guide"),
    ("dpbench.__main__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}


def room_of(module: str) -> str:
    return next(room for room in (".".join(module.split(".")[:2]), module.split(".")[0]) if room in FLOOR)


@cache
def imported(name: str) -> dict[str, set[int]]:
    """Module of ours -> the lines on which `name` imports it, or something out of it, when it runs.

    Imports for annotations alone do not run.
    """
    found: dict[str, set[int]] = {}
    whole = tree(NAMES[name])
    typed = [node for node in whole.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in set(ast.walk(whole)).difference(*map(ast.walk, typed)):
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            named = [each if each in NAMES else str(node.module) for each in inside]
        for each in named:
            if each in NAMES and each != name:
                found.setdefault(each, set()).add(node.lineno)
    return found


def test_a_room_imports_from_lower_floors_alone():
    assert [
        f"{name} imports {other}"
        for name in NAMES
        for other in sorted(imported(name))
        if room_of(other) != room_of(name) and FLOOR[room_of(other)] >= FLOOR[room_of(name)]
    ] == []


def test_no_module_imports_itself_by_way_of_others():
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way, name])
        if name not in done:
            for other in imported(name):
                visit(other, (*way, name))
            done.add(name)

    for name in NAMES:
        visit(name, ())


def test_an_import_of_ours_inside_of_a_function_says_why():
    """Commands import what is heavy when they run; elsewhere a comment beside the import has the reason."""
    silent = []
    for name in NAMES:
        if name.startswith("dpbench.cli") or name == "dpbench":
            continue
        lines = NAMES[name].read_text().splitlines()
        inside = {n for where in imported(name).values() for n in where if lines[n - 1].startswith("    ")}
        silent += [f"{name}:{n}:{lines[n - 1]}" for n in sorted(inside) if "#" not in lines[n - 1]]
    assert silent == []


def test_nothing_imports_experiments():
    assert [str(path) for path in MODULES if "experiments" in imports(path)] == []


def test_experiments_are_declarations():
    """They import dpbench's declarations, and nothing heavy."""
    allowed = {"__future__", "collections", "dataclasses", "dpbench", "itertools", "math", "typing"}
    assert {path.name: imports(path) - allowed for path in MODULES if path.parent.name == "experiments"} == {
        path.name: set() for path in MODULES if path.parent.name == "experiments"
    }


def test_no_module_has_more_than_500_lines():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if length > 500} == {}


def test_the_parent_of_a_run_imports_no_torch_even_to_draw_its_figures(tmp_path):
    """In whichever folder it is started; it prints the paths of figures, and nothing else."""
    code = "import sys; from dpbench.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    words = ("run", "accountants", "--smoke", "--only", "accountant=rdp")
    *printed, modules = python("-c", code, *words, cwd=tmp_path, PYTHONPATH=str(ROOT)).splitlines()
    assert "matplotlib" in modules.split()
    assert not {"torch", "ray", "submitit", "matplotlib.pyplot"} & set(modules.split())
    assert len(list((tmp_path / "results" / "accountants-smoke").glob("*.jsonl"))) == 1
    assert {".svg", ".html"} <= {Path(path).suffix for path in printed}
    assert all((tmp_path / path).is_file() for path in printed)


def test_importing_a_package_imports_no_torch():
    packages = "accounting, clipping, dpbench, dpbench.models, dpbench.experiment"
    assert python("-c", f"import sys, {packages}; print('torch' in sys.modules)").strip() == "False"


def test_the_wheel_has_every_package():
    patterns = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    for path in MODULES:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(fnmatch.fnmatch(package, pattern) for pattern in patterns), package
        assert (path.parent / "__init__.py").exists(), f"{path.parent} is no package, so no wheel has it"


def test_the_wheel_has_the_data_that_is_read():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    kinds = ("*.csv", "*.j2", "*.css", "*.js")
    files = [path for package in PACKAGES for kind in kinds for path in (ROOT / package).rglob(kind)]
    assert len(files) > 4
    for path in files:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in data[package]), path


def test_the_version_is_said_once():
    assert PROJECT["project"]["version"] == __version__


def test_nothing_tells_people_to_install_the_other_project_of_our_name():
    """The package index has a `dpbench` that is another project; ours is installed from the repository."""
    name = PROJECT["project"]["name"]
    assert name != "dpbench"
    pages = [*MODULES, *ROOT.glob("*.md"), ROOT / "results" / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    theirs = re.compile(r"(?<![\w-])dpbench\[[a-z]|pip install[^\n]*[\s'\"]dpbench\b(?![/.])")
    assert [str(page) for page in pages if theirs.search(page.read_text())] == []
    assert theirs.search("pip install 'dpbench" + "[ray]'") and theirs.search("pip install " + "dpbench")


#: What a trial can measure: a change in one of these rooms can change a number. The others carry numbers about.
MEASURED = ("clipping", "accounting", *(f"dpbench.{room}" for room in ("measure", "models", "engine", "training")))


def test_a_fingerprint_covers_what_a_trials_body_imports():
    """An edit there must not leave old records "done": the body's own module, and what that imports by itself."""
    kinds = [
        f"{name}:{node.name}"
        for name in NAMES
        for node in tree(NAMES[name]).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Trial")
        if "body: ClassVar[str] = " in ast.unparse(node)
    ]
    assert len(kinds) > 20
    for kind in kinds:
        trial = load_object(kind)
        body = trial.body.partition(":")[0]
        reached = [name for name in (body, *imported(body)) if name.startswith(MEASURED)]
        covered = {path for pattern in trial.sources for path in ROOT.glob(pattern)}
        assert [name for name in reached if NAMES[name] not in covered and NAMES[name].name != "__init__.py"] == []
