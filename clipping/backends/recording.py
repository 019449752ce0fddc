"""Clip losses that the caller computed: the forward pass is recorded, and no loss function is needed.

    recording = Recording(backend, inputs, batch_size)
    with recording:                 # around each forward pass
        outputs = model(inputs)
    losses = ...                    # [B], of the outputs; may be computed outside `with`
    gradient = recording.finish(losses)

A parameter that is read outside `with` is found in the graph of the losses and refused. Microbatch needs no tape,
because it differentiates one loss after the other. It records one only to check that samples do not mix.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from clipping.backends.base import Backend
from clipping.backends.microbatch import Microbatch
from clipping.backends.tape import BkMixed, TapeBackend
from clipping.checks.rerun import coarsest
from clipping.checks.sample_independence import Occasions, mixed_rows
from clipping.checks.verification import Agreement, Limit, WrongGradient, compare, limit_of
from clipping.core.autograd import hooks_of
from clipping.core.batches import map_tensors, tensors_of
from clipping.core.clip_functions import ClipFunction
from clipping.core.dtypes import formats
from clipping.core.reference import Sums, gradients, with_zeros
from clipping.core.types import ClippedGradient, Parameters, UnsupportedModel
from clipping.numerics.products import full_precision_on_cpu
from clipping.numerics.rounding_bounds import rounds_operands
from clipping.provenance.derived_parameters import mark_data
from clipping.tape.compiled import called_from_compiled_code, compiled_modules
from clipping.tape.graph import read_before, unrecorded
from clipping.tape.record import Tape

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Tolerance of verification, by the dtype of the computation. Both sides use one graph; only the sums may differ."""


class Recording:
    """Records the forward passes of one batch (one, or several of the same samples) and clips their losses.

    Args:
        backend: a tape backend or microbatch, made for the model. Its loss function is never called.
        inputs: every tensor [B, ...].
        batch_size: B >= 1; or 0 with a row of zeros as inputs, in a sharded model: see `clipping.distributed.fsdp`.
        by_hand: called when a backward pass other than `finish`'s reaches a parameter; it may raise.
        occasions: when to check that samples stay apart (`clipping.checks.sample_independence`); None for never.
        after: `ended` of an earlier recording that was dropped for this one; 0 if there was none.

    Attributes:
        ended: the number that autograd gives to the next node after the last forward pass.

    Methods take:
        outputs: of the model.
    """

    def __init__(
        self,
        backend: Backend,
        inputs: Any,
        batch_size: int,
        by_hand: Callable[[], None] | None = None,
        occasions: Occasions | None = None,
        after: int = 0,
    ) -> None:
        self.backend, self.batch_size, self.occasions = backend, batch_size, occasions
        self.parameters: Parameters = {n: p for n, p in backend.members().items() if p.requires_grad}
        self.passes, self._entered = 1, 0
        self._after, self.ended = after, 0
        self.tape: Tape | None = None
        if isinstance(backend, TapeBackend):
            rows = max(1, batch_size)
            self.tape = Tape(self.parameters, inputs, rows, backend.stand_in, lets_go=backend.lets_go)
            self.tape.arrivals.by_hand = by_hand
        elif occasions is not None and not any(compiled_modules(backend.model)) and not called_from_compiled_code():
            self.tape = Tape(self.parameters, inputs, batch_size)

    def again(self, inputs: Any) -> None:
        """Expect another forward pass of the same samples; the losses may depend on all passes."""
        self.passes += 1
        if self.tape is not None:
            for x in tensors_of(inputs):
                mark_data(x)

    def __enter__(self) -> Recording:
        self._entered += 1  # contexts nest: a recorded loss may run the model
        if self.tape is not None and self._entered == 1:
            self.tape.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._entered -= 1
        self.ended = torch.autograd._get_sequence_nr()
        if self.tape is not None and not self._entered:
            self.tape.__exit__(kind, error, tb)

    def given(self, outputs: Any) -> Any:
        """Replace outputs that are a parameter copied for each sample by activations. Call it before `__exit__`."""
        if self.tape is None or not any(map(self.tape.is_source, tensors_of(outputs))):
            return outputs
        return map_tensors(self.tape.given, outputs)

    def finish(self, losses: Tensor, *, verify: bool = False) -> ClippedGradient:
        """Run the backward pass and clip. Frees the graph of the losses.

        Args:
            losses: [B], with their graph; loss i depends on sample i alone.
            verify: compare with autograd's gradients of the first two losses, and the sum with an ordinary backward
                pass of Σ_i c_i ℓ_i. All use the same graph, so only rounding may differ.

        Raises:
            ValueError: the losses do not have shape [B].
            UnsupportedModel: the backend cannot treat a use of a parameter exactly, or did not see it.
            WrongGradient: the gradients differ, for example because a loss mixes samples.
        """
        if tuple(losses.shape) != (self.batch_size,):
            raise ValueError(f"expected one loss a sample, shape [{self.batch_size}], got {list(losses.shape)}")
        try:
            with torch.enable_grad():
                if not isinstance(self.backend, TapeBackend):
                    with nullcontext() if self.tape is None else self.tape.replaying():
                        self._look(losses)
                        begin = None if self.tape is None else self.tape.arrivals.begin
                        return one_by_one(losses, self.parameters, self.backend.clip, begin=begin)
                assert self.tape is not None
                verify = verify and not self.backend.sharded
                with self.backend.explained():
                    result = self.backend.clipped(
                        self.tape, losses, self.parameters, keep_graph=verify, occasions=self.occasions
                    )
                if verify:
                    self.tape.arrivals.close()
                    with self.tape.replaying(), full_precision_on_cpu():
                        self._verify(result, losses)
                return result
        finally:
            self.close()

    def close(self) -> None:
        """Remove every hook and free what was recorded."""
        if self.tape is not None:
            self.tape.close()
            self.tape.uses.clear()
            self.tape = None

    def _look(self, losses: Tensor) -> None:
        """Check a backend without a tape of its own. Uses that the tape cannot follow are skipped."""
        stale = read_before(losses, self._after, self.parameters) if self._after else []
        if stale:
            raise UnsupportedModel(self.backend.name, stale)
        if self.tape is not None:
            self.tape.arrivals.state_of = self.backend.moving.of_hooks
            unrecorded(losses, self.tape, self.parameters)  # tells the tape which gradients to expect
            problem = mixed_rows(self.tape, losses, self.occasions, owned=False)
            if problem is not None:
                raise UnsupportedModel(self.backend.name, [problem])

    def _verify(self, result: ClippedGradient, losses: Tensor) -> None:
        assert self.tape is not None
        begin = self.tape.arrivals.begin
        clip, names = self.backend.clip, list(self.parameters)
        tolerance = coarsest([losses, *self.parameters.values()], TOLERANCE)
        if any(rounds_operands(losses, library) for library in ("cublas", "cudnn")):  # to about float16's precision
            tolerance = max(tolerance, TOLERANCE[torch.float16])
        limit = Limit(min(tolerance, limit_of(formats(losses)).norm), tolerance)
        assert result.norms is not None
        few, hooks = min(2, self.batch_size), hooks_of(self.parameters.values())
        bounds = result.bounds
        some = None if bounds is None else bounds[:few]
        reference = one_by_one(losses[:few], self.parameters, clip, some, keep_graph=True, begin=begin)
        assert reference.norms is not None
        if hooks:  # one may remove itself
            again = one_by_one(losses[:few], self.parameters, clip, some, keep_graph=True, begin=begin)
            if not (differs := compare(again, reference, clip)).within(limit):
                raise WrongGradient(self.backend.name, differs, limit, hooks)
        grads = reference.grads if few == self.batch_size else result.grads
        if few < self.batch_size and not clip.per_layer:
            factors = clip.factors(result.norms if bounds is None else bounds).to(losses.dtype)
            begin()
            grads = with_zeros(gradients((factors * losses).sum(), self.parameters, keep_graph=True), self.parameters)
        found = ClippedGradient({n: result.grads[n] for n in names}, result.norms[:few], losses[:few].detach())
        agreement: Agreement = compare(found, replace(reference, grads=grads), clip)
        if not agreement.within(limit):  # a hook may bound gradients; then weighted losses have other gradients
            whole = one_by_one(losses, self.parameters, clip, bounds, keep_graph=True, begin=begin)
            agreement = compare(result, whole, clip)
        if not agreement.within(limit):
            raise WrongGradient(self.backend.name, agreement, limit, hooks)


