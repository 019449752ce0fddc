"""``dpbench check``: rows, exit codes, and what is said of what cannot be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE

from dpbench.cli import check
from dpbench.process.parent import Answer
from dpbench.trials.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ["model", "backend", "status", "max_norm_error", "max_grad_error", "coverage", "reason"]
MODELS = """
import torch
from clipping.backends.microbatch import Microbatch
from torch import nn

class Mine(Microbatch):
    name = "mine"

def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10))

def raises():
    raise RuntimeError("no such thing\\nas this model")
"""


@pytest.fixture
def models(tmp_path):
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    return file


def run(dpbench, *arguments: str) -> tuple[int, list[dict], str]:
    code, out, err = dpbench("check", *arguments, "--format", "json")
    return code, json.loads(out), err


def test_rows_of_the_contract_in_the_order_asked_for(models, dpbench, trials_here):
    asked = ["--backend", "mixed_ghost", "--backend", "microbatch", "--backend", "mixed_ghost"]
    code, rows, err = run(dpbench, "--model", f"{models}:small", *asked)
    assert code == 0
    assert [list(row) for row in rows] == [FIELDS] * 2
    assert [row["backend"] for row in rows] == ["mixed_ghost", "microbatch"]
    for row in rows:
        assert row["model"] == f"{models}:small" and row["status"] == "ok" and row["reason"] is None
        assert row["max_norm_error"] <= 1e-9 and row["max_grad_error"] <= 1e-9
        assert sum(row["coverage"].values()) == pytest.approx(1)
    lines = err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("[1/2, ") and lines[1].endswith(": ok")


def test_a_model_that_raises_is_an_error_row_and_the_rest_goes_on(models, dpbench, trials_here):
    asked = ["--model", f"{models}:raises", "--model", f"{models}:small", "--backend", "vmap"]
    code, rows, _ = run(dpbench, *asked)
    assert code == 1
    assert [row["status"] for row in rows] == ["error", "ok"]
    assert "no such thing" in rows[0]["reason"] and "\n" not in rows[0]["reason"]
    assert [rows[0][field] for field in ("max_norm_error", "max_grad_error", "coverage")] == [None] * 3


GOOD = {"max_norm_error": 0.0, "max_grad_error": 1e-16, "coverage": {}}


@pytest.mark.parametrize(
    ("ended", "status", "reason", "code"),
    [
        (Answer(1, Outcome.OK, None, GOOD, 1.0), "ok", None, 0),
        (Answer(1, Outcome.MISMATCH, "it differs", {"max_norm_error": "nan"}, 1.0), "mismatch", "it differs", 1),
        (Answer(1, Outcome.UNSUPPORTED, "LSTM: no rule", None, 1.0), "unsupported", "LSTM: no rule", 0),
        (Answer(1, Outcome.ERROR, "Traceback\n  line\nKeyError: 3", None, 1.0), "error", "error: KeyError: 3", 1),
        (Answer(1, Outcome.TIMEOUT, "killed", None, 1.0), "error", "timeout: killed", 1),
        (Answer(1, Outcome.CRASH, None, None, 1.0), "error", "crash: no evidence", 1),
        (Answer(1, Outcome.OOM, "OutOfMemoryError: 3 GiB", None, 1.0), "error", "oom: OutOfMemoryError: 3 GiB", 1),
    ],
    ids=lambda value: value.outcome.value if isinstance(value, Answer) else "",
)
def test_every_end_of_a_trial_has_its_row_and_its_exit_code(ended, status, reason, code, dpbench, monkeypatch):
    monkeypatch.setattr(check, "answers", lambda trials: [(trial, ended) for trial in trials])
    found, rows, _ = run(dpbench, "--model", "cnn", "--backend", "vmap")
    assert (found, rows[0]["status"], rows[0]["reason"]) == (code, status, reason)
    assert list(rows[0]) == FIELDS


def test_the_default_is_every_built_in_model_and_every_backend(dpbench, monkeypatch):
    seen = []
    ended = Answer(1, Outcome.UNSUPPORTED, "why", None, 1.0)
    monkeypatch.setattr(check, "answers", lambda trials: [(trial, ended) for trial in seen.extend(trials) or trials])
    code, rows, _ = run(dpbench)
    from clipping import BACKENDS
    from dpbench.models.references import BUILTIN

    assert code == 0 and len(rows) == len(BUILTIN) * len(BACKENDS)
    assert {(t.model, t.backend) for t in seen} == {(m, b) for m in BUILTIN for b in BACKENDS}
    assert all(t.dtype == "float64" and t.device == "cpu" and t.image_size == 32 and t.batch_size >= 2 for t in seen)


def test_the_table_is_for_reading(dpbench, monkeypatch):
    good = {"max_norm_error": 0.0, "max_grad_error": 2.5e-16, "coverage": {"ghost": 0.75, "instantiated": 0.25}}
    ends = iter([Answer(1, Outcome.OK, None, good, 1.0), Answer(2, Outcome.UNSUPPORTED, "LSTM:\n no rule", None, 1.0)])
    monkeypatch.setattr(check, "answers", lambda trials: [(trial, next(ends)) for trial in trials])
    code, out, _ = dpbench("check", "--model", "cnn", "--backend", "ghost", "--backend", "vmap")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["model", "backend", "status", "norms", "gradients", "coverage", "reason"],
        ["cnn", "ghost", "ok", "0.0e+00", "2.5e-16", "75.0%", "ghost,", "25.0%", "instantiated"],
        ["cnn", "vmap", "unsupported", "-", "-", "-", "LSTM:", "no", "rule"],
    ]


@pytest.mark.slow
def test_the_parent_imports_no_torch(models):
    """Not even for a backend in a file."""
    code = (
        "import sys\nfrom dpbench.cli import main\n"
        f"code = main(['check', '--model', {str(models) + ':small'!r}, '--backend', {str(models) + ':Mine'!r}])\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
