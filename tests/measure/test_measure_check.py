"""The batches of a check: that they are what they say, and that each catches a backend it was made for."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import clipping
from clipping import ClippedGradient, Problem, UnsupportedModel
from clipping.backends.microbatch import Microbatch
from dpbench.measure import check
from dpbench.measure.check import cases, worst
from dpbench.trials import CheckTrial
from dpbench.trials.outcome import Mismatch

TRIAL = CheckTrial(model="cnn", backend="mixed_ghost", image_size=8)


def wrong(name: str, change: Callable[[ClippedGradient, Tensor], ClippedGradient]) -> type[Microbatch]:
    """A backend that changes the right result; `change` takes it and its norms."""

    class Wrong(Microbatch):
        def _clipped(self, *args: Any, **kwargs: Any) -> ClippedGradient:
            if name == "never_clips":
                self.clip = clipping.Flat(max_grad_norm=float("inf"))
            out = super()._clipped(*args, **kwargs)
            assert out.norms is not None
            return change(out, out.norms)

    Wrong.name = name
    return Wrong


def scaled(out: ClippedGradient, by: Any, norms: Tensor) -> ClippedGradient:
    return ClippedGradient({n: g * by for n, g in out.grads.items()}, norms, out.losses)


class Refuses(Microbatch):
    """Every model."""

    name = "refuses"

    def problems(self) -> list[Problem]:
        return [Problem("model", "no reason", "none")]


WRONG = {
    "divides_by_the_norm": lambda out, norms: scaled(out, 1 + 0 * (1 / norms - 1 / norms).sum(), norms),
    "merges_twins": lambda out, norms: scaled(out, len(norms.unique()) / len(norms), norms),
    "squeezes_the_batch": lambda out, norms: scaled(out, 1, norms * (2 if len(norms) == 1 else 1)),
    "never_clips": lambda out, norms: out,
    "rounds_to_32_bits": lambda out, norms: scaled(out, 1, norms.float().double()),
}
BACKENDS = {name: wrong(name, change) for name, change in WRONG.items()} | {"refuses": Refuses}


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(globals(), name, backend)
        monkeypatch.setitem(clipping.BACKENDS, name, clipping.BackendInfo(f"{__name__}:{name}", "for a test"))


def failing(backend: str) -> tuple[Mismatch, set[str]]:
    """The exception, and the batches whose row is beyond the tolerance."""
    with pytest.raises(Mismatch) as caught:
        check.run(TRIAL.replace(backend=backend))
    rows = caught.value.result["rows"]
    good = {r["batch"] for r in rows if r["max_norm_error"] <= 1e-9 and r["max_grad_error"] <= 1e-9}
    return caught.value, {r["batch"] for r in rows} - good


@pytest.mark.parametrize("backend", ["nonprivate", "microbatch", "vmap", "ghost", "mixed_ghost"])
def test_an_exact_backend_passes_every_batch(backend):
    result = check.run(TRIAL.replace(backend=backend))
    assert [row["batch"] for row in result["rows"]] == ["random", "tied", "zero", "single"]
    assert result["tolerance"] == 1e-9
    assert max(result["max_norm_error"], result["max_grad_error"]) < 1e-12
    assert sum(result["coverage"].values()) == pytest.approx(1) or backend == "nonprivate"


@pytest.mark.parametrize(
    ("backend", "batches"),
    [
        ("divides_by_the_norm", {"zero"}),
        ("merges_twins", {"tied"}),
        ("squeezes_the_batch", {"single"}),
        ("never_clips", {"random", "zero", "single"}),  # the tie is at the threshold, where nothing is clipped
        ("rounds_to_32_bits", {"random", "tied", "zero", "single"}),
    ],
)
def test_each_batch_catches_what_it_was_made_for(backend, batches):
    error, failed = failing(backend)
    assert failed >= batches and (backend == "never_clips" or failed == batches)
    assert str(error).startswith(f"{backend} differs from the microbatch oracle on the ")


def test_a_nan_is_not_lost_among_the_errors():
    error, _ = failing("divides_by_the_norm")
    assert error.result["max_grad_error"] != error.result["max_grad_error"]
    assert worst([1.0, float("nan"), 2.0]) != worst([1.0, float("nan"), 2.0])
    assert worst([1.0, float("inf"), 2.0]) == float("inf")


def test_two_samples_suffice():
    assert [len(case.samples) for case in cases([1.0, 2.0])] == [2, 2, 2, 1]
    assert check.run(TRIAL.replace(batch_size=2))["max_grad_error"] < 1e-12


def test_in_float32_the_tolerance_is_wider():
    result = check.run(TRIAL.replace(dtype="float32"))
    assert result["tolerance"] > 1e-5 and 1e-9 < result["max_grad_error"] < 1e-4


TEXT = """
import torch
from torch import nn
from dpbench.models import Workload

def tiny():
    model = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11))
    loss = nn.CrossEntropyLoss(reduction="none")
    def loss_fn(outputs, targets):
        return loss(outputs.transpose(1, 2), targets["next"]).mean(1)
    def batch(size):
        tokens = torch.randint(0, 11, (size, 5), generator=torch.Generator().manual_seed(0))
        return (tokens[:, :-1],), {"next": tokens[:, 1:]}
    return Workload(model, loss_fn, batch)
"""


@pytest.mark.parametrize("backend", ["vmap", "mixed_ghost"])
def test_batches_of_tuples_and_dicts_are_checked_too(tmp_path, backend):
    file = tmp_path / "text.py"
    file.write_text(TEXT)
    assert check.run(CheckTrial(model=f"{file}:tiny", backend=backend))["max_grad_error"] < 1e-12


CASTS = """
from torch import nn

class InFloat32(nn.Module):
    def forward(self, x):
        return nn.functional.normalize(x.float()).to(x.dtype)

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 20), InFloat32(), nn.Linear(20, 10))
"""


def test_a_model_that_casts_to_float32_itself_is_held_to_what_that_allows(tmp_path):
    """Of a backend that goes back through the cast with other numbers: losses that are weighed."""
    file = tmp_path / "casts.py"
    file.write_text(CASTS)
    result = check.run(CheckTrial(model=f"{file}:make", backend="opacus_ghost", image_size=8))
    assert 1e-9 < result["max_grad_error"] < 1e-6 and result["tolerance"] == 1e-3


def test_a_refusal_passes_through():
    with pytest.raises(UnsupportedModel, match=r"^refuses does not support this model: model: no reason"):
        check.run(TRIAL.replace(backend="refuses"))