def recordable(cls: type[Backend]) -> bool:
    """Return whether this backend can clip losses that its caller computed."""
    return issubclass(cls, (TapeBackend, Microbatch))


def for_recording(
    cls: type[Backend], model: nn.Module, clip: ClipFunction, *, timing: bool = False, expected: int = 0
) -> Backend:
    """Make a backend for recording. Its plan is by formula, the same in every run, unless `timing` is set.

    Args:
        cls: a backend for which `recordable` is true.
        timing: whether `bk_mixed` times its routes.
        expected: mean number of records in a batch; 0 if unknown.
    """
    assert recordable(cls)
    options: dict[str, Any] = {"timing": timing} if issubclass(cls, BkMixed) else {}
    backend = cls(model, _no_loss, clip=clip, verify=False, compile=False, **options)
    backend.expected = expected
    return backend


def one_by_one(
    losses: Tensor,
    parameters: Parameters,
    clip: ClipFunction,
    bounds: Tensor | None = None,
    *,
    keep_graph: bool = False,
    begin: Callable[[], None] | None = None,
) -> ClippedGradient:
    """Σ_i c_i g_i by its definition: one backward pass for each loss, through one graph.

    Args:
        bounds: upper bounds of the norms, to clip by; None to clip by the norms.
        begin: called before each pass.
    """
    sums = Sums(parameters)
    norms, last = [], losses.shape[0] - 1
    for i in range(losses.shape[0]):
        if begin is not None:
            begin()
        found = gradients(losses[i], parameters, keep_graph=keep_graph or i < last)
        norms.append(sums.add(with_zeros(found, parameters), clip, losses, None if bounds is None else bounds[i]))
    return ClippedGradient(sums.rounded(), torch.cat(norms), losses.detach(), bounds)


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise RuntimeError("expected losses that the caller computed: this backend records, it is not called")
