"""Every cause of a wrong sum that published models have shown, put back: the suite has to find it.

Of `Hooked`, which is what libraries are, mutants; of ours, parts that are switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import BARE_USES
from hooked import Grads, Hooked
from torch import Tensor, nn

import clipping.backends.tape
import clipping.checks.sample_independence
import clipping.tape.arrivals
import clipping.tape.record
from clipping import Backend, ClippedGradient, load_backend
from clipping.tape.graph import unrecorded
from dpbench.conformance.suite import conformance

PARAMETERS_OF_NO_LAYER = [*BARE_USES, "a custom function beside another use"]
MIXED = [f"samples mix: {how}" for how in ("statistics in training alone", "a detached mean")]


class LayersAlone(Hooked):
    """What is done to parameters outside of layers is not looked for."""

    def problems(self) -> list[Any]:
        return list(Backend.problems(self))

    def refuse_other_reads(self, losses: Tensor) -> None:
        pass


class FirstLayersByTheirInput(Hooked):
    """An input that requires a gradient is taken for one that another layer gave, and has no anchor."""

    def arrived(self, module: nn.Module, own: dict[str, nn.Parameter], x: Tensor, g: Tensor) -> None:
        if not (x.is_leaf and x.requires_grad):
            super().arrived(module, own, x, g)


class InEvalMode(Hooked):
    """Looks at the layers of a model in eval mode."""

    def _clipped(self, *batch: Any) -> ClippedGradient:
        self.model.eval()
        try:
            return super()._clipped(*batch)
        finally:
            self.model.train()


class LayersOfTheFirstStep(Hooked):
    """Knows the layers that the first step ran, and no other."""

    def begin(self) -> Grads:
        self.known, self.first = getattr(self, "known", set[nn.Module]()), not hasattr(self, "known")
        return {}

    def arrived(self, module: nn.Module, own: dict[str, nn.Parameter], x: Tensor, g: Tensor) -> None:
        if self.first:
            self.known.add(module)
        if module in self.known:
            super().arrived(module, own, x, g)


class DerivativesUnseen(Hooked):
    """Whatever arrives in the forward pass is none of its business."""

    def derivative_in_forward(self, *arrived: Any) -> None:
        pass


class LooksOnce(Hooked):
    """Believes that samples stay apart once the first step has shown it."""

    def refuse_mixed_rows(self, losses: Tensor) -> None:
        pass


class NeverLooks(LooksOnce):
    """Believes it at once."""

    trusted = True


HOOKED: list[tuple[type[Hooked], str]] = [
    *((LayersAlone, case) for case in PARAMETERS_OF_NO_LAYER),
    (LayersAlone, "a custom function from the second step on"),
    (FirstLayersByTheirInput, "hidden state with a gradient"),
    (InEvalMode, "a layer of training alone"),
    (LayersOfTheFirstStep, "a layer that a later step takes first"),
    (DerivativesUnseen, "a derivative of a derivative"),
    *((NeverLooks, case) for case in (*MIXED, "samples mix: rolled by two", "samples mix: rows in another order")),
    (LooksOnce, "samples mix: from the second step on"),
]


@pytest.mark.parametrize(("mutant", "case"), HOOKED, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_no_fault_of_a_library_survives(mutant: type[Hooked], case: str):
    (original,) = conformance(Hooked, only=[case])
    assert original.result in ("exact", "refuses"), original.reason
    (verdict,) = conformance(mutant, only=[case])
    assert verdict.result == "wrong" and not verdict.raised, f"{mutant.__doc__} survives {case}"


def blind_to_reads(patch: pytest.MonkeyPatch) -> None:
    """Reads of parameters that the tape did not see are passed over."""

    def blind(*graph: Any) -> list[Any]:
        unrecorded(*graph)  # which also tells what has to arrive
        return []

    patch.setattr(clipping.backends.tape, "unrecorded", blind)


def blind_after_the_first_step(patch: pytest.MonkeyPatch) -> None:
    """The graph of the first step alone is looked at."""
    steps = []

    def once(*graph: Any) -> list[Any]:
        steps.append(unrecorded(*graph))
        return steps[0]

    patch.setattr(clipping.backends.tape, "unrecorded", once)


def without_leaves(patch: pytest.MonkeyPatch) -> None:
    """A leaf that the model made leads to nothing, and what does not arrive is not missed."""
    expect = clipping.tape.arrivals.Arrivals.expect
    patch.setattr(
        clipping.tape.arrivals.Arrivals, "expect", lambda self, uses, leaves, graph: expect(self, uses, [], graph)
    )
    patch.setattr(clipping.tape.arrivals.Arrivals, "require_complete", lambda self: None)


def without_renewal(patch: pytest.MonkeyPatch) -> None:
    """What is made of parameters stays what it was when it is changed in place."""
    patch.setattr(clipping.tape.record.Tape, "_renewed", lambda self, tensor: self._sources.get(id(tensor)))
    blind_to_reads(patch)


def without_rows(patch: pytest.MonkeyPatch) -> None:
    """Gradients in the rows of other samples are passed over."""
    patch.setattr(clipping.backends.tape, "mixed_rows", lambda *step: None)


def without_others(patch: pytest.MonkeyPatch) -> None:
    """What changes with the other samples is passed over."""
    patch.setattr(clipping.backends.base, "mixed", lambda *step: None)


OURS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (blind_to_reads, "a custom function beside another use", "refuses"),
    (blind_to_reads, "a custom function from the second step on", "refuses"),
    (blind_to_reads, "a derivative of a derivative", "refuses"),
    (blind_after_the_first_step, "a custom function from the second step on", "refuses"),
    (without_leaves, "hidden state above a frozen layer", "exact"),
    (without_renewal, "a bias changed in place", "exact"),
    (without_others, "samples mix: rolled by two", "refuses"),
    (without_rows, "samples mix: from the second step on", "refuses"),
]


@pytest.mark.parametrize("backend", ["ghost", "bk_mixed"])
@pytest.mark.parametrize(("switch_off", "case", "before"), OURS, ids=lambda v: getattr(v, "__name__", v))
def test_no_part_of_ours_is_idle(switch_off: Any, case: str, before: str, backend: str, monkeypatch):
    (original,) = conformance(load_backend(backend), only=[case])
    assert original.result == before, original.reason
    switch_off(monkeypatch)
    (verdict,) = conformance(load_backend(backend), only=[case])
    assert verdict.result == "wrong" and not verdict.raised, f"{switch_off.__doc__} survives {case}"
