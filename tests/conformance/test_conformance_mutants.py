"""Every fault that a clipping library has had is put into an exact backend, and the suite has to find it.

Two exact backends are mutated: `Hooked`, written the way libraries are, with module hooks and per-sample gradients; and
ours on the tape, whose rules have Gram matrices. A mutant differs from its original in one method.

No backend's affair, and so not in here: a last batch divided by the nominal size, noise not scaled by C, noise added
per microbatch. They are the privacy engine's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cases import BARE_USES, CUSTOM, LATE, MIXING
from hooked import KNOWN, Grads, Hooked
from torch import Tensor, nn

from clipping import Backend, ClippedGradient, Flat, load_backend
from clipping.backends import base
from clipping.backends import tape as tape_backends
from clipping.checks.sample_independence import Occasions
from clipping.checks.verification import WrongGradient
from clipping.core.batches import forward
from clipping.norms import collection as norms
from clipping.numerics.per_sample import gram_product, sum_of_squares
from clipping.rules.base import Route, Rule
from clipping.rules.convolution import ConvolutionWeight
from clipping.rules.elementwise import Bias, Broadcast
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.linear import LinearWeight
from clipping.rules.pixel_gram import patches
from clipping.tape import custom_functions
from clipping.tape.arrivals import Arrivals
from clipping.tape.graph import unrecorded
from clipping.tape.record import Tape
from dpbench.conformance.contract import CHECKS, classifier
from dpbench.conformance.refusals import REFUSALS
from dpbench.conformance.suite import conformance


def hooked_with(**methods: Callable[..., Any]) -> type[Hooked]:
    """`Hooked` with other methods; each is called with the original method and the backend first."""

    def method(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args: change(partial(getattr(Hooked, name), self), self, *args)

    return type("Changed", (Hooked,), {name: method(name, change) for name, change in methods.items()})


def with_factors(change: Callable[..., Tensor]) -> type[Hooked]:
    """`Hooked` with change(backend, name of a parameter, norms, factors) as factors."""

    def norms_and_factors(own: Any, backend: Hooked, losses: Tensor) -> tuple[Tensor, Grads]:
        norms, factors = own(losses)
        return norms, {name: change(backend, name, norms, old) for name, old in factors.items()}

    return hooked_with(norms_and_factors=norms_and_factors)


def forgetting(option: str, default: Any) -> type[Hooked]:
    """`Hooked`, taking an option of a layer for its default."""

    def per_sample(own: Any, _: Hooked, module: nn.Module, *args: Any) -> Grads:
        with pytest.MonkeyPatch.context() as patch:
            if hasattr(module, option):
                patch.setattr(module, option, default)
            return own(module, *args)

    return hooked_with(per_sample=per_sample)


def any_loss(own: Any, backend: Hooked, losses: Tensor, factors: Grads) -> Grads:
    """Σ c_i ℓ_i by a second pass, with c [B] and ℓ [B, 1]: a matrix (Opacus' ghost mode)."""
    if backend.clip.per_layer:
        return own(losses, factors)
    total = (next(iter(factors.values())).to(losses.dtype) * losses).sum()
    found = torch.autograd.grad(total, list(backend.parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(backend.parameters, found, strict=True) if g is not None}


def norms_of_the_models_precision(own: Any, backend: Hooked, losses: Tensor) -> tuple[Tensor, Grads]:
    """Squares in float16 are infinite beyond 256; in bfloat16 eight bits are left of them."""
    squares = [g.flatten(1).to(losses.dtype).square().sum(1) for g in backend.grads.values()]
    if losses.dtype.itemsize > 2 or backend.clip.per_layer:
        return own(losses)
    norms = torch.stack(squares).sum(0).sqrt().float()
    return norms, dict.fromkeys(backend.parameters, backend.clip.factors(norms))


def without_samples(own: Any, _: Hooked, inputs: Any, targets: Any) -> ClippedGradient:
    """Poisson sampling draws an empty batch, and the reshape fails."""
    if len(targets) == 0:
        raise RuntimeError("cannot reshape tensor of 0 elements")
    return own(inputs, targets)


def left_behind(own: Any, backend: Hooked, name: str, gradient: Tensor) -> None:
    """`.grad_sample` stays on the parameters."""
    own(name, gradient)
    backend.parameters[name].grad_sample = backend.grads[name]


def in_the_callers_grad(own: Any, backend: Hooked, *args: Any) -> Grads:
    """.backward() into `.grad`, which was the caller's."""
    for p in backend.parameters.values():
        p.grad = None
    return own(*args)


def unless_a_leaf(own: Any, _: Hooked, module: nn.Module, parameters: Any, x: Tensor, g: Tensor) -> None:
    """An input that requires a gradient is taken for one that another layer gave, and has no anchor."""
    if not (x.is_leaf and x.requires_grad):
        own(module, parameters, x, g)


def in_eval_mode(own: Any, backend: Hooked, *batch: Any) -> ClippedGradient:
    """Looks at the layers of a model in eval mode."""
    backend.model.eval()
    try:
        return own(*batch)
    finally:
        backend.model.train()


def pass_over(*_: Any) -> None:
    """What is to be refused is not looked for."""


MeanLoss = hooked_with(record=lambda own, _, name, g: own(name, g / len(g)))  # and nobody multiplies by B
#: Clips every parameter's gradient to C, as the blog's samples do: sensitivity C√L.
EachParameterByItself = with_factors(lambda b, name, *_: b.clip.factors(b.grads[name].flatten(1).norm(dim=1)))
#: ‖g‖/C in the place of C/‖g‖, as in a tutorial of BackPACK.
Inverted = with_factors(lambda b, _, norms, __: (norms / b.clip.max_grad_norm).clamp(max=1))
NeverClips = with_factors(lambda _, __, norms, ___: torch.ones_like(norms))
DividesZeroByZero = with_factors(lambda _, __, norms, factors: factors * (norms / norms))
PaddingModeIgnored = forgetting("padding_mode", "zeros")  # Opacus, private_CNN, BackPACK
PaddingIdxCounted = forgetting("padding_idx", None)  # Opacus
LastUseCounts = hooked_with(record=lambda _, b, name, g: b.grads.update({name: g}))  # fastDP
TakesAnyLoss = hooked_with(
    losses=lambda _, b, inputs, targets, size: b.loss_fn(forward(b.model, inputs), targets),
    norms_and_factors=lambda own, _, losses: own(losses.flatten()),
    sums=any_loss,
)
NormsOfTheModelsPrecision = hooked_with(norms_and_factors=norms_of_the_models_precision)
FailsWithoutSamples = hooked_with(__call__=without_samples)
LeavesGradientsBehind = hooked_with(record=left_behind)
UsesTheCallersGrad = hooked_with(sums=in_the_callers_grad)
#: What is done to parameters outside of layers is not looked for.
LayersAlone = hooked_with(problems=lambda _, b: list(Backend.problems(b)), refuse_other_reads=pass_over)
FirstLayersByTheirInput = hooked_with(arrived=unless_a_leaf)
InEvalMode = hooked_with(_clipped=in_eval_mode)
DerivativesUnseen = hooked_with(derivative_in_forward=pass_over)
#: Believes that samples stay apart once the first step has shown it.
LooksOnce = hooked_with(refuse_mixed_rows=lambda _, b, losses: setattr(b, "occasions", None))


class NeverLooks(LooksOnce):
    """Believes it at once."""

    trusted = True


class StopsAtTheFirstRegistered(Hooked):
    """Clips when the first registered layer's gradient arrives, whatever is still to come (fastDP)."""

    def begin(self) -> Grads:
        self.finished = False
        return {}

    def arrived(self, module: nn.Module, own: dict[str, nn.Parameter], x: Tensor, g: Tensor) -> None:
        if not self.finished:
            super().arrived(module, own, x, g)
        self.finished |= module is next(m for m in self.model.modules() if type(m) in KNOWN)


class StaleNorms(Hooked):
    """What was kept of a layer stays until it is written again (Opacus' ghost mode)."""

    def begin(self) -> Grads:
        self.fresh: set[str] = set()
        return getattr(self, "grads", {})

    def record(self, name: str, gradient: Tensor) -> None:
        if name not in self.fresh:
            self.grads.pop(name, None)
        self.fresh.add(name)
        super().record(name, gradient)

    def norms_and_factors(self, losses: Tensor) -> tuple[Tensor, Grads]:
        self.grads = {n: g for n, g in self.grads.items() if n in self.fresh or len(g) == len(losses)}
        return super().norms_and_factors(losses)

    def sums(self, losses: Tensor, factors: Grads) -> Grads:
        return {name: x for name, x in super().sums(losses, factors).items() if name in self.fresh}


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


def bias_norm_by_position(self: Broadcast, g: Tensor, route: Route) -> tuple[Tensor, None]:
    """Σ_t ‖g_t‖² in the place of ‖Σ_t g_t‖²."""
    return sum_of_squares(g), None


def gram_over_all_groups(self: ConvolutionWeight, g: Tensor, route: Route) -> tuple[Tensor, None]:
    """As if every output channel had seen every input channel (private_CNN, fastDP, private-transformers)."""
    a, g = (y.reshape(len(g), -1, self.positions).transpose(1, 2) for y in (patches(self.x, self.geometry()), g))
    return gram_product(a, g, 2**20), None


def gram_without_the_padding_mask(self: EmbeddingWeight, g: Tensor, route: Route) -> tuple[Tensor, None]:
    """[id_t = id_s] of padding ids counts (Opacus)."""
    ids, g = self.ids.flatten(1), g.reshape(len(g), -1, self.outputs)
    return ((g @ g.mT) * (ids[:, :, None] == ids[:, None])).sum((1, 2)), None


def no_cross_term(self: Rule, g: Tensor, other: Rule, other_g: Tensor) -> Tensor:
    """‖u‖² + ‖v‖² in the place of ‖u + v‖²."""
    return g.new_zeros(self.samples(g))


@dataclass(frozen=True)
class Mutant:
    """A fault, and a case that has to show it.

    `original` is a backend of ours, of which `method` of `rule` is replaced; or `Hooked`, of which it is a subclass.
    """

    fault: str
    case: str
    backend: type[Backend] | str
    rule: type[Rule] | None = None
    method: str = ""
    replacement: Callable[..., Any] | None = None


NORMS = "squares_and_reach"
MUTANTS = [
    Mutant("factor 1/B left in", "linear 2-D", MeanLoss),
    Mutant("clipping per parameter", "conv2d", EachParameterByItself),
    Mutant("clipping per parameter, black box", "sensitivity: flat", EachParameterByItself),
    Mutant("inverted factor", "linear 2-D", Inverted),
    Mutant("nothing clipped, black box", "sensitivity: global bound", NeverClips),
    Mutant("bias norm not summed over T", "linear 3-D", "ghost", Broadcast, NORMS, bias_norm_by_position),
    Mutant("bias norm of a convolution", "conv2d", "fastgradclip", Bias, NORMS, bias_norm_by_position),
    Mutant("groups ignored", "conv2d groups", "ghost", ConvolutionWeight, NORMS, gram_over_all_groups),
    Mutant("groups ignored, book-kept", "conv1d strided", "bk_ghost", ConvolutionWeight, NORMS, gram_over_all_groups),
    Mutant("padding mode ignored", "conv2d circular", PaddingModeIgnored),
    Mutant("padding mode ignored, reflect", "conv2d reflect", PaddingModeIgnored),
    Mutant("padding_idx counted", "embedding padding_idx", PaddingIdxCounted),
    Mutant("padding_idx counted, negative", "embedding negative padding_idx", PaddingIdxCounted),
    Mutant("head-first registration", "head registered first", StopsAtTheFirstRegistered),
    Mutant("second use overwrites the first", "reused", LastUseCounts),
    Mutant("second use overwrites the first, tied", "tied head", LastUseCounts),
    Mutant("two uses without their cross term", "reused", "ghost", LinearWeight, "inner", no_cross_term),
    Mutant("tied head without its cross term", "tied head", "bk_ghost", EmbeddingWeight, "inner", no_cross_term),
    Mutant("stale norms", "a layer skipped in a later step", StaleNorms),
    Mutant(
        "Gram without the padding mask",
        "embedding padding_idx",
        "ghost",
        EmbeddingWeight,
        NORMS,
        gram_without_the_padding_mask,
    ),
    Mutant("loss [B, 1] broadcast", "a loss shaped [B, 1]", TakesAnyLoss),
    Mutant("norm overflow in fp16", "norms beyond float16", NormsOfTheModelsPrecision),
    Mutant("empty batch raises", "batch: empty", FailsWithoutSamples),
    Mutant("zero gradient divided by its norm", "batch: zero gradient", DividesZeroByZero),
    Mutant("per-sample gradients left on parameters", "the model left as it was", LeavesGradientsBehind),
    Mutant("the caller's .grad overwritten", "the model left as it was", UsesTheCallersGrad),
    *(Mutant(f"layers alone: {case}", case, LayersAlone) for case in (*BARE_USES, *CUSTOM)),
    Mutant("first layers told by their input", "hidden state with a gradient", FirstLayersByTheirInput),
    Mutant("looked at in eval mode", "a layer of training alone", InEvalMode),
    Mutant("layers of the first step", "a layer that a later step takes first", LayersOfTheFirstStep),
    Mutant("a derivative in the forward pass", "a derivative of a derivative", DerivativesUnseen),
    *(Mutant(f"never looks: {case}", case, NeverLooks) for case in MIXING),
    Mutant("looks once", LATE, LooksOnce),
]


def test_the_original_is_exact_or_refuses():
    """On the cases that show its mutants, and on the whole contract."""
    shown = [mutant.case for mutant in MUTANTS if mutant.rule is None]
    results = {verdict.case: verdict for verdict in conformance(Hooked, only=dict.fromkeys([*shown, *CHECKS]))}
    assert {case: verdict.reason for case, verdict in results.items() if verdict.result == "wrong"} == {}
    refused = {case for case, verdict in results.items() if verdict.result != "exact"}
    assert refused <= set(REFUSALS) | set(BARE_USES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.fault)
def test_no_seeded_fault_survives(mutant: Mutant, monkeypatch):
    backend = mutant.backend if isinstance(mutant.backend, type) else load_backend(mutant.backend)
    if mutant.rule is not None:
        monkeypatch.setattr(norms, "SMALL", 2**40)  # else both norm and sum of these small gradients come of one tensor
        assert mutant.method in vars(mutant.rule) or hasattr(mutant.rule, mutant.method)
        (verdict,) = conformance(backend, only=[mutant.case])
        assert verdict.result == "exact"
        monkeypatch.setattr(mutant.rule, mutant.method, mutant.replacement)
    (verdict,) = conformance(backend, only=[mutant.case])
    assert verdict.result == "wrong" and verdict.reason, f"{mutant.fault} survives {mutant.case}"
    assert verdict.raised == (mutant.backend is FailsWithoutSamples)


@pytest.mark.parametrize("backend", [MeanLoss, EachParameterByItself, Inverted])
def test_a_mutant_is_found_out_by_its_first_batch_too(backend):
    model, x, y, loss = classifier("cpu")
    with backend(model, loss, clip=Flat(0.05)) as b, pytest.raises(WrongGradient, match="hooked is not exact on this"):
        b(x, y)


# Parts of ours, switched off


def blind_to_reads(patch: pytest.MonkeyPatch) -> None:
    """Reads of parameters that the tape did not see are passed over."""

    def blind(*graph: Any) -> list[Any]:
        unrecorded(*graph)  # which also tells what has to arrive
        return []

    patch.setattr(tape_backends, "unrecorded", blind)


def blind_after_the_first_step(patch: pytest.MonkeyPatch) -> None:
    """The graph of the first step alone is looked at."""
    steps = []

    def once(*graph: Any) -> list[Any]:
        steps.append(unrecorded(*graph))
        return steps[0]

    patch.setattr(tape_backends, "unrecorded", once)


def without_functions(patch: pytest.MonkeyPatch) -> None:
    """Custom functions are not shown to the tape, and reads that it did not see are passed over."""
    patch.setattr(custom_functions, "_innermost_sees_functions", lambda: False)
    blind_to_reads(patch)


def without_later_functions(patch: pytest.MonkeyPatch) -> None:
    """Custom functions are not shown to the tape, and the graph of the first step alone is looked at."""
    without_functions(patch)
    blind_after_the_first_step(patch)


def without_leaves(patch: pytest.MonkeyPatch) -> None:
    """A leaf that the model made leads to nothing, and what does not arrive is not missed."""
    expect = Arrivals.expect
    patch.setattr(Arrivals, "expect", lambda self, uses, leaves, *given: expect(self, uses, [], *given))
    patch.setattr(Arrivals, "require_complete", lambda self: None)


def without_renewal(patch: pytest.MonkeyPatch) -> None:
    """What is made of parameters stays what it was when it is changed in place."""
    patch.setattr(Tape, "_renewed", lambda self, tensor: self._sources.get(id(tensor)))
    blind_to_reads(patch)


def without_rows(patch: pytest.MonkeyPatch) -> None:
    """Gradients in the rows of other samples are passed over, and no later step is run again."""
    patch.setattr(tape_backends, "mixed_rows", lambda *step: None)
    patch.setattr(Occasions, "_is_due", lambda self, what: False)


def without_others(patch: pytest.MonkeyPatch) -> None:
    """What changes with the other samples is passed over."""
    patch.setattr(base, "mixed", lambda *step: None)


OURS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (without_functions, "a custom function beside another use", "exact"),
    (blind_to_reads, "a derivative of a derivative", "refuses"),
    (without_later_functions, "a custom function from the second step on", "exact"),
    (without_leaves, "hidden state above a frozen layer", "exact"),
    (without_renewal, "a bias changed in place", "exact"),
    (without_others, "samples mix: rolled by two", "refuses"),
    (without_rows, "samples mix: from the second step on", "refuses"),
]


@pytest.mark.parametrize(("switch_off", "case", "before"), OURS, ids=lambda v: getattr(v, "__name__", v))
def test_no_part_of_ours_is_idle(switch_off: Any, case: str, before: str, monkeypatch):
    (original,) = conformance(load_backend("bk_mixed"), only=[case])
    assert original.result == before, original.reason
    switch_off(monkeypatch)
    (verdict,) = conformance(load_backend("bk_mixed"), only=[case])
    assert verdict.result == "wrong" and not verdict.raised, f"{switch_off.__doc__} survives {case}"
