"""The suite itself: its verdicts, the scorecard, and ``dpbench check`` with a backend of one's own."""

import json
from pathlib import Path

import pytest
import torch
from hooked import changed

from clipping import BACKENDS, UnsupportedModel
from clipping.backends.microbatch import Microbatch
from dpbench.cli import check, main
from dpbench.conformance import ConformanceTrial, suite
from dpbench.conformance.judging import Measured, Wrong, judge
from dpbench.conformance.refusals import REFUSALS
from dpbench.conformance.scorecard import as_row
from dpbench.conformance.suite import checks, conformance
from dpbench.models.references import BUILTIN
from dpbench.process.parent import Answer
from dpbench.trials import CheckTrial, Trial
from dpbench.trials.backends import ResolveTrial
from dpbench.trials.outcome import Outcome

FIELDS = ["model", "backend", "status", "max_norm_error", "max_grad_error", "coverage", "reason"]
MINE = """
from clipping import Backend, UnsupportedModel
from clipping.backends.tape import BkMixed
from my_neighbour import HALF

class Mine(BkMixed):
    pass

class Halves(BkMixed):
    name = "halves"

    def _clipped(self, *batch):
        out = super()._clipped(*batch)
        return type(out)({n: HALF * g for n, g in out.grads.items()}, out.norms, out.losses)

class Unfinished(Backend):
    name = "unfinished"

class Elsewhere(BkMixed):
    name = "elsewhere"

    @classmethod
    def unavailable(cls):
        return "the package mine is not installed"

def function():
    pass
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_neighbour.py").write_text("HALF = 0.5\n")
    (folder / "mine.py").write_text(MINE)
    (folder / "broken.py").write_text("import torch\n\n1 / 0\n")
    (folder / "invalid.py").write_text("def f(:\n")
    return folder


def run(*arguments: str, capsys) -> tuple[int, list[dict], str]:
    code = main(["check", *arguments, "--format", "json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


# Verdicts


def exact(backend, device):
    return Measured(coverage={"ghost": 1.0})


def refuses(backend, device):
    raise UnsupportedModel("ghost", [])


def wrong(backend, device):
    raise Wrong("it differs")


def raises(backend, device):
    raise KeyError("of its\nown")


@pytest.mark.parametrize(
    ("body", "result", "status", "reason"),
    [
        (exact, "exact", "ok", None),
        (refuses, "refuses", "unsupported", "ghost does not support this model: "),
        (wrong, "wrong", "mismatch", "it differs"),
        (raises, "wrong", "error", "raises KeyError: 'of its\\nown'"),
    ],
)
def test_every_end_of_a_check_is_a_verdict_and_a_row_of_the_contract(body, result, status, reason):
    verdict = judge("a case", body, Microbatch)
    assert (verdict.case, verdict.result, verdict.reason) == ("a case", result, reason)
    row = as_row("ghost", vars(verdict))
    assert list(row) == FIELDS
    assert (row["model"], row["backend"], row["status"], row["reason"]) == ("a case", "ghost", status, reason)


def test_a_check_runs_from_a_seed_and_leaves_the_random_state_as_it_was():
    drawn = []
    before = torch.get_rng_state()
    for _ in range(2):
        judge("a case", lambda backend, device: drawn.append(torch.rand(())) or Measured(), Microbatch)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(torch.get_rng_state(), before)


def test_nothing_is_verified_by_the_backend_itself():
    """A backend that finds itself out is as wrong as one that does not."""

    class Doubles(changed(lambda g, _: 2 * g)):
        trusted = False

    (verdict,) = conformance(Doubles, only=["conv2d"])
    assert verdict.result == "wrong" and verdict.grad_error == pytest.approx(1) and verdict.norm_error == 0
    assert verdict.reason.startswith("relative error 0.0e+00 in the norms and 1.0e+00 in the gradient of '0.")


# The scorecard


# A backend of one's own


def test_what_is_no_backend_is_one_line_and_exit_2(mine, capsys, trials_here):
    for reference, said in [
        ("mine.py", ["expected path/file.py:Class, got "]),
        ("mine.py:", ["expected path/file.py:Class, got "]),
        ("nowhere.py:Mine", ["expected path/file.py:Class of an existing file, got "]),
        ("mine.py:Mina", ["expected a class that ", "mine.py has, got 'Mina'; did you mean 'Mine'?"]),
        ("mine.py:function", ["expected function of ", "to be a subclass of clipping.Backend, got 'function'"]),
        ("mine.py:Unfinished", ["expected Unfinished of ", "to have the method _clipped, got 'none'"]),
        ("broken.py:Mine", ["broken.py to import, got 'ZeroDivisionError: division by zero (line 3)'"]),
        ("invalid.py:Mine", ["invalid.py to import, got 'SyntaxError: invalid syntax (invalid.py, line 1)'"]),
    ]:
        assert main(["check", "--backend", f"{mine}/{reference}"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("dpbench: ") and err.count("\n") == 1
        assert all(words in err for words in said), err


def test_a_file_that_ends_the_process_is_one_line_and_exit_2(mine, capsys):
    (mine / "ends.py").write_text("import os\nos._exit(3)\n")
    assert main(["check", "--backend", f"{mine}/ends.py:Mine"]) == 2
    err = capsys.readouterr().err
    assert f"{mine}/ends.py:Mine to import, got 'crash: " in err and err.count("\n") == 1


@pytest.fixture
def few(monkeypatch, trials_here):
    """A few of the cases: `test_clipping_exact` meets them all."""
    few = {name: check for name, check in checks().items() if name in REFUSALS or name.startswith("conv2d")}
    monkeypatch.setattr(suite, "checks", lambda backend: few)
    return few


def test_a_backend_of_ones_own_has_a_row_for_every_case(mine, few, capsys):
    code, rows, err = run("--backend", f"{mine}/mine.py:Mine", capsys=capsys)
    assert code == 0 and [row["model"] for row in rows] == list(few)
    refused = {row["model"]: row["status"] for row in rows if row["status"] != "ok"}
    followed = {"a custom function beside another use", "a custom function from the second step on"}
    exact = {"samples mix: rows in another order"} | followed  # by bk_mixed
    assert refused == dict.fromkeys(set(REFUSALS) - exact, "unsupported")
    assert {row["backend"] for row in rows} == {f"{mine}/mine.py:Mine"} and all(list(row) == FIELDS for row in rows)
    assert max(row["max_grad_error"] for row in rows if row["model"] == "conv2d groups") <= 1e-9
    counts = f"{len(rows) - len(refused)} exact, {len(refused)} refuses, 0 wrong"
    assert err.splitlines()[-1].endswith(f"mine.py:Mine: {counts}")


def test_a_wrong_one_is_exit_1_and_the_table_says_why(mine, few, capsys):
    assert main(["check", "--backend", f"{mine}/mine.py:Halves"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["case", f"{mine}/mine.py:Halves"]
    cells = [line.split() for line in lines]
    assert ["conv2d", "wrong"] in cells
    refused = {case for case in few if [*case.split(), "refuses"] in cells}
    assert refused and refused < set(REFUSALS)
    assert any("conv2d circular" in line and "relative error 0.0e+00 in the norms" in line for line in lines)


def test_with_a_model_it_is_checked_on_the_model_beside_ours(mine, capsys, trials_here):
    asked = ["--backend", f"{mine}/mine.py:Mine", "--backend", f"{mine}/mine.py:Halves", "--backend", "bk_mixed"]
    code, rows, _ = run("--model", "cnn", *asked, capsys=capsys)
    assert code == 1 and [row["status"] for row in rows] == ["ok", "mismatch", "ok"]
    assert {row["model"] for row in rows} == {"cnn"}
    assert rows[1]["reason"].startswith(f"{mine}/mine.py:Halves differs from the microbatch oracle")


def test_a_package_that_it_needs_is_named(mine, capsys, trials_here):
    code, rows, _ = run("--backend", f"{mine}/mine.py:Elsewhere", capsys=capsys)
    assert code == 0 and [(row["model"], row["status"]) for row in rows] == [("conformance", "unsupported")]
    assert rows[0]["reason"] == "elsewhere is not available here: the package mine is not installed"


# What is run


ALL_MODELS, CLIPPING = len(BUILTIN), len(BACKENDS) - 1  # nonprivate does not clip


@pytest.mark.parametrize(
    ("arguments", "on_models", "conforming"),
    [
        ([], ALL_MODELS * len(BACKENDS), 0),
        (["--conformance"], 0, CLIPPING),
        (["--conformance", "--backend", "ghost"], 0, 1),
        (["--conformance", "--backend", "ghost", "--model", "cnn"], 1, 1),
        (["--backend", "MINE"], 0, 1),
        (["--backend", "MINE", "--backend", "ghost"], ALL_MODELS, 1),
        (["--backend", "MINE", "--model", "cnn"], 1, 0),
        (["--backend", "MINE", "--model", "cnn", "--conformance", "--backend", "MINE"], 1, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_which_trials_are_run(mine, arguments, on_models, conforming, capsys, monkeypatch):
    seen: list[Trial] = []

    def answers(trials):
        for trial in trials:
            seen.append(trial)
            result = {"usage": None} if isinstance(trial, ResolveTrial) else None
            yield trial, Answer(1, Outcome.OK if result else Outcome.UNSUPPORTED, None, result, 0.0)

    monkeypatch.setattr(check, "answers", answers)
    assert main(["check", *(f"{mine}/mine.py:Mine" if word == "MINE" else word for word in arguments)]) == 0
    assert sum(isinstance(trial, CheckTrial) for trial in seen) == on_models
    assert sum(isinstance(trial, ConformanceTrial) for trial in seen) == conforming
    assert sum(isinstance(trial, ResolveTrial) for trial in seen) == ("MINE" in arguments)
